"""Adapt in one round without training: Gaussian class prototypes, weighted texts, fused for each image.

Clients upload sums over their samples, which the server turns into a prior. Each client computes its posterior, and
mixes that visual classifier with the text classifier by the confidence of the two.
Zhang et al., TOFA: training-free one-shot federated adaptation for vision-language models, 2025.

Texts are (classes, texts, dim): the template's first, then descriptions, then clients' own; a zero vector is no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import ClassTraits, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.core.schema import COUNT, OPEN_FRACTION, POSITIVE, UNIT, ranged_field
from fedvlm.errors import FederationError, SettingsError
from fedvlm.maths import calibration, gaussian_classes
from fedvlm.maths.gaussian_classes import fixed_point_step, from_fixed_point, to_fixed_point
from fedvlm.maths.privacy import spent
from fedvlm.methods._settings import StatisticsSettings
from fedvlm.methods._stacking import update_sequentially
from fedvlm.tensors import remember_latest

MAX_TERM = 8  # bound on the size of a term of r, for its fixed point
TEXTS_PER_CHUNK = 800  # their scores fit a core's cache
MIN_MARGIN = 1e-3  # ε: smaller margins count as this, because the score takes their logarithm


@register
@dataclass(frozen=True)
class TOFA(StatisticsSettings):
    visual: bool = True  # the three parts of the paper's ablation
    text: bool = True  # False: the visual classifier alone
    fusion: bool = True  # False: both modalities weigh the same, uncalibrated
    alpha: float = ranged_field(1.0, UNIT)  # α of the power prior: 0 uses the client's own samples only
    shrinkage: float = 1.0  # λ of the ridge λ tr(S)/(ν - 1); the paper says only "small"
    sharpness: float = ranged_field(100.0, POSITIVE)  # s_t of eq. 5, which prints none: with 1 all texts weigh the same
    temperature: float = 0.5  # τ_t of eq. 7
    text_mean: Literal["voters", "clients"] = "voters"  # r of eq. 6: over clients that vote on a class, or over all K
    # samples that calibrate the modalities: training samples, each left out once, or validation samples
    calibration: Literal["leave-one-out", "held-out"] = "leave-one-out"
    # largest number of samples of a client; sets the fixed point of uploads
    max_samples: int = ranged_field(4096, COUNT)
    min_class_clients: int = 1  # nor are classes of fewer clients; above 1, a first round counts them
    noise_multiplier: float = 0.0  # noise in uploads, as a multiple of what one sample can change
    delta: float = ranged_field(1e-5, OPEN_FRACTION)  # δ at which ε is reported
    rounds: int = 1  # 2: clients' own texts are collected first and scored in a second round

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.visual or self.text):
            raise SettingsError("tofa.visual and tofa.text must not both be false; set one to true")
        spent(self.noise_multiplier, 1, self.delta)  # fails now if the library is missing
        if self.text_rounds not in (1, 2):
            first = self.rounds - self.text_rounds + 1
            problem = f"tofa.rounds must be {first}, or {first + 1} for clients' own texts, got {self.rounds}"
            raise SettingsError(f"{problem}; min_class_clients above 1 takes one round more")

    @property
    def text_rounds(self) -> int:  # without the round that counts the clients of a class
        return self.rounds - (self.min_class_clients > 1)

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image"}),
            privacy=PrivacyTraits(
                upload_sum=None if self.text and self.text_rounds == 2 else "total",  # texts are not summed
                ragged_uploads=frozenset({"texts"}),  # clients have different numbers of texts
            ),
            classes=ClassTraits(
                min_class_samples=self.min_class_samples, min_class_clients=self.min_class_clients, multi_label=True
            ),
        )

    @property
    def batch_size(self) -> int:  # one minibatch of all samples, so that noise is drawn once
        return self.max_samples

    def noise(self, frozen: Frozen) -> int:
        return gaussian_classes.count_noise_values(len(frozen.classes), frozen.dim) if self.noise_multiplier else 0

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes, local = len(frozen.classes), dict[str, Tensor]()
        shared = initial_weights(frozen, self.text_rounds == 2) if self.text else {}
        if self.visual:
            # A client keeps the change from the prior's discriminant: one that has not adapted predicts by the prior.
            shared |= gaussian_classes.empty_prior(classes, frozen.dim)
            local |= {f"{key} change": torch.zeros_like(shared[key]) for key in ("weight", "bias")}
        if self.visual and self.text and self.fusion:
            local["log temperatures"] = torch.zeros(2)  # log τ of the visual and of the text classifier
            local["sample weight"] = torch.ones(classes)  # 1 + α once the prior has the client's samples too
        return shared, local

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        n_samples, is_first = client.x.shape[0], "texts" not in sent
        if n_samples > self.max_samples:
            raise SettingsError(f"tofa: a client has {n_samples} samples; set max_samples = {n_samples} or higher")
        if self.text and client.texts.shape[1] and self.text_rounds == 1:
            raise SettingsError("tofa: clients have texts of their own; set rounds = 2")
        allowed = open_classes(sent, len(frozen.classes))
        limits = allowed, self.min_class_samples, self.noise_multiplier, client.noise[:1].flatten()
        counts, sums, second = gaussian_classes.released_class_sums(client.x, client.y, *limits)
        if self.min_class_clients > 1 and "open" not in sent:
            return {"holders": (counts > 0).to(torch.int32)}, local
        upload: Tensors = {}
        if self.visual and is_first:
            upload |= gaussian_classes.pack_statistics(counts, sums, second, self.max_samples)
            if "diagonal" in sent:
                upload["moments diagonal"] = gaussian_classes.diagonal_of(upload.pop("moments"), frozen.dim)
            if "sample weight" in local:
                local = {**local, "sample weight": 1 + self.alpha * (counts > 0).float()}
        if self.text and is_first and self.text_rounds == 2:
            upload["texts"] = client.texts
        elif self.text:
            upload |= score_texts(frozen, sent, counts, sums, self.sharpness)
            if self.text_mean == "clients":
                upload["clients"] = torch.ones(1, dtype=torch.int32)
        return upload, local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        """Use sums alone, so that they may come from a verified sum; collect texts as they are."""
        total = gaussian_classes.add_uploads(uploads, uploads[0].keys() - {"texts"})
        out = {key: value for key, value in shared.items() if key != "texts"}
        if "holders" in total:
            out["open"] = (total["holders"] >= self.min_class_clients).double()
        if "moments diagonal" in total:
            step = fixed_point_step(self.max_samples)
            statistics = total["moments diagonal"].double() * step, total["counts"], total["sums"].double() * step
            total["moments"] = (gaussian_classes.gram_from_diagonal(*statistics) / step).round().long()
        if "moments" in total:
            out |= gaussian_classes.pooled_prior(total, self.max_samples, self.shrinkage)
        if "scores" in total:
            if "clients" in total:  # all vote, those without the class, or whose template fails, with 0
                total["voters"] = total["clients"].expand_as(total["voters"])
            out |= align_texts(shared, total, self.temperature)
        if "texts" in uploads[0]:  # of all clients, ordered by id, without columns of padding
            texts = torch.cat([uploads[i]["texts"] for i in sorted(range(len(ids)), key=lambda i: ids[i])], dim=1)
            out["texts"] = texts[:, texts.abs().amax((0, 2)) > 0]
        return out

    def check_state(self, before: Tensors, after: Tensors, members: int) -> None:
        """Allow any state: no upload depends on it, but for which classes are open, which a site decides itself."""

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        if not self.visual:
            return local
        x, y = client.x, client.y
        rule = gaussian_classes.fit_client_discriminant(sent, x, y, self.alpha, self.shrinkage)
        out = {"weight change": rule.weight - sent["weight"], "bias change": rule.bias - sent["bias"]}
        if self.text and self.fusion:
            if self.calibration == "held-out" and client.val_x.shape[0]:
                x, y = client.val_x, client.val_y
                visual_logits = x @ rule.weight.mT + rule.bias
            else:
                weight, dim = local["sample weight"][y.clamp(min=0)], x.shape[1]
                visual_logits = gaussian_classes.leave_one_out_from_products(rule.products, rule.counts, y, weight, dim)
            text_logits = frozen.scale * x @ class_texts(frozen, sent).mT
            out["log temperatures"] = calibration.fit_log_temperature(torch.stack([visual_logits, text_logits]), y)
        return {**local, **out}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        text_logits = frozen.scale * x @ class_texts(frozen, sent).mT if self.text else None
        if not self.visual and text_logits is not None:
            return text_logits
        weight = sent["weight"] + local["weight change"]
        visual_logits = x @ weight.mT + sent["bias"] + local["bias change"]
        if text_logits is None:
            return visual_logits
        return calibration.combine_logits(visual_logits, text_logits, local.get("log temperatures"))

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        names = ("visual temperature", "text temperature")
        temperatures = local.get("log temperatures", torch.zeros(0)).exp().tolist()
        return dict(zip(names, temperatures, strict=False)) | spent(self.noise_multiplier, self.rounds, self.delta)

    def initial_head(self, frozen: Frozen, shared: Tensors) -> Tensor:
        """Return a (classes, dim) head over scaled cosines for methods with a warm start."""
        if not self.visual:
            return class_texts(frozen, shared)
        rule = shared["weight"], shared["bias"], shared["means"], shared["counts"] > 0
        return calibration.fold_bias(*rule) / frozen.scale

    def covered_classes(self, upload: Tensors) -> Tensor:
        """Return (classes,) True where the upload depends on samples of the class."""
        keys = {"counts", "holders", "voters"} & upload.keys()
        return torch.stack([upload[key] for key in keys]).sum(0) > 0

    def class_means(self, upload: Tensors) -> Tensor | None:
        """Return the (classes, dim) class means that can be read from the upload."""
        return gaussian_classes.class_means(upload, self.max_samples) if "sums" in upload else None

    def to_means(self, upload: Tensors, reference_means: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the fixed-point sums as class means and a scatter, mean votes, and holders, each with its count."""
        out: dict[str, tuple[Tensor, Tensor]] = {}
        if "counts" in upload:
            counts = upload["counts"].double()
            sums, second = (from_fixed_point(upload[key], self.max_samples) for key in ("sums", "moments"))
            centre = reference_means.get("means")
            means, scatter = gaussian_classes.means_and_scatter(counts, sums, second, centre)
            out = {"means": (means, counts), "scatter": (scatter[None], counts.sum()[None])}
        if "scores" in upload:
            voters = upload["voters"].double()
            terms = from_fixed_point(upload["scores"], MAX_TERM)
            out["scores"] = (terms / voters.clamp(min=1)[:, None], voters)
        for key in ("holders", "clients"):
            if key in upload:
                out[key] = (upload[key][:, None][:, :0].double(), upload[key].double())
        return out

    def from_means(self, means: Mapping[str, tuple[Tensor, Tensor]]) -> Tensors:
        """Invert `to_means`."""
        out: Tensors = {}
        if "means" in means:
            counts, step = means["means"][1].round(), fixed_point_step(self.max_samples)
            sums, second = gaussian_classes.sums_from_moments(counts, means["means"][0], means["scatter"][0][0])
            out |= {"sums": (sums / step).round().long(), "moments": (second / step).round().long()}
            out["counts"] = counts.long()
        if "scores" in means:
            terms, voters = means["scores"][0], means["scores"][1].round()
            out["scores"] = (terms * voters[:, None] / fixed_point_step(MAX_TERM)).round().long()
            out["voters"] = voters.long()
        out |= {key: means[key][1].round().long() for key in ("holders", "clients") if key in means}
        return out

    name, send = "tofa", parts.send_all
    # Stacked, the products of a client would include classes that it has no samples of.
    update_many = update_sequentially


def open_classes(sent: Tensors, classes: int) -> Tensor:
    """Return (classes,) True where the server allows a class; by default everywhere."""
    if "open" not in sent:
        return torch.ones(classes, dtype=torch.bool)
    if sent["open"].shape != (classes,):
        problem = f"tofa: 'open' must have {classes} numbers, one for each class, got shape {tuple(sent['open'].shape)}"
        raise FederationError(f"{problem}; the server runs another version")
    return sent["open"] > 0


def initial_weights(frozen: Frozen, has_client_texts: bool) -> Tensors:
    """Return b, uniform over the texts that exist, and an empty mix of clients' own texts."""
    if frozen.text is None:
        raise SettingsError("tofa.text is true, but the encoder has no text; set text = false")
    described = () if frozen.descriptions is None else (frozen.descriptions,)
    has_text = (torch.cat([frozen.text[:, None], *described], dim=1).abs().amax(-1) > 0).float()
    shared = {"weights": has_text / has_text.sum(1, keepdim=True)}
    return shared | ({"client texts": torch.zeros(len(has_text), frozen.dim)} if has_client_texts else {})


def class_texts(frozen: Frozen, sent: Tensors) -> Tensor:
    """Return (classes, dim): the texts of every class, mixed by their weights."""
    assert frozen.text is not None  # checked by `init`
    described = () if frozen.descriptions is None else (frozen.descriptions,)
    mixed = mix_common_texts(sent["weights"], frozen.text, *described)
    return mixed + sent["client texts"] if "client texts" in sent else mixed


@remember_latest  # once for all clients: descriptions may be many
def mix_common_texts(weights: Tensor, text: Tensor, *described: Tensor) -> Tensor:
    mixed = weights[:, :1] * text
    for descriptions in described:
        mixed = mixed + mix_texts(weights[:, 1:], descriptions)
    return mixed


def score_texts(frozen: Frozen, sent: Tensors, counts: Tensor, sums: Tensor, scale: float) -> Tensors:
    """Return a client's terms of r over all texts, and the classes it votes on, as whole numbers."""
    assert frozen.text is not None  # checked by `init`
    groups = [frozen.text[:, None], frozen.descriptions, sent.get("texts")]
    present = counts > 0
    means = sums / counts.clamp(min=1)[:, None]
    # Group by group, because one tensor of all would be a copy for every client.
    margins = [text_margins(means, present, group, scale) for group in groups if group is not None]
    terms, voting = vote_terms(torch.cat(margins, dim=1), present)
    return {"scores": to_fixed_point(terms, MAX_TERM), "voters": voting.to(torch.int32)}


def align_texts(shared: Tensors, total: Tensors, temperature: float) -> Tensors:
    """Return b of eq. 7 over all texts of a class, and the mix of clients' own texts."""
    n_common, has_text, client_texts = shared["weights"].shape[1], shared["weights"] > 0, shared.get("texts")
    if client_texts is not None:
        has_text = torch.cat([has_text, client_texts.abs().amax(-1) > 0], dim=1)
    terms = from_fixed_point(total["scores"], MAX_TERM)
    b = weigh_texts(terms, total["voters"], has_text, temperature).float()
    out = {"weights": b[:, :n_common]}
    return out if client_texts is None else out | {"client texts": mix_texts(b[:, n_common:], client_texts)}


def text_margins(means: Tensor, present: Tensor, texts: Tensor, scale: float) -> Tensor:
    """Return (classes, texts): u = p_c - max_{j≠c} p_j of a text of class c, over the classes present.

    p is the softmax over classes j of s_t · z̄_j · Φ(t); u is -1 for a class that is not present. Absent classes are
    left out of the product, which is most of the work of a client with few classes.
    """
    present_classes, n_texts = present.nonzero()[:, 0], texts.shape[1]
    scaled_means = (scale * means[present_classes]).to(texts.dtype)
    out = means.new_full(texts.shape[:2], -1.0, dtype=torch.float64)
    size = max(1, TEXTS_PER_CHUNK // max(1, n_texts))
    for first in range(0, len(present_classes), size):
        chunk = present_classes[first : first + size]
        scores = scaled_means @ texts.index_select(0, chunk).flatten(0, 1).mT
        scores = scores.sub_(scores.amax(0)).exp_()
        total = scores.sum(0).double()
        class_rows = torch.arange(first, first + len(chunk), device=present_classes.device)
        class_rows = class_rows.repeat_interleave(n_texts)[None]
        class_score = scores.gather(0, class_rows)[0].double()
        best = scores.scatter_(0, class_rows, 0.0).amax(0).double()
        out[chunk] = ((class_score - best) / total).reshape(len(chunk), n_texts)
    return out


def vote_terms(margins: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return a client's (classes, descriptions) terms u⁰ log(uᵐ/u⁰) of r, and (classes,) whether it votes.

    A client votes on its classes if it has at least two and the template separates them. The template's own term is
    always 0 and left out.
    """
    template, description_margins = margins[:, :1], margins[:, 1:]
    voting = present & (present.sum() > 1) & (template[:, 0] > 0)
    base = template.clamp(min=MIN_MARGIN)
    terms = base * (description_margins.clamp(min=MIN_MARGIN) / base).log()
    return torch.where(voting[:, None], terms, 0.0), voting


def weigh_texts(terms: Tensor, voters: Tensor, has_text: Tensor, temperature: float) -> Tensor:
    """Return (classes, texts) b = softmax(r/τ_t) over the texts that exist, from summed terms.

    r is the mean over voters, and 0 for the template; without voters all texts of a class weigh the same.
    """
    scores = terms / voters.clamp(min=1)[:, None] / temperature
    scores = torch.cat([torch.zeros_like(has_text[:, :1], dtype=scores.dtype), scores], dim=1)
    return torch.where(has_text, scores, -torch.inf).softmax(-1)


def mix_texts(text_weights: Tensor, texts: Tensor) -> Tensor:
    """Return (classes, dim): Σ_m b_m Φ(t_m), not normalised."""
    return (text_weights[:, None, :].to(texts.dtype) @ texts)[:, 0]
