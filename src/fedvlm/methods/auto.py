"""A good classifier without tuning: class statistics once, a few rounds of gradients, then a mix at each client.

All parts are linear in the embedding and are mixed on their logits, by the likelihood of validation samples, so that a
client's classifier is one linear head:
- shared: zero-shot text; one logistic regression over all clients, averaged over a path from the zero-shot head to a
  weak ridge; Gaussian classes of one covariance.
- local: a logistic regression on the client's samples that a ridge draws to the shared head, averaged over ridges; and
  the client's class frequencies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.core import MIN_CLASS_SAMPLES, ClassTraits, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.core.schema import Range, ranged_field
from fedvlm.maths import calibration, gaussian_classes
from fedvlm.maths.logistic_regression import RIDGES, Head, fit_ridge_path, split_head, summed_cross_entropy
from fedvlm.methods import _logistic
from fedvlm.methods._logistic import OPTIMISER, SERVER, ServerState, load_state, save_state
from fedvlm.methods._settings import CheckedSettings

MIX_WEIGHTS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # of each shared part
FIRST_RIDGE, LAST_RIDGE = 1e-1, 1e-6  # of the path
PSEUDO_COUNT = 0.05  # samples added to every class in the class frequencies
FREQUENCY_LOG_WEIGHT = -0.7  # prior log weight of the class frequencies
PATH, GAUSSIAN = "path ", "gaussian "  # prefixes of the server's tensors


class PathState(NamedTuple):
    """The average over the path of the logistic regression, weighted by validation likelihood."""

    mean: Tensor  # (classes, dim + 1) float64
    best_loss: Tensor  # least validation loss so far
    mass: Tensor  # sum of exp(best_loss - loss)


@register
@dataclass(frozen=True)
class Auto(CheckedSettings):
    min_class_samples: int = MIN_CLASS_SAMPLES  # smaller classes of a client are not uploaded by name
    rounds: int = ranged_field(16, Range(2))  # the first also collects statistics, the last only scores mixes

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image"}),
            privacy=PrivacyTraits(upload_sum="total"),
            classes=ClassTraits(min_class_samples=self.min_class_samples),
        )

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        state = _logistic.initial_state(frozen)
        zero = torch.zeros((), dtype=torch.float64)
        path = PathState(torch.zeros_like(state.anchor, dtype=torch.float64), zero + torch.inf, zero)
        gaussian = Head(torch.zeros(len(frozen.classes), frozen.dim), torch.zeros(len(frozen.classes)))
        shared = {**_logistic.start_optimiser(state.anchor), **save_state(SERVER, state), **save_state(PATH, path)}
        local = {"weight change": gaussian.weight, "bias change": gaussian.bias, "mix weights": torch.zeros(3)}
        return {**shared, **save_state(GAUSSIAN, gaussian)}, local

    def send(self, shared: Tensors, id: str) -> Tensors:
        """Send what the coming round evaluates; the keys say which round it is."""
        if not _logistic.is_server_state(shared):
            return shared
        round_number = int(load_state(SERVER, ServerState, shared).round)
        keys = [f"{GAUSSIAN}{key}" for key in Head._fields] if round_number == self.rounds - 1 else []
        out = {key: shared[key] for key in ("weight", "bias", *keys)}
        return out | ({"started": torch.ones(())} if round_number else {})

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        if f"{GAUSSIAN}weight" in sent:
            return {"mix losses": self.score_mixes(frozen, sent, client)}, local
        upload = _logistic.local_statistics(sent, client, self.min_class_samples)
        return upload if "started" in sent else upload | self.statistics(frozen, client), local

    def statistics(self, frozen: Frozen, client: Client) -> Tensors:
        """Return class sums; samples of small classes form one unnamed class, if they are enough together."""
        classes = len(frozen.classes)
        is_small = gaussian_classes.class_membership(client.y, classes).sum(0) < self.min_class_samples
        rest = is_small[client.y.clamp(min=0)] & (client.y >= 0)
        has_enough = rest.sum() >= self.min_class_samples
        y = torch.where(rest, torch.where(has_enough, classes, -1), client.y)
        x = torch.where((y >= 0)[:, None], client.x, 0.0)
        counts, sums, _ = gaussian_classes.class_sums(x, y, classes + 1)
        gram = _logistic.packed_gram(replace(client, y=y), 1)
        return {"counts": counts.float(), "sums": sums.float(), "gram": gram}

    def covered_classes(self, upload: Tensors) -> Tensor:
        """Return (classes,) True where the upload depends on the class: by statistics, or by a gradient."""
        if "counts" in upload:
            return upload["counts"][:-1] > 0
        return upload.get("gradient", torch.zeros(1, 1)).abs().amax(1) > 0

    def class_means(self, upload: Tensors) -> Tensor | None:
        """Return the (classes, dim) class means that can be read from the upload."""
        if "sums" not in upload:
            return None
        means: Tensor = (upload["sums"] / upload["counts"].clamp(min=1)[:, None])[:-1]
        return means

    def score_mixes(self, frozen: Frozen, sent: Tensors, client: Client) -> Tensor:
        """Return the validation loss of every mix of the shared parts."""
        text = None if frozen.text is None else split_head(_logistic.zero_shot_head(frozen))
        logits = torch.stack([head.logits(client.val_x) for head in shared_heads(sent, text)])
        losses = []
        for weights in torch.split(mix_grid(len(logits)), len(MIX_WEIGHTS)):  # all at once would be large
            mixed = torch.einsum("mj,jnk->mnk", weights.to(logits), logits)
            losses.append(summed_cross_entropy(mixed, client.val_y))
        return torch.where((client.y >= 0).sum() >= self.min_class_samples, torch.cat(losses), 0.0)

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        total, state = _logistic.sum_uploads(uploads), load_state(SERVER, ServerState, shared)
        state = state._replace(round=state.round + 1)
        if "mix losses" in total:
            mixed = self.mix_shared(shared, split_head(state.anchor), total["mix losses"])
            return {**shared, **mixed, **save_state(SERVER, state)}
        path = self.average_path(load_state(PATH, PathState, shared), shared[f"{OPTIMISER}point"], total["totals"][2])
        out = {**shared, **save_state(PATH, path)}
        if "counts" in total:
            state = state._replace(gram=total["gram"].float())
            class_moments = moments(total)
            rule = gaussian_classes.fit_discriminant(class_moments, gaussian_classes.ridge(class_moments, 1.0))
            out |= save_state(GAUSSIAN, Head(rule.weight.float(), rule.bias.float()))
        ridge = FIRST_RIDGE * (LAST_RIDGE / FIRST_RIDGE) ** ((int(state.round) - 1) / max(self.rounds - 2, 1))
        out |= _logistic.take_server_step(out, total, state.gram, state.anchor, ridge)
        if int(state.round) == self.rounds - 1:
            out |= _logistic.head_tensors(path.mean)
        return {**out, **save_state(SERVER, state)}

    def average_path(self, path: PathState, point: Tensor, loss: Tensor) -> PathState:
        """Add a point of the path to its average, by the likelihood of the validation samples at it."""
        best_loss = torch.minimum(path.best_loss, loss)
        before = path.mass * (best_loss - path.best_loss).exp()
        now = (best_loss - loss).exp()
        mean = (before * path.mean + now * point) / (before + now)
        return PathState(mean, best_loss, before + now)

    def mix_shared(self, shared: Tensors, anchor: Head, loss: Tensor) -> Tensors:
        """Return the average of all mixes of the shared parts, weighted by their likelihood."""
        heads = shared_heads(shared, None if len(loss) == len(MIX_WEIGHTS) ** 2 else anchor)
        likelihood = (loss.min() - loss).exp()
        mix_weights = (likelihood[:, None] * mix_grid(len(heads))).sum(0) / likelihood.sum()
        joined = torch.stack([head.joined() for head in heads]).double()
        return _logistic.head_tensors((mix_weights[:, None, None] * joined).sum(0))

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        heads = self.candidates(frozen, sent, client)
        logits = torch.stack([head.logits(client.val_x.double()) for head in heads])
        weights = self.fit_weights(logits, client.val_y)
        head = split_head((weights[:, None, None] * torch.stack([head.joined() for head in heads])).sum(0))
        return {
            "weight change": (head.weight - sent["weight"].double()).float(),
            "bias change": (head.bias - sent["bias"].double()).float(),
            "mix weights": weights.float(),
        }

    def candidates(self, frozen: Frozen, sent: Tensors, client: Client) -> list[Head]:
        """Return what a client mixes: the shared head, a local head, and the class frequencies."""
        shared = Head(sent["weight"].double(), sent["bias"].double())
        ridges = torch.tensor(RIDGES, dtype=torch.float64)
        all_classes = torch.ones(len(frozen.classes), dtype=torch.bool)
        local_head = average_heads(fit_ridge_path(client.x, client.y, ridges, shared, all_classes).heads, client)
        counts = gaussian_classes.class_membership(client.y, len(frozen.classes)).sum(0)
        frequencies = Head(torch.zeros_like(shared.weight), (counts + PSEUDO_COUNT).log())
        return [shared, local_head, frequencies]

    def fit_weights(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the (parts,) weights, fitted from equal classifiers, each at its own temperature."""
        log_scales = torch.stack([calibration.fit_log_scale(part, y) for part in logits[:-1]])
        start = torch.cat([log_scales - math.log(len(log_scales)), log_scales.new_full((1,), FREQUENCY_LOG_WEIGHT)])
        return calibration.fit_log_weights(logits, y, start).exp()

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        weight = sent["weight"] + local["weight change"]
        return x @ weight.mT + sent["bias"] + local["bias change"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        names = ("weight of shared head", "weight of local head", "weight of class frequencies")
        return dict(zip(names, local["mix weights"].tolist(), strict=True))

    name = "auto"


def moments(total: Tensors) -> gaussian_classes.Moments:
    """Return the moments of the named classes from the sums of all clients."""
    size = total["sums"].shape[1] + 1
    second = gaussian_classes.nearest_semidefinite(gaussian_classes.unpack(total["gram"], size))[:-1, :-1]
    class_moments = gaussian_classes.moments_from_sums(total["counts"], total["sums"], second)
    return gaussian_classes.Moments(class_moments.counts[:-1], class_moments.means[:-1], class_moments.scatter)


def mix_grid(n_parts: int) -> Tensor:
    """Return (mixes, parts): every choice of a weight for each part."""
    return torch.tensor(list(product(MIX_WEIGHTS, repeat=n_parts)), dtype=torch.float64)


def shared_heads(tensors: Tensors, text: Head | None) -> list[Head]:
    """Return the zero-shot head if there is text, the path's mean, and the Gaussian classes if all have samples."""
    mean, gaussian = Head(tensors["weight"], tensors["bias"]), load_state(GAUSSIAN, Head, tensors)
    has_all_classes = (gaussian.bias > gaussian_classes.ABSENT_CLASS_LOGIT).all()
    gaussian = Head(*(torch.where(has_all_classes, new, old) for new, old in zip(gaussian, mean, strict=True)))
    return [mean, gaussian] if text is None else [text, mean, gaussian]


def average_heads(family: Head, client: Client) -> Head:
    """Return the mean of heads of one family, weighted by the likelihood of the client's validation samples."""
    weights = calibration.likelihood_weights(family.logits(client.val_x.double()), client.val_y)[:, None]
    return Head((weights[..., None] * family.weight).sum(0), (weights * family.bias).sum(0))
