"""One logistic regression over all clients' rows in few exchanges, and each client's own beside it.

The shared head starts at the zero-shot classifier and is drawn to it by a ridge. Every round the
clients say the slope of their rows at the server's point, and the server takes a quasi-Newton step
in the metric of all rows' second moments, which travel once: the limit is the pooled solution.
Each client then goes on alone from the shared head, as far as its validation rows say it pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core import MIN_CLASS_SAMPLES, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.core.schema import POSITIVE, check_ranges, ranged_field
from fedvlm.maths import gaussian_classes, logistic_regression
from fedvlm.methods import _logistic
from fedvlm.methods.alone import fit_local_path


@register
@dataclass(frozen=True)
class Probe:
    ridge: float = ranged_field(1e-4, POSITIVE)  # of the shared head, per row
    local_head: bool = True  # False: every client uses the shared head
    min_class_samples: int = MIN_CLASS_SAMPLES  # rows a client must have to say anything of them
    rounds: int = 20

    def __post_init__(self) -> None:
        check_ranges("probe", self)

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        anchor = _logistic.zero_shot_head(frozen)
        dim = frozen.dim + 1
        shared = {**_logistic.state_to_tensors(logistic_regression.start_state(anchor)), "walk anchor": anchor}
        shared["walk round"] = torch.zeros((), dtype=torch.int64)
        local = {"weight change": torch.zeros(len(anchor), frozen.dim)} if self.local_head else {}
        local |= {"bias change": torch.zeros(len(anchor))} if self.local_head else {}
        return {**shared, "walk gram": torch.zeros(dim * (dim + 1) // 2)}, local

    def send(self, shared: Tensors, id: str) -> Tensors:
        if "walk round" not in shared:  # a site's classifier holds what was sent in the end
            return shared
        started = {"begun": torch.ones(())} if shared["walk round"] else {}
        return {"weight": shared["weight"], "bias": shared["bias"], **started}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        upload = _logistic.local_statistics(sent, client, self.min_class_samples)
        if "begun" not in sent:
            upload["gram"] = _logistic.packed_gram(client, self.min_class_samples)
        return upload, local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        total = _logistic.sum_uploads(uploads)
        gram = total["gram"].float() if "gram" in total else shared["walk gram"]
        anchor, done = shared["walk anchor"], shared["walk round"] + 1
        out = _logistic.take_server_step(shared, total, gram, anchor, self.ridge)
        if done >= self.rounds:  # nobody would say whether a last step is a good one
            out |= _logistic.head_tensors(out["walk base"])
        return {**out, "walk anchor": anchor, "walk gram": gram, "walk round": done}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """The likeliest on validation rows of the shared head, heads near it, and own ones."""
        if not self.local_head:
            return local
        shared = logistic_regression.Head(sent["weight"].double(), sent["bias"].double())
        ridges, local_path, has_samples = fit_local_path(frozen, client)
        nearby_heads = logistic_regression.fit_ridge_path(
            client.x, client.y, ridges, shared, torch.ones_like(has_samples)
        ).heads
        off = torch.where(has_samples, local_path.heads.bias, gaussian_classes.ABSENT_CLASS_LOGIT)
        heads = logistic_regression.Head(
            torch.cat([shared.weight[None], nearby_heads.weight, local_path.heads.weight]),
            torch.cat([shared.bias[None], nearby_heads.bias, off]),
        )
        best = logistic_regression.summed_cross_entropy(heads.logits(client.val_x.double()), client.val_y).argmin()
        change = heads.weight[best] - shared.weight, heads.bias[best] - shared.bias
        return dict(zip(("weight change", "bias change"), (c.float() for c in change), strict=True))

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        weight, bias = sent["weight"], sent["bias"]
        if self.local_head:
            weight, bias = weight + local["weight change"], bias + local["bias change"]
        return x @ weight.mT + bias

    name = "probe"
    traits = Traits(needs=frozenset({"image"}), privacy=PrivacyTraits(upload_sum="total"))
