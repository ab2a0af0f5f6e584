"""One exchange without training: class prototypes by Bayes, aligned descriptions, fused per row.

Clients upload sums over their rows; the server turns them into a prior; each client makes its own
posterior of it, and mixes that classifier with the text one by how sure the two are.
Zhang et al., TOFA: training-free one-shot federated adaptation for vision-language models, 2025.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import SMALLEST, Client, Frozen, Tensors, Traits, register
from fedvlm.errors import SettingsError
from fedvlm.maths import alignment, calibration, gaussian
from fedvlm.maths.accounting import epsilon
from fedvlm.maths.noise import cover
from fedvlm.methods import _totals
from fedvlm.methods._texts import prompts, texts

TERMS = _totals.TERMS


@register
@dataclass(frozen=True)
class TOFA:
    visual: bool = True  # the three parts of the paper's ablation
    text: bool = True  # False: the visual classifier alone
    fusion: bool = True  # False: both modalities weigh the same, as they are
    alpha: float = 1.0  # α of the power prior: 0 trusts own rows only
    shrinkage: float = 1.0  # λ of the ridge λ tr(S)/(ν - 1); the paper says only "small"
    sharpness: float = 100.0  # s_t of eq. 5, which prints none: with 1 all texts weigh the same
    temperature: float = 0.5  # τ_t of eq. 7
    # which rows say how sure each modality is: own ones by leaving out, or validation rows
    calibration: Literal["leave-one-out", "held-out"] = "leave-one-out"
    most: int = 4096  # rows a client may have; the fixed point of uploads is made for them
    smallest: int = SMALLEST  # rows a class must have at a client to be uploaded
    contributors: int = 1  # clients it must have then; above 1 an exchange before all counts them
    noise_multiplier: float = 0.0  # of the noise in what is uploaded, by what one row can change
    delta: float = 1e-5  # δ at which ε is counted
    rounds: int = 1  # 2: clients' own texts go round first, and are scored in a second exchange

    def __post_init__(self) -> None:
        if not (self.visual or self.text):
            raise SettingsError("tofa: visual and text are both off; leave one on")
        if not 0 <= self.alpha <= 1 or self.shrinkage <= 0:
            raise SettingsError(
                f"tofa: alpha = {self.alpha} and shrinkage = {self.shrinkage} do not fit; alpha "
                "is from 0 to 1, and shrinkage above 0"
            )
        if min(self.smallest, self.contributors) < 1 or not self.noise_multiplier >= 0:
            raise SettingsError(
                f"tofa: smallest = {self.smallest} and contributors = {self.contributors} are at "
                f"least 1, and noise_multiplier = {self.noise_multiplier} is not negative"
            )
        if self.noise_multiplier:
            epsilon(self.noise_multiplier, 1, delta=self.delta)  # a missing library is found now
        if self.exchanges not in (1, 2):
            raise SettingsError(
                f"tofa: rounds = {self.rounds}; it takes 1, 2 for own texts, and one more if "
                "contributors is above 1"
            )

    @property
    def exchanges(self) -> int:  # without the one that counts contributors
        return self.rounds - (self.contributors > 1)

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image"}),
            sums=None if self.text and self.exchanges == 2 else "total",  # texts have none
            uneven=frozenset({"texts"}),  # of clients that bring more or fewer
            smallest=self.smallest,
            contributors=self.contributors,
        )

    @property
    def batch(self) -> int:  # all rows in one minibatch, so that noise is drawn once
        return self.most

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes, dim = len(frozen.classes), frozen.dim
        shared: Tensors = {}
        local: Tensors = {}
        if self.text:
            there = (texts(frozen).abs().amax(-1) > 0).float()
            shared["weights"] = there / there.sum(1, keepdim=True)  # b, uniform so far
        if self.text and self.exchanges == 2:
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
        if self.text and client.texts.shape[1] and self.exchanges == 1:
            raise SettingsError("tofa: clients bring texts of their own; set rounds = 2")
        counts, sums, second = self.statistics(frozen, sent, client)
        if self.contributors > 1 and "open" not in sent:
            return {"holders": (counts > 0).to(torch.int32)}, local
        upload: Tensors = {}
        if self.visual and "texts" not in sent:
            upload["counts"] = counts.to(torch.int32)
            upload["sums"] = gaussian.to_fixed(sums, self.most)
            upload["moments"] = gaussian.to_fixed(gaussian.pack(second), self.most)
            if "row weight" in local:
                local = {**local, "row weight": 1 + self.alpha * (counts > 0).float()}
        if self.text and self.exchanges == 2 and "texts" not in sent:
            upload["texts"] = client.texts
        elif self.text:
            every = texts(frozen)
            if "texts" in sent:
                every = torch.cat([every, sent["texts"]], dim=1)
            present = counts > 0
            means = sums / counts.clamp(min=1)[:, None]
            terms, voting = alignment.votes(
                alignment.margins(means, present, every, self.sharpness), present
            )
            upload["scores"] = gaussian.to_fixed(terms, TERMS)
            upload["voters"] = voting.to(torch.int32)
        return upload, local

    def statistics(
        self, frozen: Frozen, sent: Tensors, client: Client
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, class sums and Σ x xᵀ of the classes that may be uploaded, with their noise.

        One row more or less changes a count by 1, a sum by a vector of norm 1 and the triangle of
        Σ x xᵀ by one of norm 1 at most: √3 together. What is left out is chosen by the counts that
        are uploaded, noise and all, so the choice gives nothing away.
        """
        classes, dim = len(frozen.classes), frozen.dim
        counts = gaussian.members(client.y, classes).sum(0)
        if self.noise_multiplier:
            deviation = self.noise_multiplier * 3**0.5
            ends = [classes, classes + classes * dim]
            on_counts, on_sums, on_second = client.noise[0].double().tensor_split(ends)
            counts = cover(counts, deviation, on_counts).round()
            longest = client.x.norm(dim=1, keepdim=True).clamp(min=1)
            client = replace(client, x=client.x.double() / longest)
        counts = counts * sent.get("open", torch.ones_like(counts))
        client = parts.withhold(client, counts, self.smallest)
        there = counts >= self.smallest
        _, sums, second = gaussian.raw(client.x, client.y, classes)
        if self.noise_multiplier:
            sums = cover(sums, deviation, on_sums.reshape(classes, dim))
            sums = torch.where(there[:, None], sums, 0.0)
            second = cover(second, deviation, gaussian.unpack(on_second, dim))
        return torch.where(there, counts, 0.0), sums, second

    def noise(self, frozen: Frozen) -> int:
        classes, dim = len(frozen.classes), frozen.dim
        return (classes + classes * dim + dim * (dim + 1) // 2) * (self.noise_multiplier > 0)

    def covers(self, upload: Tensors) -> Tensor:
        """(classes,) True where the upload tells of rows of the class."""
        keys = {"counts", "holders", "voters"} & upload.keys()
        return torch.stack([upload[key] for key in keys]).sum(0) > 0

    def means(self, upload: Tensors) -> Tensor | None:
        """(classes, dim) what the upload says of the class means, for an audit."""
        if "sums" not in upload:
            return None
        counts = upload["counts"].clamp(min=1)[:, None]
        return gaussian.from_fixed(upload["sums"], self.most) / counts

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
        if "holders" in total:
            out["open"] = (total["holders"] >= self.contributors).double()
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
            gaussian.quantum(self.most),
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
        scatter = gaussian.unpack(sent["scatter"], frozen.dim)
        prior = gaussian.Moments(sent["counts"], sent["means"], scatter)
        known = gaussian.posterior(prior, client.x, client.y, self.alpha)
        rule = gaussian.discriminant(known, gaussian.ridge(known, self.shrinkage))
        out = {
            "weight change": rule.weight - sent["weight"],
            "bias change": rule.bias - sent["bias"],
        }
        if self.text and self.fusion:
            x, y = client.x, client.y
            logits = gaussian.left_out(known, rule, x, y, local["row weight"][y.clamp(min=0)])
            if self.calibration == "held-out" and client.held_x.shape[0]:
                x, y = client.held_x, client.held_y
                logits = rule.logits(x)
            words = frozen.scale * x @ prompts(frozen, sent).mT
            heats = [calibration.heat(logits, y), calibration.heat(words, y)]
            out["heat"] = torch.stack(heats)
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

    def first_head(self, frozen: Frozen, shared: Tensors) -> Tensor:
        """(classes, dim): what a head over scaled cosines can start from."""
        if not self.visual:
            return prompts(frozen, shared)
        means, there = shared["means"], shared["counts"] > 0
        seen = calibration.without_bias(shared["weight"], shared["bias"], means, there)
        return seen / frozen.scale

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        names = ("visual temperature", "text temperature")
        out = dict(zip(names, local.get("heat", torch.zeros(0)).exp().tolist(), strict=False))
        if self.noise_multiplier:
            out["epsilon"] = epsilon(self.noise_multiplier, self.rounds, delta=self.delta)
            out["delta"] = self.delta
        return out

    name = "tofa"
    send = parts.everything
    per_row, whole = _totals.per_row, _totals.whole
