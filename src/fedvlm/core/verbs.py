"""Verbs a method may have beyond the six, and what standard parts say of themselves.

The first paragraph of a protocol is its line in docs/reference/contract.md, which is made from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from fedvlm.core.contract import Batch, Client, Frozen, Method, Schedule, UploadSum
from fedvlm.tensors import Tensors

P = TypeVar("P", bound=Callable[..., Any])


@runtime_checkable
class Trained(Protocol):
    """what a gradient part walks down; it may also give new values of tensors in `memory`"""

    def loss(
        self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors
    ) -> Tensor | tuple[Tensor, Tensors]: ...


@runtime_checkable
class Alternating(Protocol):
    """whether a gradient part trains a tensor in an epoch of the round, from 0 (a bool tensor like
    `epoch`), where not all are trained in all"""

    def in_turn(self, key: str, epoch: Tensor) -> Tensor: ...


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
    """of an upload of class statistics: which classes it tells of, and (classes, dim) the means
    it gives of them, if any; the contract test compares the first with `min_class_samples`"""

    def covers(self, upload: Tensors) -> Tensor: ...
    def means(self, upload: Tensors) -> Tensor | None: ...


@runtime_checkable
class HeadProvider(Protocol):
    """(classes, dim) a head that another method may start from (`warm_start`)"""

    def first_head(self, frozen: Frozen, shared: Tensors) -> Tensor: ...


@runtime_checkable
class Tempered(Protocol):
    """the temperature of a head over cosines, where it is not the encoder's"""

    @property
    def tau(self) -> float: ...


@runtime_checkable
class Conditioned(Tempered, Protocol):
    """κ of a client's map, for the bound on how far clients pull a head apart"""

    @property
    def lr(self) -> float: ...
    def condition(self, local: Tensors) -> float: ...


@runtime_checkable
class Factored(Protocol):
    """what is trained and uploaded where that is not what the server keeps"""

    def factors(self, frozen: Frozen) -> Tensors: ...


@runtime_checkable
class Totalled(Protocol):
    """of an upload of totals: by name (units, numbers) what they are per row and (units,) the rows,
    class by class where they are; and an upload made of such. `found` is what a first look at all
    clients gave, empty before that. Without the verb totals count per row of the client"""

    def per_row(self, upload: Tensors, found: Tensors) -> dict[str, tuple[Tensor, Tensor]]: ...
    def whole(self, said: Mapping[str, tuple[Tensor, Tensor]]) -> Tensors: ...


@runtime_checkable
class Matching(Protocol):
    """(rows, classes, 2, patches) cosines of patches with a shared and a local prompt, for
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
    Stacked,
    Noisy,
    Described,
    ClassStatistics,
    HeadProvider,
    Tempered,
    Conditioned,
    Factored,
    Totalled,
    Matching,
)
GRADIENT_UPDATES: set[Callable[..., Any]] = set()  # updates that go down a `loss`
UPLOAD_SUMS: dict[Callable[..., Any], UploadSum] = {}  # aggregates that need only a sum of the uploads


def gradient_update(part: P) -> P:
    """Marks an update that goes down a `loss`: `register` asks for what it reads."""
    GRADIENT_UPDATES.add(part)
    return part


def sums_uploads(kind: UploadSum) -> Callable[[P], P]:
    """Marks an aggregate that needs only this sum of the uploads."""

    def mark(part: P) -> P:
        UPLOAD_SUMS[part] = kind
        return part

    return mark


def upload_sum(method: Method) -> UploadSum | None:
    """What sum of the uploads a method's aggregate is a function of, if any is.

    A method says so in its traits; the standard parts say so themselves.
    """
    return method.traits.upload_sum or UPLOAD_SUMS.get(type(method).aggregate)


def as_stacked(method: Method) -> Stacked | None:
    """The method where its `update_many` stands for its `update`.

    A class that writes `update`, `loss`, `predict` or `in_turn` anew does not mean an older
    `update_many`.
    """
    bases = type(method).__mro__

    def defined_at(name: str) -> int:
        return next((i for i, base in enumerate(bases) if name in vars(base)), len(bases))

    newest = min(map(defined_at, ("update", "loss", "predict", "in_turn")))
    return method if isinstance(method, Stacked) and defined_at("update_many") <= newest else None


SCHEDULE_FIELDS = tuple(field.name for field in fields(Schedule))


def schedule(method: Method) -> Schedule:
    """How a method's minibatches are dealt and its steps are taken."""
    return Schedule(**{key: getattr(method, key) for key in SCHEDULE_FIELDS if hasattr(method, key)})


def setting(method: Method, name: str) -> Any:
    """The value of a setting that not every method has; None where there is none."""
    return getattr(method, name, None)


def tunable_settings(method: Method) -> tuple[str, ...]:
    """Settings worth choosing on validation rows."""
    if method.traits.tunable is not None:
        return method.traits.tunable
    return ("lr",) if isinstance(method, Trained) else ()
