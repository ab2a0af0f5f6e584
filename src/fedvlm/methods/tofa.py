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

from fedvlm import parts, tensors
from fedvlm.core import MIN_CLASS_SAMPLES, ClassTraits, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.core.schema import COUNT, UNIT, check_ranges, ranged_field
from fedvlm.errors import FederationError, SettingsError
from fedvlm.maths import calibration, gaussian_classes
from fedvlm.maths.privacy import spent
from fedvlm.methods import _statistics, _totals
from fedvlm.methods._texts import align_texts, class_texts, gather_texts, initial_weights, score_texts


def open_classes(sent: Tensors, classes: int) -> Tensor:
    """Return (classes,) True where the server allows a class; by default everywhere."""
    if "open" not in sent:
        return torch.ones(classes, dtype=torch.bool)
    if sent["open"].shape != (classes,):
        raise FederationError(
            f"tofa: 'open' must have {classes} numbers, one for each class, got shape "
            f"{tuple(sent['open'].shape)}; the server runs another version"
        )
    return sent["open"] > 0


@register
@dataclass(frozen=True)
class TOFA:
    visual: bool = True  # the three parts of the paper's ablation
    text: bool = True  # False: the visual classifier alone
    fusion: bool = True  # False: both modalities weigh the same, as they are
    alpha: float = ranged_field(1.0, UNIT)  # α of the power prior: 0 trusts own rows only
    shrinkage: float = 1.0  # λ of the ridge λ tr(S)/(ν - 1); the paper says only "small"
    sharpness: float = 100.0  # s_t of eq. 5, which prints none: with 1 all texts weigh the same
    temperature: float = 0.5  # τ_t of eq. 7
    # which rows say how sure each modality is: own ones by leaving out, or validation rows
    calibration: Literal["leave-one-out", "held-out"] = "leave-one-out"
    # rows a client may have; the fixed point of uploads is made for them
    max_samples: int = ranged_field(4096, COUNT)
    min_class_samples: int = MIN_CLASS_SAMPLES  # rows a class must have at a client to be uploaded
    min_class_clients: int = 1  # clients it must have then; above 1 an exchange before all counts them
    noise_multiplier: float = 0.0  # of the noise in what is uploaded, by what one row can change
    delta: float = 1e-5  # δ at which ε is counted
    rounds: int = 1  # 2: clients' own texts go round first, and are scored in a second exchange

    def __post_init__(self) -> None:
        check_ranges("tofa", self)
        if not (self.visual or self.text):
            raise SettingsError("tofa.visual and tofa.text must not both be false; set one to true")
        spent(self.noise_multiplier, 1, self.delta)  # a missing library is found now
        if self.exchanges not in (1, 2):
            raise SettingsError(f"tofa: rounds = {self.rounds}; 1, 2 for own texts, one more if contributors > 1")

    @property
    def exchanges(self) -> int:  # without the one that counts contributors
        return self.rounds - (self.min_class_clients > 1)

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image"}),
            privacy=PrivacyTraits(
                upload_sum=None if self.text and self.exchanges == 2 else "total",  # texts have no sum
                ragged_uploads=frozenset({"texts"}),  # clients may bring more or fewer texts
            ),
            classes=ClassTraits(min_class_samples=self.min_class_samples, min_class_clients=self.min_class_clients),
        )

    @property
    def batch_size(self) -> int:  # all rows in one minibatch, so that noise is drawn once
        return self.max_samples

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes, local = len(frozen.classes), dict[str, Tensor]()
        shared = initial_weights(frozen, self.exchanges == 2) if self.text else {}
        if self.visual:
            # A client has the change of the prior's rule: one that has not adapted predicts by it.
            shared |= gaussian_classes.empty_prior(classes, frozen.dim)
            local |= {f"{key} change": torch.zeros_like(shared[key]) for key in ("weight", "bias")}
        if self.visual and self.text and self.fusion:
            local["heat"] = torch.zeros(2)  # log τ of the visual and of the text classifier
            local["row weight"] = torch.ones(classes)  # 1 + α once the prior has the rows too
        return shared, local

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        rows, first = client.x.shape[0], "texts" not in sent
        if rows > self.max_samples:
            raise SettingsError(f"tofa: a client has {rows} rows; set max_samples = {rows} or higher")
        if self.text and client.texts.shape[1] and self.exchanges == 1:
            raise SettingsError("tofa: clients bring texts of their own; set rounds = 2")
        allowed = open_classes(sent, len(frozen.classes))
        limits = allowed, self.min_class_samples, self.noise_multiplier, client.noise[:1].flatten()
        counts, sums, second = gaussian_classes.released_class_sums(client.x, client.y, *limits)
        if self.min_class_clients > 1 and "open" not in sent:
            return {"holders": (counts > 0).to(torch.int32)}, local
        upload: Tensors = {}
        if self.visual and first:
            upload |= gaussian_classes.pack_statistics(counts, sums, second, self.max_samples)
            if "row weight" in local:
                local = {**local, "row weight": 1 + self.alpha * (counts > 0).float()}
        if self.text and first and self.exchanges == 2:
            upload["texts"] = client.texts
        elif self.text:
            upload |= score_texts(frozen, sent, counts, sums, self.sharpness)
        return upload, local

    def update_many(self, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
        """One after the other: a client's products fill a core, and it leaves out what it has not.

        Stacked, classes that a client has no rows of would be multiplied too.
        """
        done = []
        for i in range(len(clients.y)):
            client = Client(*(part[i] for part in vars(clients).values()))
            client_sent, client_local = ({k: value[i] for k, value in stacked.items()} for stacked in (sent, local))
            done.append(self.update(frozen, client_sent, client_local, client))
        uploads, locals_ = zip(*done, strict=True)
        return tensors.stack(uploads), tensors.stack(locals_)

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        """Sums alone matter, so they may come from a secure sum; texts are brought together."""
        total = gaussian_classes.add_uploads(uploads, uploads[0].keys() - {"texts"})
        out = {key: value for key, value in shared.items() if key != "texts"}
        if "holders" in total:
            out["open"] = (total["holders"] >= self.min_class_clients).double()
        if "moments" in total:
            out |= gaussian_classes.pooled_prior(total, self.max_samples, self.shrinkage)
        if "scores" in total:
            out |= align_texts(shared, total, self.temperature)
        return out | ({"texts": gather_texts(uploads, ids)} if "texts" in uploads[0] else {})

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        if not self.visual:
            return local
        discriminant = gaussian_classes.fit_client_discriminant(sent, client.x, client.y, self.alpha, self.shrinkage)
        x, y, out = client.x, client.y, gaussian_classes.discriminant_change(discriminant, sent)
        if self.text and self.fusion:
            if self.calibration == "held-out" and client.val_x.shape[0]:
                x, y = client.val_x, client.val_y
                visual_logits = x @ discriminant.weight.mT + discriminant.bias
            else:
                weight = local["row weight"][y.clamp(min=0)]
                visual_logits = gaussian_classes.leave_one_out_from_products(
                    discriminant.products, discriminant.counts, y, weight, x.shape[1]
                )
            words = frozen.scale * x @ class_texts(frozen, sent).mT
            out["heat"] = calibration.fit_log_temperature(torch.stack([visual_logits, words]), y)
        return {**local, **out}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        text_logits = frozen.scale * x @ class_texts(frozen, sent).mT if self.text else None
        if not self.visual and text_logits is not None:
            return text_logits
        weight = sent["weight"] + local["weight change"]
        visual_logits = x @ weight.mT + sent["bias"] + local["bias change"]
        return (
            visual_logits
            if text_logits is None
            else calibration.combine_logits(visual_logits, text_logits, local.get("heat"))
        )

    name, send = "tofa", parts.send_all
    noise = _statistics.noise
    covered_classes, class_means = _statistics.covered_classes, _statistics.class_means
    describe, initial_head = _statistics.describe, _statistics.initial_head
    to_means, from_means = _totals.to_means, _totals.from_means
