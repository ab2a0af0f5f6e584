"""What is chosen is chosen here: on the demo's concepts as OpenMoji draws them.

No drawing of OpenMoji is trained on, shipped, or a row of the demo, so the demo stays unseen.
"""

from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedShuffleSplit, cross_val_score
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer

from .gate import PATCH, POOLED, VIEWS, WORDS, percent_correct, wrong_words, zero_shot
from .model import image_views, normalized


@dataclass(frozen=True)
class Validated:
    """Per cent, mean of the coloured and the black drawings; `words` is a number of words."""

    words: int
    pooled: float
    pooled_stop: float
    patch: float
    patch_stop: float
    probe: float

    def __str__(self) -> str:
        words, pooled, pooled_stop, patch, patch_stop, probe = astuple(self)
        return (
            f"{POOLED} {pooled:.1f} (full stop {pooled_stop:.1f}), "
            f"{PATCH} {patch:.1f} ({patch_stop:.1f}), probe {probe:.1f}, words {words}"
        )


class Validation:
    """OpenMoji in colour, and in black where it is dark."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        drawn = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        black = (drawn.mean(1, keepdim=True) > 0.6).float().expand_as(drawn)
        self.styles: list[Tensor] = [normalized(drawn), normalized(black)]
        self.labels = labels

    @torch.no_grad()
    def __call__(self, model: CLIPModel, tokenizer: CLIPTokenizer) -> Validated:
        scores: dict[str, list[float]] = {name: [] for name in (*VIEWS, "probe")}
        # as many rows to learn from as a client has
        split = StratifiedShuffleSplit(5, train_size=0.6, random_state=0)
        for pixels in self.styles:
            views = image_views(model, pixels)
            for name, guess in zero_shot(model, tokenizer, views).items():
                scores[name].append(percent_correct(guess, self.labels))
            probe = LogisticRegression(C=10, max_iter=300)
            parts = cross_val_score(probe, views[0].numpy(), self.labels, cv=split)
            scores["probe"].append(100 * float(parts.mean()))
        means = [float(np.mean(values)) for values in scores.values()]
        return Validated(len(WORDS) - len(wrong_words(model, tokenizer)), *means)
