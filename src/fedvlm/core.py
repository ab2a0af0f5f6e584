"""The contract: three kinds of tensors, six verbs, and the list of all methods."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import entry_points
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from torch import Tensor

from fedvlm.errors import FedVLMError, SettingsError, unknown

if TYPE_CHECKING:
    from fedvlm.encoders.tower import ImageTower
    from fedvlm.maths.prompts import TextTower

Tensors = dict[str, Tensor]
VERBS = ("init", "send", "update", "aggregate", "adapt", "predict")
NEEDS = ("image", "text", "patches", "text tower", "image tower")
SMALLEST = 16  # rows of a class below which its statistics stay at the client
FEWEST = 3  # clients that have to share in the secure sum of a class's statistics


@dataclass(frozen=True)
class Frozen:
    """What everyone holds and no one trains or sends."""

    classes: tuple[str, ...]
    dim: int
    scale: float  # the encoder's logit scale
    text: Tensor | None  # (classes, dim) unit-norm text embeddings of the class names
    seed: int = 0  # for initial values drawn in `init`
    text_tower: "TextTower | None" = None  # context vectors -> class embeddings
    image_tower: "ImageTower | None" = None  # weights and pixels -> image embeddings
    descriptions: Tensor | None = None  # (classes, texts, dim) zeros where a class has fewer


class Rows(Protocol):
    """Rows that are read when they are asked for, as a tensor's are by its first axis."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any) -> Tensor: ...
    def take(self, index: Any) -> "Rows": ...


@dataclass(frozen=True)
class Client:
    """One client's rows and this round's minibatches; engines may add a leading client axis.

    What a row is follows from the method's needs: with "image tower" the pixels (3, height, width),
    with "patches" the patch embeddings (patches, dim) as the encoder gave them, and otherwise the
    unit-norm image embedding (dim,).
    """

    x: Any  # (rows, ...) Tensor, or Rows where pictures are decoded on demand
    y: Tensor  # (rows,) labels, -1 where there is no row
    order: Tensor  # (steps, batch) rows of each minibatch, -1 where there is no row
    held_x: Any  # (held, ...) validation rows, for choices a client makes for itself
    held_y: Tensor  # (held,)
    reference: Any  # (references, ...) unlabelled rows for methods with a `reference`
    reference_order: Tensor  # (steps, batch) rows of the reference, -1 where there is no row
    texts: Tensor  # (classes, texts, dim) descriptions of its own, zeros where there are fewer
    noise: Tensor  # (steps, numbers) standard normal, as many as the method's `noise` asks for


class Batch(NamedTuple):
    x: Tensor  # (batch, ...)
    y: Tensor  # (batch,) valid labels also where real is False
    real: Tensor  # (batch,) False where the row is padding
    reference: Tensor  # (batch, ...) unlabelled rows, none if the method has no `reference`


class Method(Protocol):
    """A frozen dataclass: its fields are its settings. `register` says what is missing."""

    name: str
    rounds: int  # 0 is zero-shot, 1 is one-shot
    needs: frozenset[str]  # what it asks of the encoder: a subset of NEEDS
    memory: frozenset[str]  # names of tensors that are kept but not trained

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]: ...
    def send(self, shared: Tensors, id: str) -> Tensors: ...
    def update(
        self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
    ) -> tuple[Tensors, Tensors]: ...
    def aggregate(
        self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
    ) -> Tensors: ...
    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors: ...
    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor: ...


METHODS: dict[str, type[Any]] = {}
T = TypeVar("T", bound=type[Any])


def register(method: T) -> T:
    """Checks a method class and adds it to the list; each refusal says what to add."""
    kind: Any = method
    title = method.__name__
    name = getattr(method, "name", None)

    def refuse(what: str) -> SettingsError:
        return SettingsError(f"method {title}: {what}")

    if not is_dataclass(method) or not method.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise refuse("not a frozen dataclass; put @dataclass(frozen=True) below @register")
    if not isinstance(name, str) or not name:
        raise refuse('no name; add a class attribute such as `name = "mine"`, without a type')
    if name in METHODS and METHODS[name].__qualname__ != method.__qualname__:
        raise refuse(f"the name {name!r} is taken by {METHODS[name].__name__}; choose another")
    if missing := [verb for verb in VERBS if not callable(getattr(method, verb, None))]:
        raise refuse(f"no {missing[0]}; write it or name a part, as `send = parts.everything`")
    if hasattr(kind.update, "walks") and not hasattr(method, "loss"):
        raise refuse("its update is a gradient part, so it needs a `loss`; add one")
    for field in fields(method):
        if field.default is MISSING and field.default_factory is MISSING:
            raise refuse(f"its field {field.name} has no default; give it the paper's value")
    if not isinstance(getattr(method, "rounds", None), int):
        raise refuse("no rounds; add a field such as `rounds: int = 50`")
    for attribute in ("needs", "memory"):
        if not isinstance(getattr(method, attribute, None), frozenset):
            raise refuse(f"no {attribute}; add `{attribute} = frozenset()` or name what it takes")
    if strange := kind.needs - set(NEEDS):
        raise refuse(f"it needs {min(strange)!r}; an encoder can offer {', '.join(NEEDS)}")
    METHODS[name] = method
    return method


def methods() -> dict[str, type[Any]]:
    """All methods: our own and those of outside packages (entry-point group fedvlm.methods)."""
    import fedvlm.methods  # noqa: F401  registers our own

    for point in entry_points(group="fedvlm.methods"):
        try:
            point.load()
        except FedVLMError:
            raise
        except Exception as error:
            raise SettingsError(
                f"the entry point {point.name} = {point.value} of group fedvlm.methods "
                f"cannot be loaded ({type(error).__name__}: {error}); repair or uninstall it"
            ) from error
    return dict(sorted(METHODS.items()))


def make(name: str, **settings: Any) -> Any:
    """A method by name with settings, checked against its fields."""
    known = methods()
    if name not in known:
        raise unknown("method", name, known)
    allowed = {field.name: field for field in fields(known[name])}
    for key, value in list(settings.items()):
        if key not in allowed:
            raise unknown(f"setting of {name}", key, allowed)
        if isinstance(value, list) and get_origin(allowed[key].type) is tuple:
            settings[key] = value = tuple(value)  # TOML and JSON have lists only
        check_type(f"{name}.{key}", value, allowed[key].type)
    return known[name](**settings)


def check_type(key: str, value: Any, wanted: Any) -> None:
    """Refuses a value that a field's annotation does not admit; a whole number passes as float."""
    options = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    said = []
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return
            said += [repr(word) for word in get_args(option)]
        else:
            kind = get_origin(option) or option
            whole = isinstance(value, int) and not isinstance(value, bool)
            inner = get_args(option) if kind is tuple else ()
            if inner[-1:] == (...,):  # any number of them
                inner = inner[:1] * (len(value) if type(value) is tuple else 1)
            if type(value) is kind and len(inner) == (len(value) if inner else 0):
                for one, part in zip(value if inner else (), inner, strict=True):
                    check_type(key, one, part)
                return
            if kind is float and whole:
                return
            said.append(f"{len(inner)} values" if inner else f"a {kind.__name__}")
    raise SettingsError(f"{key} = {value!r} does not fit; it takes {' or '.join(said)}")
