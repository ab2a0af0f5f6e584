"""An encoder of one's own: the mean colours of a grid, of which neither weights nor texts exist.

Run it: python examples/new_encoder.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL.Image import Image

import fedvlm
from fedvlm.encoders import Kind, Vectors, register


@dataclass(frozen=True)
class Cells:
    """From a decoded image to what `embed` takes, in any process."""

    side: int

    def __call__(self, image: Image) -> Any:
        return np.asarray(image.resize((self.side, self.side)), np.float32) / 255


class Colours:
    offers = frozenset({"image"})  # so methods that start from texts are refused
    scale = 20.0

    def __init__(self, side: str) -> None:
        self.name = f"colours:{side}"
        self.preprocess = Cells(int(side))
        self.dim = 3 * int(side) ** 2 + 1
        self.identity = {"kind": "colours", "side": side, "version": "1"}  # the cache's key

    def embed(self, batch: Sequence[Any], patches: bool) -> Vectors:
        flat = np.stack(batch).reshape(len(batch), -1)
        light = np.full((len(flat), 1), 0.1, np.float32)  # a black image has a direction too
        return Vectors(np.hstack([flat, light]), None)

    def embed_text(self, sentences: Sequence[str]) -> Any:
        raise NotImplementedError("it does not offer text")


register(Kind("colours:SIDE", "mean colours of a grid", ("image",), __name__, "Colours"))


def main() -> None:
    method = {"name": "fedavg", "head": "random", "lr": 0.1}
    with TemporaryDirectory() as folder:
        print(fedvlm.run(method, encoder="colours:6", out=f"{folder}/run", smoke=True).table())


if __name__ == "__main__":
    main()
