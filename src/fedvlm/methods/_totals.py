"""TOFA's fixed-point totals as what they say per row, class by class, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.maths import gaussian
from fedvlm.methods._texts import TERMS


def per_row(self: Any, upload: Tensors, found: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Class means and a scatter, means of votes, and who holds a class at all."""
    said: dict[str, tuple[Tensor, Tensor]] = {}
    if "counts" in upload:
        counts = upload["counts"].double()
        sums, second = (
            gaussian.from_fixed(upload[k], self.max_samples) for k in ("sums", "moments")
        )
        means, scatter = gaussian.moments(counts, sums, second, found.get("means"))
        said = {"means": (means, counts), "scatter": (scatter[None], counts.sum()[None])}
    if "scores" in upload:
        voters = upload["voters"].double()
        terms = gaussian.from_fixed(upload["scores"], TERMS)
        said["scores"] = (terms / voters.clamp(min=1)[:, None], voters)
    if "holders" in upload:
        said["holders"] = (upload["holders"][:, None][:, :0].double(), upload["holders"].double())
    return said


def whole(self: Any, said: Mapping[str, tuple[Tensor, Tensor]]) -> Tensors:
    out: Tensors = {}
    if "means" in said:
        counts = said["means"][1].round()
        sums, second = gaussian.sums_of(counts, said["means"][0], said["scatter"][0][0])
        out["counts"] = counts.long()
        step = gaussian.quantum(self.max_samples)
        out |= {"sums": (sums / step).round().long(), "moments": (second / step).round().long()}
    if "scores" in said:
        terms, voters = said["scores"][0], said["scores"][1].round()
        out["voters"] = voters.long()
        out["scores"] = (terms * voters[:, None] / gaussian.quantum(TERMS)).round().long()
    if "holders" in said:
        out["holders"] = said["holders"][1].round().long()
    return out
