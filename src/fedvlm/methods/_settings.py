"""Settings that many methods share; a method overrides those for which its paper has another value."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedvlm.core import MIN_CLASS_SAMPLES, ClassTraits, PrivacyTraits, TrainingTraits, Traits, UploadSum
from fedvlm.core.schema import check_ranges

HeadInit = Literal["text", "random"]
CtxInit = Literal["random", "template"]


@dataclass(frozen=True, kw_only=True)
class CheckedSettings:
    """Refuse numbers outside their ranges."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_ranges(self.name, self)


@dataclass(frozen=True, kw_only=True)
class LossSettings(CheckedSettings):
    """The loss of methods that train by the cross-entropy of a client's samples."""

    class_weights: Literal["none", "balanced"] = "none"  # "balanced": a client's classes count alike in its loss


@dataclass(frozen=True, kw_only=True)
class SgdSettings(CheckedSettings):
    lr: float = 1e-3  # η, learning rate
    momentum: float = 0.0
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T


@dataclass(frozen=True, kw_only=True)
class AdamSettings(CheckedSettings):
    """FAA-CLIP's values."""

    lr: float = 5e-5  # η, learning rate
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.02  # added to the gradient, not AdamW's
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T


@dataclass(frozen=True, kw_only=True)
class HeadSettings(LossSettings, SgdSettings):
    head: HeadInit = "text"  # initial head: text embeddings, or random


@dataclass(frozen=True, kw_only=True)
class FedOTSettings(HeadSettings):
    """FedOT's values."""

    tau: float = 100.0  # τ; the paper does not say, CLIP's own is 100
    lr: float = 5e-5  # η of both the head and the map
    momentum: float = 5e-4  # "weight decay and momentum set to 5e-4", read literally
    rounds: int = 200  # T


@dataclass(frozen=True, kw_only=True)
class ContextSettings(CheckedSettings):
    """The context vectors of a prompt."""

    n_ctx: int | None = None  # M, context vectors: 16, or as many as the template has
    ctx_init: CtxInit = "random"  # or "template": the words of the template


@dataclass(frozen=True, kw_only=True)
class PromptSettings(ContextSettings, LossSettings, SgdSettings):
    momentum: float = 0.9
    local_epochs: int = 5  # E
    rounds: int = 10  # T


@dataclass(frozen=True, kw_only=True)
class StatisticsSettings(CheckedSettings):
    """The limit of methods that upload class statistics."""

    min_class_samples: int = MIN_CLASS_SAMPLES  # smaller classes of a client are not uploaded


def statistics_traits(upload_sum: UploadSum | None = None, multi_label: bool = False, unlabelled: bool = False) -> Any:
    """Return the property `traits` of a method that uploads class statistics of embeddings."""
    return property(
        lambda self: Traits(
            needs=frozenset({"image"}),
            training=TrainingTraits(unlabelled=unlabelled),
            privacy=PrivacyTraits(upload_sum=upload_sum),
            classes=ClassTraits(min_class_samples=self.min_class_samples, multi_label=multi_label),
        )
    )


def head_needs(head: str) -> frozenset[str]:
    """Return what an initial head needs of the encoder."""
    return frozenset({"image", "text"} if head == "text" else {"image"})


def head_traits(**extra_traits: Any) -> Any:
    """Return the property `traits` of a method with a setting `head`."""
    return property(lambda self: Traits(needs=head_needs(self.head), **extra_traits))
