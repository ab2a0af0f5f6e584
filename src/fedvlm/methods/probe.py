"""One logistic regression over the samples of all clients in few rounds, and a local head at each client.

The shared head starts at the zero-shot classifier, to which a ridge draws it. In every round clients upload the
gradient of their samples at the server's head, and the server takes a quasi-Newton step in the metric of the second
moments of all samples, which are uploaded once: the limit is the pooled solution. Each client then continues alone from
the shared head, as far as its validation samples support it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core import MIN_CLASS_SAMPLES, ClassTraits, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.core.schema import POSITIVE, ranged_field
from fedvlm.maths.gaussian_classes import ABSENT_CLASS_LOGIT
from fedvlm.maths.logistic_regression import Head, fit_ridge_path, summed_cross_entropy
from fedvlm.methods import _logistic
from fedvlm.methods._heads import fit_local_path
from fedvlm.methods._logistic import OPTIMISER, SERVER, ServerState, load_state, save_state
from fedvlm.methods._settings import CheckedSettings


@register
@dataclass(frozen=True)
class Probe(CheckedSettings):
    ridge: float = ranged_field(1e-4, POSITIVE)  # of the shared head, per sample
    local_head: bool = True  # False: every client uses the shared head
    min_class_samples: int = MIN_CLASS_SAMPLES  # a client with fewer samples uploads zeros
    rounds: int = 20

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        local = {"weight change": torch.zeros(classes, frozen.dim), "bias change": torch.zeros(classes)}
        return _logistic.initial_tensors(frozen), local if self.local_head else {}

    def send(self, shared: Tensors, id: str) -> Tensors:
        if not _logistic.is_server_state(shared):
            return shared
        started = {"started": torch.ones(())} if load_state(SERVER, ServerState, shared).round else {}
        return {"weight": shared["weight"], "bias": shared["bias"], **started}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        upload = _logistic.local_statistics(sent, client, self.min_class_samples)
        if "started" not in sent:
            upload["gram"] = _logistic.packed_gram(client, self.min_class_samples)
        return upload, local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        total, state = _logistic.sum_uploads(uploads), load_state(SERVER, ServerState, shared)
        gram = total["gram"].float() if "gram" in total else state.gram
        state = state._replace(round=state.round + 1, gram=gram)
        out = _logistic.take_server_step(shared, total, gram, state.anchor, self.ridge)
        if state.round >= self.rounds:  # the last step would not be evaluated, so the best point is taken
            out |= _logistic.head_tensors(out[f"{OPTIMISER}base"])
        return {**out, **save_state(SERVER, state)}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """Choose by validation likelihood: the shared head, heads drawn to it by a ridge, or purely local ones."""
        if not self.local_head:
            return local
        shared = Head(sent["weight"].double(), sent["bias"].double())
        ridges, local_path, has_samples = fit_local_path(frozen, client)
        nearby = fit_ridge_path(client.x, client.y, ridges, shared, torch.ones_like(has_samples)).heads
        local_bias = torch.where(has_samples, local_path.heads.bias, ABSENT_CLASS_LOGIT)
        weights = torch.cat([shared.weight[None], nearby.weight, local_path.heads.weight])
        heads = Head(weights, torch.cat([shared.bias[None], nearby.bias, local_bias]))
        best = summed_cross_entropy(heads.logits(client.val_x.double()), client.val_y).argmin()
        change = heads.weight[best] - shared.weight, heads.bias[best] - shared.bias
        return {"weight change": change[0].float(), "bias change": change[1].float()}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        weight, bias = sent["weight"], sent["bias"]
        if self.local_head:
            weight, bias = weight + local["weight change"], bias + local["bias change"]
        return x @ weight.mT + bias

    name = "probe"
    traits = Traits(
        needs=frozenset({"image"}), privacy=PrivacyTraits(upload_sum="total"), classes=ClassTraits(multi_label=True)
    )
