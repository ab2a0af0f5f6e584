"""The contract: three kinds of tensors and six verbs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from fedvlm.tensors import Tensors

__all__ = [
    "MIN_CLASS_CLIENTS",
    "MIN_CLASS_SAMPLES",
    "NEEDS",
    "OPTIONAL_PROTOCOLS",
    "TRAIT_GROUPS",
    "UPLOAD_SUMS",
    "UPLOAD_SUM_MEANINGS",
    "VERBS",
    "Alternating",
    "Batch",
    "ClassStatistics",
    "ClassTraits",
    "Client",
    "Conditioned",
    "Described",
    "Factored",
    "Frozen",
    "HeadProvider",
    "ImageTower",
    "LazyRows",
    "Matching",
    "Method",
    "Noisy",
    "PrivacyTraits",
    "Regularised",
    "Schedule",
    "Stacked",
    "StateBounded",
    "Tempered",
    "TextTower",
    "Totalled",
    "Trained",
    "TrainingTraits",
    "Traits",
    "UploadSum",
    "as_stacked",
    "gradient_update",
    "schedule",
    "setting",
    "sums_uploads",
    "tunable_settings",
    "upload_sum",
]

VERBS = ("init", "send", "update", "aggregate", "adapt", "predict")
NEEDS = ("image", "text", "patches", "text tower", "image tower")
MIN_CLASS_SAMPLES = 16  # samples of a class below which its statistics stay at the client
MIN_CLASS_CLIENTS = 3  # clients that must contribute to the verified sum of a class's statistics
UploadSum = Literal["samples", "clients", "total"]
UPLOAD_SUM_MEANINGS: dict[UploadSum, str] = {  # sums of the uploads that may be all an aggregate needs
    "samples": "the mean over samples",
    "clients": "the mean over clients",
    "total": "the plain sum",
}


class TextTower(Protocol):
    """A frozen text tower: context vectors in, class features out."""

    @property
    def template(self) -> str: ...  # the sentence around a class name
    @property
    def prefix(self) -> Tensor: ...  # (tokens, width) of the template before the class name
    @property
    def suffixes(self) -> Tensor: ...  # (classes, longest, width) of class name and what follows
    @property
    def ends(self) -> Tensor: ...  # (classes,) where the feature is read in the suffix
    @property
    def positions(self) -> Tensor: ...  # (length, width)
    @property
    def width(self) -> int: ...
    @property
    def room(self) -> int: ...  # for context vectors, beside the longest class
    def __call__(self, context: Tensor) -> Tensor: ...


class ImageTower(Protocol):
    """A frozen image tower as a function of its weights."""

    @property
    def weights(self) -> Tensors: ...
    @property
    def blocks(self) -> int: ...
    @property
    def width(self) -> int: ...
    def __call__(self, weights: Tensors, pixels: Tensor, prompts: Tensor | None = None) -> Tensor: ...
    def last(self, blocks: int) -> list[str]: ...
    def matrices(self, targets: Sequence[str]) -> list[str]: ...


@dataclass(frozen=True)
class Frozen:
    """What everyone holds; never trained, never sent."""

    classes: tuple[str, ...]
    dim: int
    scale: float  # the encoder's logit scale
    text: Tensor | None  # (classes, dim) unit-norm text embeddings of the class names
    seed: int = 0  # for initial values drawn in `init`
    text_tower: TextTower | None = None  # context vectors -> class embeddings
    image_tower: ImageTower | None = None  # weights and pixels -> image embeddings
    descriptions: Tensor | None = None  # (classes, texts, dim) zeros where a class has fewer
    negative_text: Tensor | None = None  # (classes, dim) of images without the finding, with several findings per image
    multi_label: bool = False  # an image may have several of the classes, which are then called findings


class LazyRows(Protocol):
    """Samples that are read on demand, indexed like the first axis of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any) -> Tensor: ...
    def take(self, index: Any) -> "LazyRows": ...


NO_ROWS = torch.zeros(0, 0)


@dataclass(frozen=True)
class Client:
    """One client's samples and this round's minibatches; engines may add a leading client axis.

    What a row is follows from the method's needs: with "image tower" the pixels (3, height, width),
    with "patches" the patch embeddings (patches, dim) as the encoder gave them, and otherwise the
    unit-norm image embedding (dim,).
    """

    x: Any  # (samples, ...) Tensor, or LazyRows if images are decoded on demand
    y: Tensor  # (samples,) labels, -1 where there is no sample or its label is unknown
    order: Tensor  # (steps, batch) samples of each minibatch by row number, -1 where there is none
    val_x: Any  # (validation, ...) validation samples, for choices of the client itself
    val_y: Tensor  # (validation,)
    reference: Any  # (references, ...) unlabelled samples for methods with a `reference`
    reference_order: Tensor  # (steps, batch) reference samples by row number, -1 where there is none
    texts: Tensor  # (classes, texts, dim) the client's own descriptions, zeros where there are fewer
    noise: Tensor  # (steps, values) standard normal, as many as the method's `noise` says
    unlabelled: Any = NO_ROWS  # (samples, ...) own samples without a label, for methods with this trait; 0 is padding


class Batch(NamedTuple):
    """Hold a minibatch of a client as its loss gets it."""

    x: Tensor  # (batch, ...)
    y: Tensor  # (batch,) valid labels also where real is False
    real: Tensor  # (batch,) False for padding; with `class_weights` the sample's weight, 0 for padding
    reference: Tensor  # (batch, ...) unlabelled samples, none if the method has no `reference`


def documented(default: Any, doc: str) -> Any:
    """Make a field with its line in docs/reference/contract.md, which is made from the class."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class TrainingTraits:
    """What a method's training reads and keeps."""

    memory: frozenset[str] = documented(frozenset(), "names of tensors that are kept but not trained")
    min_samples: int = documented(1, "training samples that every client must have")
    client_count: str | None = documented(None, "name of a shared tensor that holds how many clients there are")
    reference: Literal["public", "target"] | None = documented(None, "samples of `batch.reference` (a setting)")
    unlabelled: bool = documented(False, "a client's own samples without a label come as `client.unlabelled`")
    tunable: tuple[str, ...] | None = documented(None, "settings worth tuning; None: `lr`, where there is a `loss`")


@dataclass(frozen=True, kw_only=True)
class PrivacyTraits:
    """What the server has to see of a client."""

    upload_sum: Literal["samples", "clients", "total"] | None = documented(
        None, f"of {', '.join(UPLOAD_SUM_MEANINGS)}: all that `aggregate` needs, so that a verified sum will do"
    )
    ragged_uploads: frozenset[str] = documented(frozenset(), "uploaded tensors whose shape differs between clients")
    centralised: bool = documented(False, "not federated: one client has the samples of all, in a simulation only")


@dataclass(frozen=True, kw_only=True)
class ClassTraits:
    """How a method treats single classes."""

    fixed: bool = documented(False, "local tensors name classes, so that the method cannot learn a new class")
    min_class_samples: int | None = documented(None, "samples that a class must have to be uploaded (a setting)")
    min_class_clients: int | None = documented(None, "clients that must have a class before any uploads it (a setting)")
    multi_label: bool = documented(False, "it may train several findings per image, each as a binary problem")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a method says about itself beside its verbs, by topic; the defaults say nothing.

    Write `traits = Traits(...)` in the class, or a property of that name where it follows from settings.
    A trait that is a setting's value has the setting's name.
    """

    needs: frozenset[str] = documented(frozenset(), f"what it needs of the encoder, of {', '.join(NEEDS)}")
    training: TrainingTraits = TrainingTraits()
    privacy: PrivacyTraits = PrivacyTraits()
    classes: ClassTraits = ClassTraits()


TRAIT_GROUPS: dict[str, type] = {"training": TrainingTraits, "privacy": PrivacyTraits, "classes": ClassTraits}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Settings that engines and parts read; the defaults are for a method that has none of them."""

    batch_size: int = documented(32, "samples of a minibatch")
    local_epochs: int = documented(1, "passes over a client's samples in a round")
    lr: float = documented(0.0, "learning rate of a step")
    momentum: float = documented(0.0, "of `parts.sgd`")
    weight_decay: float = documented(0.0, "weight decay, added to the gradient")
    betas: tuple[float, float] = documented((0.9, 0.999), "of `parts.adam`")
    eps: float = documented(1e-8, "of `parts.adam`")

    def steps(self, rows: int) -> tuple[int, int, int]:
        """Return epochs, minibatches per epoch and their size, for so many samples."""
        return self.local_epochs, -(-rows // self.batch_size), self.batch_size


class Method(Protocol):
    """A frozen dataclass: its fields are its settings. `register` says what is missing."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str: ...
    @property
    def rounds(self) -> int: ...  # 0 is zero-shot, 1 is one-shot
    @property
    def traits(self) -> Traits: ...

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]: ...
    def send(self, shared: Tensors, id: str) -> Tensors: ...
    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]: ...
    def aggregate(
        self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
    ) -> Tensors: ...
    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors: ...
    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor: ...


P = TypeVar("P", bound=Callable[..., Any])


@runtime_checkable
class Trained(Protocol):
    """what a gradient part minimises; it may also return new values of tensors in `memory`"""

    def loss(
        self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors
    ) -> Tensor | tuple[Tensor, Tensors]: ...


@runtime_checkable
class Alternating(Protocol):
    """whether a gradient part trains a tensor in an epoch of the round, from 0 (a bool tensor like
    `epoch`), where not all are trained in all"""

    def trains_in_epoch(self, key: str, epoch: Tensor) -> Tensor: ...


@runtime_checkable
class Regularised(Protocol):
    """of a loss that is more than the cross-entropy of a linear head: the gradient of the rest, for
    `parts.regularised_head_sgd`"""

    def extra_gradient(self, sent: Tensors, local: Tensors, head: Tensor) -> Tensor: ...


@runtime_checkable
class Stacked(Protocol):
    """a faster `update` of stacked clients; the contract test shows that it gives the same"""

    def update_many(
        self, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
    ) -> tuple[Tensors, Tensors]: ...


@runtime_checkable
class Noisy(Protocol):
    """how many standard normal numbers a step needs; they come in `client.noise`"""

    def noise(self, frozen: Frozen) -> int: ...


@runtime_checkable
class Described(Protocol):
    """numbers about a client's local tensors, for the record"""

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]: ...


@runtime_checkable
class ClassStatistics(Protocol):
    """of an upload of class statistics: which classes it covers, and (classes, dim) their means,
    if it has any; the contract test compares the first with `min_class_samples`"""

    def covered_classes(self, upload: Tensors) -> Tensor: ...
    def class_means(self, upload: Tensors) -> Tensor | None: ...


@runtime_checkable
class HeadProvider(Protocol):
    """(classes, dim) a head that another method may start from (`warm_start`)"""

    def initial_head(self, frozen: Frozen, shared: Tensors) -> Tensor: ...


@runtime_checkable
class Tempered(Protocol):
    """the temperature of a head over cosines, if it is not the encoder's"""

    @property
    def tau(self) -> float: ...


@runtime_checkable
class Conditioned(Tempered, Protocol):
    """κ, the condition number of a client's map, for the bound on client drift"""

    @property
    def lr(self) -> float: ...
    def condition(self, local: Tensors) -> float: ...


@runtime_checkable
class Factored(Protocol):
    """what is trained and uploaded, if that is not what the server keeps"""

    def factors(self, frozen: Frozen) -> Tensors: ...


@runtime_checkable
class Totalled(Protocol):
    """of an upload of totals: by name (units, values) their means and (units,) the samples behind them,
    class by class where they are; and an upload made of such means. `reference_means` are the means over all
    clients, empty in the first pass. Without the verbs totals are divided by the samples of the client"""

    def to_means(self, upload: Tensors, reference_means: Tensors) -> dict[str, tuple[Tensor, Tensor]]: ...
    def from_means(self, means: Mapping[str, tuple[Tensor, Tensor]]) -> Tensors: ...


@runtime_checkable
class StateBounded(Protocol):
    """refuse, in a verified sum, shared tensors that no honest sum of so many members leads to"""

    def check_state(self, before: Tensors, after: Tensors, members: int) -> None: ...


@runtime_checkable
class Matching(Protocol):
    """(samples, classes, 2, patches) cosines of patches with a shared and a local prompt, for
    `fedvlm explain`"""

    @property
    def transport(self) -> str: ...
    @property
    def gamma(self) -> float: ...
    @property
    def entropy_reg(self) -> float: ...
    def similarity(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor: ...


OPTIONAL_PROTOCOLS: tuple[type, ...] = (
    Trained,
    Alternating,
    Regularised,
    Stacked,
    Noisy,
    Described,
    ClassStatistics,
    HeadProvider,
    Tempered,
    Conditioned,
    Factored,
    Totalled,
    StateBounded,
    Matching,
)
GRADIENT_UPDATES: set[Callable[..., Any]] = set()  # updates that minimise a `loss`
UPLOAD_SUMS: dict[Callable[..., Any], UploadSum] = {}  # aggregates that need only a sum of the uploads


def gradient_update(part: P) -> P:
    """Mark an update that minimises a `loss`: `register` checks what it reads."""
    GRADIENT_UPDATES.add(part)
    return part


def sums_uploads(kind: UploadSum) -> Callable[[P], P]:
    """Mark an aggregate that needs only this sum of the uploads."""

    def mark(part: P) -> P:
        UPLOAD_SUMS[part] = kind
        return part

    return mark


def upload_sum(method: Method) -> UploadSum | None:
    """Return the sum of the uploads that a method's aggregate depends on alone, if any.

    A method says so in its traits; the standard parts say so themselves.
    """
    return method.traits.privacy.upload_sum or UPLOAD_SUMS.get(type(method).aggregate)


def as_stacked(method: Method) -> Stacked | None:
    """Return the method if its `update_many` belongs to its `update`.

    A class that writes `update`, `loss`, `predict` or `trains_in_epoch` anew does not mean an older
    `update_many`.
    """
    bases = type(method).__mro__

    def defined_at(name: str) -> int:
        return next((i for i, base in enumerate(bases) if name in vars(base)), len(bases))

    newest = min(map(defined_at, ("update", "loss", "predict", "trains_in_epoch")))
    return method if isinstance(method, Stacked) and defined_at("update_many") <= newest else None


SCHEDULE_FIELDS = tuple(field.name for field in fields(Schedule))


def schedule(method: Method) -> Schedule:
    """Return a method's settings of minibatches and optimiser."""
    return Schedule(**{key: getattr(method, key) for key in SCHEDULE_FIELDS if hasattr(method, key)})


def setting(method: Method, name: str) -> Any:
    """Return a setting that not every method has, or None."""
    return getattr(method, name, None)


def tunable_settings(method: Method) -> tuple[str, ...]:
    """Return the settings worth tuning on validation samples."""
    if method.traits.training.tunable is not None:
        return method.traits.training.tunable
    return ("lr",) if isinstance(method, Trained) else ()
