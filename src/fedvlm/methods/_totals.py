"""TOFA's fixed-point totals as what they say per row, class by class, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.maths import gaussian_classes
from fedvlm.methods._texts import TERMS


def to_means(self: Any, upload: Tensors, reference_means: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Class means and a scatter, means of votes, and who holds a class at all."""
    statistics: dict[str, tuple[Tensor, Tensor]] = {}
    if "counts" in upload:
        counts = upload["counts"].double()
        sums, second = (gaussian_classes.from_fixed_point(upload[k], self.max_samples) for k in ("sums", "moments"))
        means, scatter = gaussian_classes.means_and_scatter(counts, sums, second, reference_means.get("means"))
        statistics = {"means": (means, counts), "scatter": (scatter[None], counts.sum()[None])}
    if "scores" in upload:
        voters = upload["voters"].double()
        terms = gaussian_classes.from_fixed_point(upload["scores"], TERMS)
        statistics["scores"] = (terms / voters.clamp(min=1)[:, None], voters)
    if "holders" in upload:
        statistics["holders"] = (upload["holders"][:, None][:, :0].double(), upload["holders"].double())
    return statistics


def from_means(self: Any, means: Mapping[str, tuple[Tensor, Tensor]]) -> Tensors:
    out: Tensors = {}
    if "means" in means:
        counts = means["means"][1].round()
        sums, second = gaussian_classes.sums_from_moments(counts, means["means"][0], means["scatter"][0][0])
        out["counts"] = counts.long()
        step = gaussian_classes.fixed_point_step(self.max_samples)
        out |= {"sums": (sums / step).round().long(), "moments": (second / step).round().long()}
    if "scores" in means:
        terms, voters = means["scores"][0], means["scores"][1].round()
        out["voters"] = voters.long()
        out["scores"] = (terms * voters[:, None] / gaussian_classes.fixed_point_step(TERMS)).round().long()
    if "holders" in means:
        out["holders"] = means["holders"][1].round().long()
    return out
