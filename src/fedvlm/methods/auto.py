"""A good classifier without tuning: one exchange of statistics, a few of slopes, then each client's
own mix of all that is known, by the likelihood of its validation rows.

Every part is linear in the embedding, and parts are mixed on their logits, so that what a client
ends up with is one linear head:
- shared: zero-shot text; one logistic regression over all clients, followed from text to a weak
  ridge and averaged over that path by validation likelihood; Gaussian classes of one covariance.
- own: a logistic regression on its rows that a ridge pulls to the shared one, averaged over ridges
  by validation likelihood; and how often it has each class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from fedvlm.core import MIN_CLASS_SAMPLES, ClassTraits, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.core.schema import Range, check_ranges, ranged_field
from fedvlm.maths import calibration, gaussian_classes, logistic_regression
from fedvlm.methods import _logistic

MIX_WEIGHTS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # of each shared part, in the mix
FIRST_RIDGE, LAST_RIDGE = 1e-1, 1e-6  # ridges of the path
PSEUDO_COUNT = 0.05  # rows that a class counts as having more than it has
FREQUENCY_LOG_WEIGHT = -0.7  # log weight of the class frequencies, before validation rows have a say


@register
@dataclass(frozen=True)
class Auto:
    min_class_samples: int = MIN_CLASS_SAMPLES  # rows a class must have at a client for its statistics to be uploaded
    # the first also asks for statistics, the last only for the shared mix
    rounds: int = ranged_field(16, Range(2))

    def __post_init__(self) -> None:
        check_ranges("auto", self)

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image"}),
            privacy=PrivacyTraits(upload_sum="total"),
            classes=ClassTraits(min_class_samples=self.min_class_samples),
        )

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        anchor = _logistic.zero_shot_head(frozen)
        classes, dim = len(frozen.classes), frozen.dim
        shared = _logistic.state_to_tensors(logistic_regression.start_state(anchor)) | {
            "walk anchor": anchor,
            "walk round": torch.zeros((), dtype=torch.int64),
            "walk mean": torch.zeros_like(anchor, dtype=torch.float64),  # of the path so far
            "walk least": torch.tensor(torch.inf, dtype=torch.float64),  # validation loss on it
            "walk mass": torch.zeros((), dtype=torch.float64),
            "walk gram": torch.zeros((dim + 1) * (dim + 2) // 2),
            "gauss weight": torch.zeros(classes, dim),
            "gauss bias": torch.zeros(classes),
        }
        local = {"weight change": torch.zeros(classes, dim), "bias change": torch.zeros(classes)}
        return shared, local | {"shares": torch.zeros(3)}

    def send(self, shared: Tensors, id: str) -> Tensors:
        """What the coming exchange is about, which its keys tell; at the end, what was found."""
        if "walk round" not in shared:  # a site's classifier holds what was sent in the end
            return shared
        done = int(shared["walk round"])
        keys = ("gauss weight", "gauss bias") if done == self.rounds - 1 else ()
        out = {key: shared[key] for key in ("weight", "bias", *keys)}
        return out | ({"begun": torch.ones(())} if done else {})

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        if "gauss weight" in sent:
            return {"judged": self.score_mixes(frozen, sent, client)}, local
        upload = _logistic.local_statistics(sent, client, self.min_class_samples)
        return upload if "begun" in sent else upload | self.statistics(frozen, client), local

    def statistics(self, frozen: Frozen, client: Client) -> Tensors:
        """TOFA's sums over rows; rows of classes with too few are one nameless group, if enough."""
        classes = len(frozen.classes)
        is_small = gaussian_classes.class_membership(client.y, classes).sum(0) < self.min_class_samples
        rest = is_small[client.y.clamp(min=0)] & (client.y >= 0)
        has_enough = rest.sum() >= self.min_class_samples
        y = torch.where(rest, torch.where(has_enough, classes, -1), client.y)
        counts, sums, _ = gaussian_classes.class_sums(torch.where((y >= 0)[:, None], client.x, 0.0), y, classes + 1)
        gram = _logistic.packed_gram(replace(client, y=y), 1)
        return {"counts": counts.float(), "sums": sums.float(), "gram": gram}

    def covered_classes(self, upload: Tensors) -> Tensor:
        """(classes,) True where the upload tells of the class: by statistics, later by a slope."""
        if "counts" in upload:
            return upload["counts"][:-1] > 0
        return upload.get("slope", torch.zeros(1, 1)).abs().amax(1) > 0

    def class_means(self, upload: Tensors) -> Tensor | None:
        """(classes, dim) class means, for those who look what an upload gives away."""
        if "sums" not in upload:
            return None
        means: Tensor = (upload["sums"] / upload["counts"].clamp(min=1)[:, None])[:-1]
        return means

    def score_mixes(self, frozen: Frozen, sent: Tensors, client: Client) -> Tensor:
        """Validation loss at every mix of the shared parts."""
        x, y = client.val_x, client.val_y
        logits = torch.stack([head.logits(x) for head in shared_parts(frozen, sent)])
        losses = []
        for mix_weights in torch.split(mix_grid(len(logits)), len(MIX_WEIGHTS)):  # all at once would be large
            losses.append(
                logistic_regression.summed_cross_entropy(torch.einsum("mj,jnk->mnk", mix_weights.to(logits), logits), y)
            )
        return torch.where((client.y >= 0).sum() >= self.min_class_samples, torch.cat(losses), 0.0)

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        total = _logistic.sum_uploads(uploads)
        done = shared["walk round"] + 1
        if "judged" in total:
            return {**shared, **self.mix_shared(shared, total["judged"]), "walk round": done}
        out = {**shared, **self.average_path(shared, total["counted"][2]), "walk round": done}
        if "counts" in total:
            out |= self.gaussians(total)
        ridge = FIRST_RIDGE * (LAST_RIDGE / FIRST_RIDGE) ** ((int(done) - 1) / max(self.rounds - 2, 1))
        out |= _logistic.take_server_step(out, total, out["walk gram"], shared["walk anchor"], ridge)
        if int(done) == self.rounds - 1:
            out |= _logistic.head_tensors(out["walk mean"])
        return out

    def average_path(self, shared: Tensors, loss: Tensor) -> Tensors:
        """The mean of the path's points, each weighing as validation rows are likely at it."""
        best_loss = torch.minimum(shared["walk least"], loss)
        before = shared["walk mass"] * (best_loss - shared["walk least"]).exp()
        now = (best_loss - loss).exp()
        mean = before * shared["walk mean"] + now * shared["walk point"]
        mean = mean / (before + now)
        return {"walk mean": mean, "walk least": best_loss, "walk mass": before + now}

    def gaussians(self, total: Tensors) -> Tensors:
        class_moments = moments(total)
        rule = gaussian_classes.fit_discriminant(class_moments, gaussian_classes.ridge(class_moments, 1.0))
        out = {"gauss weight": rule.weight, "gauss bias": rule.bias, "walk gram": total["gram"]}
        return {key: value.float() for key, value in out.items()}

    def mix_shared(self, shared: Tensors, loss: Tensor) -> Tensors:
        """The mix of shared parts: of all that were judged, by their likelihood."""
        anchor = logistic_regression.split_head(shared["walk anchor"])
        parts = shared_heads(shared) if len(loss) == len(MIX_WEIGHTS) ** 2 else shared_heads(shared, anchor)
        mix_weights = ((loss.min() - loss).exp()[:, None] * mix_grid(len(parts))).sum(0)
        mix_weights = mix_weights / (loss.min() - loss).exp().sum()
        joined = torch.stack([part.joined() for part in parts]).double()
        return _logistic.head_tensors((mix_weights[:, None, None] * joined).sum(0))

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        parts = self.candidates(frozen, sent, client)
        logits = torch.stack([part.logits(client.val_x.double()) for part in parts])
        weights = self.fit_weights(logits, client.val_y)
        joined = torch.stack([part.joined() for part in parts])
        head = logistic_regression.split_head((weights[:, None, None] * joined).sum(0))
        return {
            "weight change": (head.weight - sent["weight"].double()).float(),
            "bias change": (head.bias - sent["bias"].double()).float(),
            "shares": weights.float(),
        }

    def candidates(self, frozen: Frozen, sent: Tensors, client: Client) -> list[logistic_regression.Head]:
        """What a client mixes: classifiers, and last how often it has each class."""
        shared = logistic_regression.Head(sent["weight"].double(), sent["bias"].double())
        ridges = torch.tensor(logistic_regression.RIDGES, dtype=torch.float64)
        all_classes = torch.ones(len(frozen.classes), dtype=torch.bool)
        local_head = average_heads(
            logistic_regression.fit_ridge_path(client.x, client.y, ridges, shared, all_classes).heads, client
        )
        counts = gaussian_classes.class_membership(client.y, len(frozen.classes)).sum(0)
        frequencies = logistic_regression.Head(torch.zeros_like(shared.weight), (counts + PSEUDO_COUNT).log())
        return [shared, local_head, frequencies]

    def fit_weights(self, logits: Tensor, y: Tensor) -> Tensor:
        """(parts,) what each weighs: from equal classifiers at their own temperatures on."""
        log_scales = torch.stack([calibration.fit_log_scale(classifier_logits, y) for classifier_logits in logits[:-1]])
        start = torch.cat([log_scales - math.log(len(log_scales)), log_scales.new_full((1,), FREQUENCY_LOG_WEIGHT)])
        return calibration.fit_log_weights(logits, y, start).exp()

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        weight = sent["weight"] + local["weight change"]
        return x @ weight.mT + sent["bias"] + local["bias change"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        names = ("share of shared", "share of own", "share of frequencies")
        return dict(zip(names, local["shares"].tolist(), strict=True))

    name = "auto"


def moments(total: Tensors) -> gaussian_classes.Moments:
    """Of the classes by name, from the sums of all clients."""
    dim = total["sums"].shape[1]
    second = gaussian_classes.nearest_semidefinite(gaussian_classes.unpack(total["gram"], dim + 1))[:-1, :-1]
    class_moments = gaussian_classes.moments_from_sums(total["counts"], total["sums"], second)
    return gaussian_classes.Moments(class_moments.counts[:-1], class_moments.means[:-1], class_moments.scatter)


def mix_grid(parts: int) -> Tensor:
    """(mixes, parts) every choice of a share for each part."""
    return torch.tensor(list(product(MIX_WEIGHTS, repeat=parts)), dtype=torch.float64)


def shared_parts(frozen: Frozen, sent: Tensors) -> list[logistic_regression.Head]:
    if frozen.text is None:
        return shared_heads(sent)
    return shared_heads(sent, logistic_regression.split_head(_logistic.zero_shot_head(frozen)))


def shared_heads(held: Tensors, text: logistic_regression.Head | None = None) -> list[logistic_regression.Head]:
    """Zero-shot if there is text, the path's mean, and the Gaussian classes if all have rows."""
    mean = logistic_regression.Head(held["weight"], held["bias"])
    has_all_classes = (held["gauss bias"] > gaussian_classes.ABSENT_CLASS_LOGIT).all()
    gauss = logistic_regression.Head(
        torch.where(has_all_classes, held["gauss weight"], mean.weight),
        torch.where(has_all_classes, held["gauss bias"], mean.bias),
    )
    return [mean, gauss] if text is None else [text, mean, gauss]


def average_heads(family: logistic_regression.Head, client: Client) -> logistic_regression.Head:
    """The mean of heads of one family, by the likelihood of the client's validation rows."""
    head_weights = calibration.likelihood_weights(family.logits(client.val_x.double()), client.val_y)[:, None]
    return logistic_regression.Head(
        (head_weights[..., None] * family.weight).sum(0), (head_weights * family.bias).sum(0)
    )
