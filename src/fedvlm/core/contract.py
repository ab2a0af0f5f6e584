"""The contract: three kinds of tensors and six verbs."""

from collections.abc import Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from fedvlm.tensors import Tensors

VERBS = ("init", "send", "update", "aggregate", "adapt", "predict")
NEEDS = ("image", "text", "patches", "text tower", "image tower")
MIN_CLASS_SAMPLES = 16  # rows of a class below which its statistics stay at the client
MIN_CLASS_CLIENTS = 3  # clients that have to share in the secure sum of a class's statistics
UploadSum = Literal["rows", "clients", "total"]
UPLOAD_SUM_MEANINGS: dict[UploadSum, str] = {  # of the uploads, where an aggregate needs to know no more of them
    "rows": "the mean over rows",
    "clients": "the mean over clients",
    "total": "the plain sum",
}


class TextTower(Protocol):
    """A frozen text tower: context vectors in, class features out."""

    @property
    def template(self) -> str: ...  # the sentence around a class name
    @property
    def prefix(self) -> Tensor: ...  # (tokens, width) what it has before the class name
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
    """What everyone holds and no one trains or sends."""

    classes: tuple[str, ...]
    dim: int
    scale: float  # the encoder's logit scale
    text: Tensor | None  # (classes, dim) unit-norm text embeddings of the class names
    seed: int = 0  # for initial values drawn in `init`
    text_tower: TextTower | None = None  # context vectors -> class embeddings
    image_tower: ImageTower | None = None  # weights and pixels -> image embeddings
    descriptions: Tensor | None = None  # (classes, texts, dim) zeros where a class has fewer


class LazyRows(Protocol):
    """Rows that are read when they are asked for, as a tensor's are by its first axis."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any) -> Tensor: ...
    def take(self, index: Any) -> "LazyRows": ...


@dataclass(frozen=True)
class Client:
    """One client's rows and this round's minibatches; engines may add a leading client axis.

    What a row is follows from the method's needs: with "image tower" the pixels (3, height, width),
    with "patches" the patch embeddings (patches, dim) as the encoder gave them, and otherwise the
    unit-norm image embedding (dim,).
    """

    x: Any  # (rows, ...) Tensor, or Rows where images are decoded on demand
    y: Tensor  # (rows,) labels, -1 where there is no row
    order: Tensor  # (steps, batch) rows of each minibatch, -1 where there is no row
    val_x: Any  # (held, ...) validation rows, for choices a client makes for itself
    val_y: Tensor  # (held,)
    reference: Any  # (references, ...) unlabelled rows for methods with a `reference`
    reference_order: Tensor  # (steps, batch) rows of the reference, -1 where there is no row
    texts: Tensor  # (classes, texts, dim) descriptions of its own, zeros where there are fewer
    noise: Tensor  # (steps, numbers) standard normal, as many as the method's `noise` asks for


class Batch(NamedTuple):
    x: Tensor  # (batch, ...)
    y: Tensor  # (batch,) valid labels also where real is False
    real: Tensor  # (batch,) False where the row is padding
    reference: Tensor  # (batch, ...) unlabelled rows, none if the method has no `reference`


def documented(default: Any, doc: str) -> Any:
    """A field with its line in docs/reference/contract.md, which is made from the class."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a method says about itself beside its verbs; the defaults say nothing.

    `traits = Traits(...)` in the class, or a property of that name where it follows from settings.
    A trait that is a setting's value bears the setting's name.
    """

    needs: frozenset[str] = documented(frozenset(), f"what it asks of the encoder, of {', '.join(NEEDS)}")
    memory: frozenset[str] = documented(frozenset(), "names of tensors that are kept but not trained")
    min_samples: int = documented(1, "training rows that every client must have")
    client_count: str | None = documented(
        None, "name of a shared tensor that holds, from the start, how many clients there are"
    )
    upload_sum: Literal["rows", "clients", "total"] | None = documented(
        None,
        f"of {', '.join(UPLOAD_SUM_MEANINGS)}: all its aggregate needs of uploads, so a secure sum will do",
    )
    ragged_uploads: frozenset[str] = documented(
        frozenset(), "names of uploaded tensors whose shape differs between clients"
    )
    min_class_samples: int | None = documented(
        None, "rows a class must have at a client for its statistics to be uploaded (a setting)"
    )
    min_class_clients: int | None = documented(
        None, "clients that must have such a class before any uploads its statistics (a setting)"
    )
    reference: Literal["public", "target"] | None = documented(
        None, "unlabelled rows that come as `batch.reference` (a setting)"
    )
    centralised: bool = documented(
        False, "not federated: one client has the rows of all that train, in a simulation only"
    )
    fixed_classes: bool = documented(
        False, "what a client keeps names classes, though not by its shape: no new class is known"
    )
    tunable: tuple[str, ...] | None = documented(
        None, "settings worth choosing on validation rows; None: `lr`, where there is a `loss`"
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Settings that engines and parts read; the defaults are for a method that has none of them."""

    batch_size: int = documented(32, "rows of a minibatch")
    local_epochs: int = documented(1, "times a client's rows are gone through in a round")
    lr: float = documented(0.0, "learning rate of a step")
    momentum: float = documented(0.0, "of `parts.sgd`")
    weight_decay: float = documented(0.0, "weight decay, added to the gradient")
    betas: tuple[float, float] = documented((0.9, 0.999), "of `parts.adam`")
    eps: float = documented(1e-8, "of `parts.adam`")

    def steps(self, rows: int) -> tuple[int, int, int]:
        """Epochs of so many rows, minibatches of each, and their size."""
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
