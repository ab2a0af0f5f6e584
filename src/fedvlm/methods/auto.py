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

from fedvlm.core import SMALLEST, Client, Frozen, Tensors, Traits, register
from fedvlm.core.schema import Range, check_ranges, within
from fedvlm.maths import blend, gaussian, probe, quasi
from fedvlm.methods import _probe

SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # of each shared part, in the mix
FIRST, LAST = 1e-1, 1e-6  # ridges of the path
SCARCE = 0.05  # rows that a class counts as having more than it has
OPEN = -0.7  # log weight of the class frequencies, before validation rows have a say


@register
@dataclass(frozen=True)
class Auto:
    min_class_samples: int = (
        SMALLEST  # rows a class must have at a client for its statistics to be uploaded
    )
    # the first also asks for statistics, the last only for the shared mix
    rounds: int = within(16, Range(2))

    def __post_init__(self) -> None:
        check_ranges("auto", self)

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image"}), sums="total", min_class_samples=self.min_class_samples
        )

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        anchor = _probe.anchor_of(frozen)
        classes, dim = len(frozen.classes), frozen.dim
        shared = _probe.keep(quasi.begin(anchor)) | {
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

    def update(
        self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
    ) -> tuple[Tensors, Tensors]:
        if "gauss weight" in sent:
            return {"judged": self.judge(frozen, sent, client)}, local
        upload = _probe.answer(sent, client, self.min_class_samples)
        return upload if "begun" in sent else upload | self.statistics(frozen, client), local

    def statistics(self, frozen: Frozen, client: Client) -> Tensors:
        """TOFA's sums over rows; rows of classes with too few are one nameless group, if enough."""
        classes = len(frozen.classes)
        few = gaussian.members(client.y, classes).sum(0) < self.min_class_samples
        rest = few[client.y.clamp(min=0)] & (client.y >= 0)
        enough = rest.sum() >= self.min_class_samples
        y = torch.where(rest, torch.where(enough, classes, -1), client.y)
        counts, sums, _ = gaussian.raw(
            torch.where((y >= 0)[:, None], client.x, 0.0), y, classes + 1
        )
        gram = _probe.second(replace(client, y=y), 1)
        return {"counts": counts.float(), "sums": sums.float(), "gram": gram}

    def covers(self, upload: Tensors) -> Tensor:
        """(classes,) True where the upload tells of the class: by statistics, later by a slope."""
        if "counts" in upload:
            return upload["counts"][:-1] > 0
        return upload.get("slope", torch.zeros(1, 1)).abs().amax(1) > 0

    def means(self, upload: Tensors) -> Tensor | None:
        """(classes, dim) class means, for those who look what an upload gives away."""
        if "sums" not in upload:
            return None
        means: Tensor = (upload["sums"] / upload["counts"].clamp(min=1)[:, None])[:-1]
        return means

    def judge(self, frozen: Frozen, sent: Tensors, client: Client) -> Tensor:
        """Validation loss at every mix of the shared parts."""
        x, y = client.held_x, client.held_y
        logits = torch.stack([head.logits(x) for head in shared_parts(frozen, sent)])
        found = []
        for share in torch.split(mixes(len(logits)), len(SHARES)):  # all at once would be large
            found.append(probe.losses(torch.einsum("mj,jnk->mnk", share.to(logits), logits), y))
        return torch.where((client.y >= 0).sum() >= self.min_class_samples, torch.cat(found), 0.0)

    def aggregate(
        self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
    ) -> Tensors:
        total = _probe.summed(uploads)
        done = shared["walk round"] + 1
        if "judged" in total:
            return {**shared, **self.mixed(shared, total["judged"]), "walk round": done}
        out = {**shared, **self.followed(shared, total["counted"][2]), "walk round": done}
        if "counts" in total:
            out |= self.gaussians(total)
        ridge = FIRST * (LAST / FIRST) ** ((int(done) - 1) / max(self.rounds - 2, 1))
        out |= _probe.step(out, total, out["walk gram"], shared["walk anchor"], ridge)
        if int(done) == self.rounds - 1:
            out |= _probe.head(out["walk mean"])
        return out

    def followed(self, shared: Tensors, loss: Tensor) -> Tensors:
        """The mean of the path's points, each weighing as validation rows are likely at it."""
        least = torch.minimum(shared["walk least"], loss)
        before = shared["walk mass"] * (least - shared["walk least"]).exp()
        now = (least - loss).exp()
        mean = before * shared["walk mean"] + now * shared["walk point"]
        mean = mean / (before + now)
        return {"walk mean": mean, "walk least": least, "walk mass": before + now}

    def gaussians(self, total: Tensors) -> Tensors:
        known = moments(total)
        rule = gaussian.discriminant(known, gaussian.ridge(known, 1.0))
        out = {"gauss weight": rule.weight, "gauss bias": rule.bias, "walk gram": total["gram"]}
        return {key: value.float() for key, value in out.items()}

    def mixed(self, shared: Tensors, loss: Tensor) -> Tensors:
        """The mix of shared parts: of all that were judged, by their likelihood."""
        anchor = probe.split(shared["walk anchor"])
        parts = (
            three_parts(shared) if len(loss) == len(SHARES) ** 2 else three_parts(shared, anchor)
        )
        share = ((loss.min() - loss).exp()[:, None] * mixes(len(parts))).sum(0)
        share = share / (loss.min() - loss).exp().sum()
        joined = torch.stack([part.joined() for part in parts]).double()
        return _probe.head((share[:, None, None] * joined).sum(0))

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        parts = self.candidates(frozen, sent, client)
        logits = torch.stack([part.logits(client.held_x.double()) for part in parts])
        shares = self.weigh(logits, client.held_y)
        joined = torch.stack([part.joined() for part in parts])
        found = probe.split((shares[:, None, None] * joined).sum(0))
        return {
            "weight change": (found.weight - sent["weight"].double()).float(),
            "bias change": (found.bias - sent["bias"].double()).float(),
            "shares": shares.float(),
        }

    def candidates(self, frozen: Frozen, sent: Tensors, client: Client) -> list[probe.Head]:
        """What a client mixes: classifiers, and last how often it has each class."""
        shared = probe.Head(sent["weight"].double(), sent["bias"].double())
        ridges = torch.tensor(probe.RIDGES, dtype=torch.float64)
        every = torch.ones(len(frozen.classes), dtype=torch.bool)
        own = averaged(probe.fit(client.x, client.y, ridges, shared, every).heads, client)
        counts = gaussian.members(client.y, len(frozen.classes)).sum(0)
        often = probe.Head(torch.zeros_like(shared.weight), (counts + SCARCE).log())
        return [shared, own, often]

    def weigh(self, logits: Tensor, y: Tensor) -> Tensor:
        """(parts,) what each weighs: from equal classifiers at their own temperatures on."""
        heats = torch.stack([blend.heat(one, y) for one in logits[:-1]])
        start = torch.cat([heats - math.log(len(heats)), heats.new_full((1,), OPEN)])
        return blend.blend(logits, y, start).exp()

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        weight = sent["weight"] + local["weight change"]
        return x @ weight.mT + sent["bias"] + local["bias change"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        names = ("share of shared", "share of own", "share of frequencies")
        return dict(zip(names, local["shares"].tolist(), strict=True))

    name = "auto"


def moments(total: Tensors) -> gaussian.Moments:
    """Of the classes by name, from the sums of all clients."""
    dim = total["sums"].shape[1]
    second = gaussian.definite(gaussian.unpack(total["gram"], dim + 1))[:-1, :-1]
    known = gaussian.centred(total["counts"], total["sums"], second)
    return gaussian.Moments(known.counts[:-1], known.means[:-1], known.scatter)


def mixes(parts: int) -> Tensor:
    """(mixes, parts) every choice of a share for each part."""
    return torch.tensor(list(product(SHARES, repeat=parts)), dtype=torch.float64)


def shared_parts(frozen: Frozen, sent: Tensors) -> list[probe.Head]:
    if frozen.text is None:
        return three_parts(sent)
    return three_parts(sent, probe.split(_probe.anchor_of(frozen)))


def three_parts(held: Tensors, text: probe.Head | None = None) -> list[probe.Head]:
    """Zero-shot if there is text, the path's mean, and the Gaussian classes if all have rows."""
    mean = probe.Head(held["weight"], held["bias"])
    whole = (held["gauss bias"] > gaussian.NEVER).all()
    gauss = probe.Head(
        torch.where(whole, held["gauss weight"], mean.weight),
        torch.where(whole, held["gauss bias"], mean.bias),
    )
    return [mean, gauss] if text is None else [text, mean, gauss]


def averaged(family: probe.Head, client: Client) -> probe.Head:
    """The mean of heads of one family, by the likelihood of the client's validation rows."""
    share = blend.averaged(family.logits(client.held_x.double()), client.held_y)[:, None]
    return probe.Head((share[..., None] * family.weight).sum(0), (share * family.bias).sum(0))
