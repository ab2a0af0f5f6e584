"""What the demo is judged by: accuracies of heads on frozen features, and a few words.

Zero-shot is measured on rows that no seed of the demo experiment tests on. The three heads are
measured on splits of the gate's own, which overlap with those of the experiment.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer

from .captions import PROMPT
from .images import Demo
from .model import image_views, text_features
from .sets import CLASSES, DOMAINS

VIEWS = ("pooled", "pooled, full stop", "mean patch", "mean patch, full stop")
POOLED, POOLED_STOP, PATCH, PATCH_STOP = VIEWS
HEADS = ("zero-shot", "probe", "head of the other three", "head of all four")
# Pooled zero-shot of the first shipped model, whose patches had met no text, on the same rows.
FLOOR = {"noto": 49.8, "twemoji": 50.5, "fluent-flat": 45.8, "high-contrast": 29.6}
# Words that are no class name, with the class they belong to: does the text tower know words?
WORDS = {
    word: label
    for label, words in {
        "mammal": "zebra elephant",
        "bird": "penguin owl",
        "sea animal": "shark octopus",
        "insect": "butterfly ant",
        "fruit": "banana cherries",
        "vegetable": "carrot broccoli",
        "meal": "pizza",
        "drink": "beer",
        "plant": "tree",
        "vehicle": "truck train",
        "building": "castle",
        "clothing": "shoe",
        "face": "grinning",
        "hand": "fist",
        "person": "teacher",
        "tool": "hammer",
    }.items()
    for word in words.split()
}
ENOUGH_WORDS = 16  # of them, as the first shipped model had


@dataclass(frozen=True)
class Scores:
    """Per cent for each measure and domain, and the words that are nearest a wrong class."""

    accuracy: dict[str, dict[str, float]]
    missed: dict[str, str]

    @property
    def n_known_words(self) -> int:
        return len(WORDS) - len(self.missed)

    def mean(self, name: str) -> float:
        return float(np.mean([*self.accuracy[name].values()]))

    def table(self) -> str:
        """The numbers as the model card has them."""
        missed = ", ".join(f"{word} (nearest {name})" for word, name in self.missed.items())
        return "\n".join(
            [
                *self.columns("untested rows", VIEWS),
                *self.columns("own splits", HEADS),
                f"words: {self.n_known_words}/{len(WORDS)}; missed: {missed or 'none'}",
            ]
        )

    def columns(self, title: str, names: tuple[str, ...]) -> list[str]:
        lines = [f"| {title} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
        for domain in DOMAINS:
            cells = [f"{self.accuracy[name][domain]:.1f}" for name in names]
            lines.append(f"| {domain} | {' | '.join(cells)} |")
        return [*lines, f"| mean | {' | '.join(f'{self.mean(name):.1f}' for name in names)} |"]

    def failures(self) -> list[str]:
        """Which demands are not met; none for a model that may be shipped."""
        pooled = self.accuracy[POOLED]
        demands = {
            "zero-shot at least three times chance": min(pooled.values()) >= 300 / len(CLASSES),
            "zero-shot no lower than it was": all(pooled[d] >= FLOOR[d] - 0.05 for d in DOMAINS),
            "mean patch at least 0.85 of pooled": self.mean(PATCH) >= 0.85 * self.mean(POOLED),
            "a full stop changes pooled by two points at most": self.gap(POOLED, POOLED_STOP) <= 2,
            "a full stop changes mean patch by two at most": self.gap(PATCH, PATCH_STOP) <= 2,
            "probe ten points above zero-shot": self.mean("probe") >= self.mean("zero-shot") + 10,
            "head of others above zero-shot": self.mean(HEADS[2]) > self.mean("zero-shot"),
            f"{ENOUGH_WORDS} words nearest their class": self.n_known_words >= ENOUGH_WORDS,
        }
        return [name for name, is_met in demands.items() if not is_met]

    def gap(self, first: str, second: str) -> float:
        return abs(self.mean(first) - self.mean(second))


def zero_shot(model: CLIPModel, tokenizer: CLIPTokenizer, views: tuple[Tensor, Tensor]) -> dict[str, NDArray[np.int64]]:
    """The class that each view of the pictures is nearest to, by texts of both endings."""
    ends = [text_features(model, tokenizer, [PROMPT.format(name) + end for name in CLASSES]) for end in ("", ".")]
    pairs = [(view, texts) for view in views for texts in ends]
    return {name: (view @ texts.T).argmax(1).numpy() for name, (view, texts) in zip(VIEWS, pairs, strict=True)}


def wrong_words(model: CLIPModel, tokenizer: CLIPTokenizer) -> dict[str, str]:
    """The words that are nearest another class than theirs, with that class."""
    prompts = text_features(model, tokenizer, [PROMPT.format(name) for name in CLASSES])
    named = text_features(model, tokenizer, [PROMPT.format(word) for word in WORDS])
    nearest_names = [list(CLASSES)[i] for i in (named @ prompts.T).argmax(1)]
    return {w: n for (w, c), n in zip(WORDS.items(), nearest_names, strict=True) if c != n}


@torch.no_grad()
def measure_gate(demo: Demo, model: CLIPModel, tokenizer: CLIPTokenizer, seeds: int) -> Scores:
    """Zero-shot, probe on own rows, heads of other and of all domains: means over the splits."""
    results: dict[str, dict[str, list[float]]] = {}

    def add_score(name: str, domain: str, value: float) -> None:
        results.setdefault(name, {}).setdefault(domain, []).append(value)

    features, guesses = {}, {}
    for domain in DOMAINS:
        views = image_views(model, demo.pixels[domain])
        guesses_by_view = zero_shot(model, tokenizer, views)
        features[domain], guesses[domain] = views[0].numpy(), guesses_by_view[POOLED]
        free = demo.untested[domain]
        for name, guess in guesses_by_view.items():
            add_score(name, domain, percent_correct(guess[free], demo.labels[domain][free]))
    for seed in range(seeds):
        split = {d: demo.split(d, seed) for d in DOMAINS}
        train = {d: (features[d][split[d][0]], demo.labels[d][split[d][0]]) for d in DOMAINS}
        shared = head([*train.values()])
        for domain in DOMAINS:
            _, val, test = split[domain]
            x, y = features[domain], demo.labels[domain]
            add_score("zero-shot", domain, percent_correct(guesses[domain][test], y[test]))
            heads = [head([train[domain]], c) for c in (3, 10, 30, 100)]
            best = max(heads, key=lambda candidate: candidate.score(x[val], y[val]))
            add_score("probe", domain, percent_correct(best.predict(x[test]), y[test]))
            other_domains = head([rows for d, rows in train.items() if d != domain])
            add_score("head of the other three", domain, percent_correct(other_domains.predict(x[test]), y[test]))
            add_score("head of all four", domain, percent_correct(shared.predict(x[test]), y[test]))
    accuracy = {
        name: {domain: float(np.mean(values)) for domain, values in row.items()} for name, row in results.items()
    }
    return Scores(accuracy, wrong_words(model, tokenizer))


def head(rows: list[tuple[NDArray[np.float32], NDArray[np.int64]]], c: float = 10) -> LogisticRegression:
    x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
    return LogisticRegression(C=c, max_iter=300).fit(x, y)


def percent_correct(guess: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """Accuracy in per cent."""
    return 100 * float((guess == labels).mean())
