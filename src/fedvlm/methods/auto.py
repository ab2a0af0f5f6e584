"""A good classifier without tuning, in four communication rounds.

All parts are linear in the embedding and are mixed on their logits, by the likelihood of validation samples, so that a
client's classifier is one linear head. Rounds have three phases:
- statistics: clients send class sums and Σ x xᵀ, as for `ridge`, and the gradient at the zero-shot head (or at zero).
- gradients: the server sends a logistic regression at several ridges at once, and clients send the gradient at each.
  The first of them solve ridge's equations, with the gradient on the right; later ones correct the curvature.
- mixes: clients send the validation loss of mixes of the newest regressions with text and Gaussian classes.
Each client then mixes the shared head, a logistic regression on its samples that a ridge draws to the shared head, and
its class frequencies, and its images without a label pull the mix to Gaussian classes (maths/unlabelled.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors, register
from fedvlm.core.schema import Range, ranged_field
from fedvlm.maths import gaussian_classes, head_mixing
from fedvlm.maths.logistic_regression import Evaluations, Head, path_points, split_head
from fedvlm.maths.unlabelled import Labelled
from fedvlm.methods import _logistic
from fedvlm.methods._logistic import SERVER, load_state, save_state
from fedvlm.methods._settings import StatisticsSettings, statistics_traits

MAX_HEAD_NORM = 256.0  # of a class's weights less the anchor's, in a verified sum (tools/verified_bounds.py)
MAX_NORM_PER_CLASS = 24.0  # times the number of classes, if that is more: without text, where the curvature is less
KNOWN = "known "  # prefix of the server's tensors about points that clients have evaluated


class ServerState(NamedTuple):
    """What the server keeps during the rounds; none of it is left after the last."""

    round: Tensor  # rounds that are done
    anchor: Tensor  # (classes, dim + 1): the zero-shot head, or zeros without text
    gram: Tensor  # packed Σ x xᵀ over the samples of all clients, with a last coordinate of 1
    gaussian: Tensor  # (classes, dim + 1): the head of the Gaussian classes
    points: Tensor  # (points, classes, dim + 1): what the clients evaluate next


def max_head_norm(anchor: Tensor) -> float:
    """Return the limit of `check_state`; the anchor of an encoder without text is zero."""
    return MAX_HEAD_NORM if anchor.any() else max(MAX_HEAD_NORM, MAX_NORM_PER_CLASS * len(anchor))


@register
@dataclass(frozen=True)
class Auto(StatisticsSettings):
    rounds: int = ranged_field(4, Range(2))  # the first is for statistics, the last for mixes

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        anchor, size = _logistic.zero_shot_head(frozen), frozen.dim + 1
        gram, first = torch.zeros(size * (size + 1) // 2), torch.zeros((), dtype=torch.int64)
        state = ServerState(first, anchor, gram, torch.zeros_like(anchor), anchor[None])
        known = Evaluations(*(torch.zeros(0, *shape) for shape in (anchor.shape, anchor.shape, (), ())))
        head = _logistic.head_tensors(anchor)
        local = {f"{key} change": torch.zeros_like(value) for key, value in head.items()}
        local["mix weights"] = torch.eye(4)[0]
        return {**head, **save_state(SERVER, state), **save_state(KNOWN, known)}, local

    def send(self, shared: Tensors, id: str) -> Tensors:
        """Send the head, and what the coming round evaluates beside it: the keys say which phase it is."""
        head = {key: shared[key] for key in ("weight", "bias")}
        if not _logistic.is_server_state(shared):
            return head
        state = load_state(SERVER, ServerState, shared)
        if int(state.round) == 0:
            return head  # statistics
        if int(state.round) < self.rounds - 1:
            return {**head, "points": state.points}  # gradients
        return {**head, "candidates": state.points, **_logistic.gaussian_part(state.gaussian)}  # mixes

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        if "candidates" in sent:
            candidates, fixed = _logistic.heads_to_mix(sent, _logistic.zero_shot_head(frozen))
            losses = head_mixing.mix_losses(candidates, fixed, client.val_x, client.val_y)
            has_enough = (client.y >= 0).sum() >= self.min_class_samples
            return {"mix losses": torch.where(has_enough, losses, 0.0).flatten()}, local
        heads = [_logistic.head_tensors(point) for point in sent["points"]] if "points" in sent else [sent]
        sums = [_logistic.local_statistics(head, client, self.min_class_samples) for head in heads]
        upload = {key: torch.stack([head_sums[key] for head_sums in sums]) for key in sums[0]}
        if "points" not in sent:
            upload |= _logistic.class_statistics(client, len(frozen.classes), self.min_class_samples, sent)
        return upload, local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        total, state = _logistic.sum_uploads(uploads), load_state(SERVER, ServerState, shared)
        if "mix losses" in total:
            sent = self.send(shared, "")
            heads = _logistic.heads_to_mix(sent, state.anchor)
            return _logistic.head_tensors(head_mixing.average_mixes(*heads, total["mix losses"]))
        if "counts" in total:
            gram = _logistic.total_gram(total)
            moments = _logistic.bound_moments(total, gram)
            rule = gaussian_classes.fit_discriminant(moments, gaussian_classes.ridge(moments, 1.0))
            state = state._replace(gram=gram.float(), gaussian=Head(rule.weight, rule.bias).joined().float())
        known = _logistic.add_evaluations(load_state(KNOWN, Evaluations, shared), state.points, total)
        mean = torch.einsum("p,pcd->cd", (-known.val_losses).softmax(0), known.points)
        gram, anchor = gaussian_classes.unpack(state.gram.double(), state.anchor.shape[1]), state.anchor.double()
        change = path_points(known, gram, anchor) - anchor
        norms = change.norm(dim=-1).amax(-1)[:, None, None].clamp(min=1e-30)
        points = anchor + change * (max_head_norm(anchor) / norms).clamp(max=1)
        state = state._replace(round=state.round + 1, points=points.float())
        return {**_logistic.head_tensors(mean), **save_state(SERVER, state), **save_state(KNOWN, known)}

    def check_state(self, before: Tensors, after: Tensors, members: int) -> None:
        """Refuse heads so steep that their gradient is that of a few samples."""
        if _logistic.is_server_state(after):
            state = load_state(SERVER, ServerState, after)
            _logistic.check_norms(self.name, state.points - state.anchor, max_head_norm(state.anchor))

    def covered_classes(self, upload: Tensors) -> Tensor:
        """Return (classes,) True where the upload depends on the class: by statistics, or by a gradient."""
        if "counts" in upload:
            return upload["counts"][:-1] > 0
        return upload.get("gradient", torch.zeros(1, 1, 1)).abs().amax((0, 2)) > 0

    def class_means(self, upload: Tensors) -> Tensor | None:
        """Return the (classes, dim) class means that can be read from the upload."""
        if "sums" not in upload:
            return None
        means: Tensor = (upload["sums"] / upload["counts"].clamp(min=1)[:, None])[:-1]
        return means

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        shared, start_head = Head(sent["weight"], sent["bias"]), split_head(_logistic.zero_shot_head(frozen))
        labelled = Labelled(client.x, client.y, client.val_x, client.val_y)
        mix = head_mixing.mix_client(shared, start_head, labelled, client.unlabelled, head_mixing.MixPrior())
        own = split_head(mix.own)
        changes = {"weight change": own.weight, "bias change": own.bias, "mix weights": mix.weights}
        return {key: value.float() for key, value in changes.items()}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        shared = local["mix weights"][0]  # apart from the change: a poisoned head may be too large for a difference
        own = x @ local["weight change"].mT + local["bias change"]
        return shared * (x @ sent["weight"].mT + sent["bias"]) + own

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        parts = ("shared head", "local head", "class frequencies", "unlabelled images")
        return {f"weight of {part}": weight for part, weight in zip(parts, local["mix weights"].tolist(), strict=True)}

    name, traits = "auto", statistics_traits("total", multi_label=True, unlabelled=True)
