"""One exchange without training: class prototypes by Bayes, aligned descriptions, fused per row.

Clients upload sums over their rows; the server turns them into a prior; each client makes its own
posterior of it, and mixes that classifier with the text one by how sure the two are.
Zhang et al., TOFA: training-free one-shot federated adaptation for vision-language models, 2025.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, register
from fedvlm.errors import SettingsError
from fedvlm.maths import alignment, calibration, gaussian

TERMS = 8  # a bound on the size of a term of r, for its fixed point


@register
@dataclass(frozen=True)
class TOFA:
    visual: bool = True  # the three parts of the paper's ablation
    text: bool = True
    fusion: bool = True  # False: both modalities weigh the same, as they are
    alpha: float = 1.0  # α of the power prior: 0 trusts own rows only
    shrinkage: float = 1.0  # λ of the ridge λ tr(S)/(ν - 1); the paper says only "small"
    sharpness: float = 100.0  # s_t of eq. 5, which prints none: with 1 all texts weigh the same
    temperature: float = 0.5  # τ_t of eq. 7
    calibration: Literal["leave-one-out", "held-out"] = "leave-one-out"
    most: int = 4096  # rows a client may have; the fixed point of uploads is made for them
    rounds: int = 1  # 2: clients' own texts go round first, and are scored in a second exchange

    def __post_init__(self) -> None:
        if not (self.visual or self.text):
            raise SettingsError("tofa: visual and text are both off; leave one on")
        if not 0 <= self.alpha <= 1 or self.shrinkage <= 0:
            raise SettingsError(
                f"tofa: alpha = {self.alpha} and shrinkage = {self.shrinkage} do not fit; alpha "
                "is from 0 to 1, and shrinkage above 0"
            )
        if self.rounds not in (1, 2):
            raise SettingsError(f"tofa: rounds = {self.rounds}; it takes 1, or 2 for own texts")

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes, dim = len(frozen.classes), frozen.dim
        shared: Tensors = {}
        local: Tensors = {}
        if self.text:
            there = (texts(frozen).abs().amax(-1) > 0).float()
            shared["weights"] = there / there.sum(1, keepdim=True)  # b, uniform so far
        if self.text and self.rounds == 2:
            shared["own"] = torch.zeros(classes, dim)  # Σ b Φ(t) over texts that clients brought
        if self.visual:
            shared["counts"] = torch.zeros(classes)
            shared["means"] = torch.zeros(classes, dim)
            shared["scatter"] = torch.zeros(dim * (dim + 1) // 2)
            # The prior's discriminant, and by how much a client's own differs from it: a client
            # that has not adapted predicts by the prior.
            shared |= {"weight": torch.zeros(classes, dim), "bias": torch.zeros(classes)}
            local["weight change"] = torch.zeros(classes, dim)
            local["bias change"] = torch.zeros(classes)
        if self.visual and self.text and self.fusion:
            local["heat"] = torch.zeros(2)  # log τ of the visual and of the text classifier
            local["row weight"] = torch.ones(classes)  # 1 + α once the prior has the rows too
        return shared, local

    def update(
        self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
    ) -> tuple[Tensors, Tensors]:
        rows = client.x.shape[0]
        if rows > self.most:
            raise SettingsError(f"tofa: a client has {rows} rows; set most = {rows} or higher")
        if self.text and client.texts.shape[1] and self.rounds == 1:
            raise SettingsError("tofa: clients bring texts of their own; set rounds = 2")
        counts, sums, second = gaussian.raw(client.x, client.y, len(frozen.classes))
        upload: Tensors = {}
        if self.visual and "texts" not in sent:
            upload["counts"] = counts.to(torch.int32)
            upload["sums"] = gaussian.to_fixed(sums, self.most)
            upload["moments"] = gaussian.to_fixed(gaussian.pack(second), self.most)
            if "row weight" in local:
                local = {**local, "row weight": 1 + self.alpha * (counts > 0).float()}
        if self.text and self.rounds == 2 and "texts" not in sent:
            upload["texts"] = client.texts
        elif self.text:
            every = torch.cat([texts(frozen), sent.get("texts", client.texts)], dim=1)
            present = counts > 0
            means = sums / counts.clamp(min=1)[:, None]
            terms, voting = alignment.votes(
                alignment.margins(means, present, every, self.sharpness), present
            )
            upload["scores"] = gaussian.to_fixed(terms, TERMS)
            upload["voters"] = voting.to(torch.int32)
        return upload, local

    def aggregate(
        self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
    ) -> Tensors:
        """Sums alone matter, so they may come from a secure sum; texts are brought together."""
        total = {
            key: sum((one[key].long() for one in uploads), start=torch.zeros((), dtype=torch.long))
            for key in uploads[0]
            if key != "texts"
        }
        out = {key: value for key, value in shared.items() if key != "texts"}
        if "moments" in total:
            out |= self.prior(total)
        if "scores" in total:
            out |= self.aligned(shared, total)
        if "texts" in uploads[0]:
            ordered = sorted(range(len(ids)), key=lambda i: ids[i])
            every = torch.cat([uploads[i]["texts"] for i in ordered], dim=1)
            out["texts"] = every[:, every.abs().amax((0, 2)) > 0]  # no column of padding alone
        return out

    def prior(self, total: Tensors) -> Tensors:
        """The server's posterior under an uninformative prior, and its discriminant."""
        dim = total["sums"].shape[1]
        known = gaussian.centred(
            total["counts"].double(),
            gaussian.from_fixed(total["sums"], self.most),
            gaussian.unpack(gaussian.from_fixed(total["moments"], self.most), dim),
        )
        rule = gaussian.discriminant(known, gaussian.ridge(known, self.shrinkage))
        out = {
            "counts": known.counts,
            "means": known.means,
            "scatter": gaussian.pack(known.scatter),
            "weight": rule.weight,
            "bias": rule.bias,
        }
        return {key: value.float() for key, value in out.items()}

    def aligned(self, shared: Tensors, total: Tensors) -> Tensors:
        """b of eq. 7 over all texts of a class, and the mix of those that clients brought."""
        common = shared["weights"].shape[1]
        there = shared["weights"] > 0
        own = shared.get("texts")
        if own is not None:
            there = torch.cat([there, own.abs().amax(-1) > 0], dim=1)
        terms = gaussian.from_fixed(total["scores"], TERMS)
        b = alignment.weights(terms, total["voters"], there, self.temperature).float()
        out = {"weights": b[:, :common]}
        if own is not None:
            out["own"] = alignment.mix(b[:, common:], own)
        return out

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        if not self.visual:
            return local
        prior = gaussian.Moments(
            sent["counts"].double(),
            sent["means"].double(),
            gaussian.unpack(sent["scatter"].double(), frozen.dim),
        )
        known = gaussian.posterior(prior, client.x, client.y, self.alpha)
        rule = gaussian.discriminant(known, gaussian.ridge(known, self.shrinkage))
        out = {
            "weight change": (rule.weight - sent["weight"]).float(),
            "bias change": (rule.bias - sent["bias"]).float(),
        }
        if self.text and self.fusion:
            x, y = client.x, client.y
            weight = local["row weight"][y.clamp(min=0)].double()
            logits = gaussian.left_out(known, rule, x, y, weight)
            if self.calibration == "held-out" and client.held_x.shape[0]:
                x, y = client.held_x, client.held_y
                logits = rule.logits(x.double())
            words = frozen.scale * x @ prompts(frozen, sent).mT
            heats = [calibration.heat(logits, y), calibration.heat(words.double(), y)]
            out["heat"] = torch.stack(heats).float()
        return {**local, **out}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        if not self.visual:
            return frozen.scale * x @ prompts(frozen, sent).mT
        weight = sent["weight"] + local["weight change"]
        seen = x @ weight.mT + sent["bias"] + local["bias change"]
        if not self.text:
            return seen
        said = frozen.scale * x @ prompts(frozen, sent).mT
        if not self.fusion:
            return calibration.average(seen, said)
        return calibration.fuse(seen / local["heat"][0].exp(), said / local["heat"][1].exp())

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        names = ("visual temperature", "text temperature")
        return dict(zip(names, local.get("heat", torch.zeros(0)).exp().tolist(), strict=False))

    name = "tofa"
    needs, memory = frozenset({"image"}), frozenset[str]()
    send = parts.everything
    sums, uneven = "total", frozenset({"texts"})  # of clients that bring more or fewer


def texts(frozen: Frozen) -> Tensor:
    """(classes, 1 + descriptions, dim): the template's text first."""
    if frozen.text is None:
        raise SettingsError("tofa: text = true, but the encoder has no text; set text = false")
    if frozen.descriptions is None:
        return frozen.text[:, None]
    return torch.cat([frozen.text[:, None], frozen.descriptions], dim=1)


def prompts(frozen: Frozen, sent: Tensors) -> Tensor:
    """(classes, dim): every class's texts, mixed by their weights."""
    mixed = alignment.mix(sent["weights"], texts(frozen))
    return mixed + sent["own"] if "own" in sent else mixed
