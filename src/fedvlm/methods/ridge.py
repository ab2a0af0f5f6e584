"""Analytic federated ridge regression towards the text embeddings, in two communication rounds.

In the first round clients send counts, class sums and second moments of their embeddings; the server solves the
regression for all regularisations at once. In the second they send the validation loss of each regularisation and
logit scale, and the server keeps the best. Each client then adds its own class frequencies. Without text the
regression is towards zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors, register
from fedvlm.core.schema import Range, ranged_field
from fedvlm.maths import gaussian_classes
from fedvlm.maths.logistic_regression import Head, summed_cross_entropy
from fedvlm.maths.ridge_regression import Path, Statistics, class_log_prior, solve_path
from fedvlm.methods._logistic import check_norms
from fedvlm.methods._settings import StatisticsSettings, statistics_traits

RIDGES = tuple(10 ** (k / 2) for k in range(-10, 1))  # 1e-5 to 1; an embedding has norm 1
SCALES = tuple(2.0**k for k in range(1, 8))  # logits per unit of the regression's output
MAX_WEIGHT_NORM = 40.0  # of a class's weights, in a verified sum (tools/verified_bounds.py)
DEFAULT_RIDGE, DEFAULT_SCALE = 1e-3, 16.0  # where nobody has validation samples
PRIOR_STRENGTHS = tuple(10 ** (k / 2) for k in range(-2, 9))  # samples that the federation's frequencies count for


@register
@dataclass(frozen=True)
class Ridge(StatisticsSettings):
    ridge: float | None = ranged_field(None, Range(0, above=True))  # λ; None: chosen on validation samples
    class_prior: bool = True  # False: a client does not use its own class frequencies
    rounds: int = ranged_field(2, Range(2, 2))

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes, dim = len(frozen.classes), frozen.dim
        anchor = torch.zeros(classes, dim) if frozen.text is None else frozen.text
        shared = {"weight": frozen.scale * anchor, "bias": torch.zeros(classes), "frequencies": torch.zeros(classes)}
        return shared, {"log prior": torch.zeros(classes)}

    def send(self, shared: Tensors, id: str) -> Tensors:
        return shared

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        if "basis" in sent:
            return {"losses": self.validation_losses(sent, client)}, local
        classes, dtype = len(frozen.classes), client.x.dtype
        counts = gaussian_classes.class_membership(client.y, classes).sum(0)
        y = gaussian_classes.suppress_small_classes(client.y, counts, self.min_class_samples)
        if "open" in sent:
            y = gaussian_classes.suppress_closed_classes(y, sent["open"] > 0)
        x = torch.where((y >= 0)[:, None], client.x, 0.0)
        counts, sums, second = gaussian_classes.packed_class_sums(x, y, classes)
        upload = {"counts": counts, "sums": sums, "second": second}
        if "diagonal" in sent:
            upload["second diagonal"] = gaussian_classes.diagonal_of(upload.pop("second"), x.shape[1])
        return {key: value.to(dtype) for key, value in upload.items()}, local

    def validation_losses(self, sent: Tensors, client: Client) -> Tensor:
        """(ridges * scales,) summed cross-entropy of the validation samples; 0 of a client with too few samples."""
        outputs = path_of(sent).outputs(client.val_x.to(sent["basis"].dtype), self.ridges(sent["basis"]))
        losses = [summed_cross_entropy(scale * outputs, client.val_y) for scale in SCALES]
        enough = (client.y >= 0).sum() >= self.min_class_samples
        return torch.where(enough, torch.stack(losses, dim=1).flatten(), 0.0).to(client.x.dtype)

    def ridges(self, like: Tensor) -> Tensor:
        return like.new_tensor(RIDGES if self.ridge is None else [self.ridge])

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        total = {key: torch.stack([upload[key].double() for upload in uploads]).sum(0) for key in uploads[0]}
        if "losses" in total:
            return self.choose_head(shared, total["losses"])
        if "second" not in total:
            statistics = (total[key] for key in ("second diagonal", "counts", "sums"))
            total["second"] = gaussian_classes.gram_from_diagonal(*statistics)
        second = gaussian_classes.unpack(total["second"], total["sums"].shape[1])
        text_head = shared["weight"] / DEFAULT_SCALE if shared["weight"].any() else None
        path = solve_path(Statistics(total["counts"], total["sums"], second), text_head)
        kept = {key: value.to(shared["weight"].dtype) for key, value in path._asdict().items()}
        return {**shared, **kept}

    def check_state(self, before: Tensors, after: Tensors, members: int) -> None:
        """Refuse regressions so steep that validation losses would count single samples."""
        if "basis" in after:
            path = path_of({key: value.double() for key, value in after.items()})
            heads = [path.head(float(ridge)).weight for ridge in self.ridges(path.basis)]
            check_norms(self.name, torch.stack(heads), MAX_WEIGHT_NORM)

    def choose_head(self, shared: Tensors, losses: Tensor) -> Tensors:
        """Return the head of the regularisation and logit scale with the lowest validation loss."""
        pairs = list(product(self.ridges(losses).tolist(), SCALES))
        ridge, scale = pairs[int(losses.argmin())]
        if not losses.any():
            ridge, scale = self.ridge or DEFAULT_RIDGE, DEFAULT_SCALE
        head = path_of({key: value.double() for key, value in shared.items()}).head(ridge)
        out = {"weight": scale * head.weight, "bias": scale * head.bias, "frequencies": shared["frequencies"]}
        return {key: value.to(shared["weight"].dtype) for key, value in out.items()}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        if not self.class_prior:
            return local
        labels = torch.cat([client.y, client.val_y])
        counts = gaussian_classes.class_membership(labels, len(frozen.classes)).sum(0)
        prior = class_log_prior(counts, sent["frequencies"].double(), counts.new_tensor(PRIOR_STRENGTHS))
        return {"log prior": prior.to(local["log prior"].dtype)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return Head(sent["weight"], sent["bias"]).logits(x) + local["log prior"]

    def covered_classes(self, upload: Tensors) -> Tensor:
        """(classes,) True where the upload has statistics of the class."""
        return upload["counts"] > 0 if "counts" in upload else torch.zeros(1, dtype=torch.bool)

    def class_means(self, upload: Tensors) -> Tensor | None:
        """(classes, dim) class means, for an audit of what an upload reveals."""
        return upload["sums"] / upload["counts"].clamp(min=1)[:, None] if "sums" in upload else None

    name, traits = "ridge", statistics_traits("total", multi_label=True)


def path_of(tensors: Tensors) -> Path:
    return Path(*(tensors[key] for key in Path._fields))
