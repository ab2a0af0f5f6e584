"""The list of all methods: how one gets in, and how one is made."""

from dataclasses import MISSING, fields
from difflib import get_close_matches
from inspect import isfunction
from typing import Any, TypeGuard, TypeVar

from fedvlm.core.contract import GRADIENT_UPDATES, NEEDS, OPTIONAL_PROTOCOLS, VERBS, Method, Schedule, Traits
from fedvlm.core.schema import check_settings, check_type
from fedvlm.errors import SettingsError, unknown_name
from fedvlm.plugins import load_outside, qualified_name

METHODS: dict[str, type[Method]] = {}
T = TypeVar("T", bound=type[Any])
EXAMPLE_FIELDS = {
    "batch_size": "batch_size: int = 32",
    "local_epochs": "local_epochs: int = 1",
    "lr": "lr: float = 1e-3",
}
OPTIONAL_VERBS = tuple(  # optional verbs; what their protocols ask for beside them are settings
    name
    for kind in OPTIONAL_PROTOCOLS
    for name, member in vars(kind).items()
    if isfunction(member) and not name.startswith("_")
)
SETTING_TRAITS = (
    "min_class_samples",
    "min_class_clients",
    "reference",
)  # traits that are settings' values
SIMILAR_NAME_CUTOFF = 0.85  # by difflib: `update_any` is close to update_many, `runs` is not to rounds
TRAIT_TYPES = {member.name: member.type for member in fields(Traits)}
CONTRACT_SETTINGS = {member.name for member in fields(Schedule)} | {"rounds", "tau", "head"}
FOREIGN_NAMES = {  # other names of the settings and traits that are read by name
    "batch": "batch_size",
    "bs": "batch_size",
    "contributors": "min_class_clients",
    "decay": "weight_decay",
    "epoch": "local_epochs",
    "epochs": "local_epochs",
    "learning_rate": "lr",
    "num_epochs": "local_epochs",
    "num_rounds": "rounds",
    "rate": "lr",
    "server_rate": "server_lr",
    "smallest": "min_class_samples",
}


def register(method: T) -> T:
    """Checks a method class and adds it to the list; each refusal says what to add."""
    try:
        _check_class(method)
        _check_names(method)
        _check_gradient_settings(method)
        _check_traits(method)
    except SettingsError as error:
        raise SettingsError(f"method {method.__name__}: {error}") from error
    METHODS[method.name] = method
    return method


def _check_class(method: Any) -> None:
    """A frozen dataclass with a name of its own, the six verbs and a default for every field."""
    params = getattr(method, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise SettingsError("not a frozen dataclass; put @dataclass(frozen=True) below @register")
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name:
        raise SettingsError('no name; add a class attribute such as `name = "mine"`, without a type')
    if name in METHODS and qualified_name(METHODS[name]) != qualified_name(method):
        raise SettingsError(f"the name {name!r} is taken by {METHODS[name].__name__}; choose another")
    if missing := [verb for verb in VERBS if not callable(getattr(method, verb, None))]:
        raise SettingsError(f"no {missing[0]}; write it or name a part, as `send = parts.send_all`")
    for field in fields(method):
        if field.default is MISSING and field.default_factory is MISSING:
            raise SettingsError(f"its field {field.name} has no default; give it the paper's value")
    if not isinstance(getattr(method, "rounds", None), int):
        raise SettingsError("no rounds; add a field such as `rounds: int = 50`")


def _check_names(method: Any) -> None:
    """Nothing that looks like a word of the contract and is none: nobody would ever read it."""
    settings = {field.name for field in fields(method)}
    for name in sorted(settings & {*VERBS, *OPTIONAL_VERBS, "traits", "name"}):
        raise SettingsError(f"its setting {name} is called like a word of the contract; rename it")
    for name in OPTIONAL_VERBS:
        if not callable(getattr(method, name, register)):
            raise SettingsError(f"its {name} is no verb, but called like one; rename it")
    allowed = {*VERBS, *OPTIONAL_VERBS, *CONTRACT_SETTINGS, "name", "traits"}
    for name in dir(method):
        if name.startswith("_") or name in allowed:
            continue
        if name in TRAIT_TYPES:
            if name not in settings:
                raise SettingsError(f"{name} is a trait; write it as `traits = Traits({name}=...)`")
            continue
        if name in FOREIGN_NAMES:
            raise SettingsError(f"setting {name!r} is called {FOREIGN_NAMES[name]!r}; rename it")
        if suggestions := get_close_matches(name, allowed, 1, SIMILAR_NAME_CUTOFF):
            raise SettingsError(
                f"it has a {name}, which nothing reads; did you mean {suggestions[0]}? if not, choose "
                "a name that is less like it"
            )


def _check_gradient_settings(method: Any) -> None:
    """What a gradient part reads: a loss, and the settings of minibatches and steps."""
    if method.update in GRADIENT_UPDATES and not hasattr(method, "loss"):
        raise SettingsError("its update is a gradient part, so it needs a `loss`; add one")
    for name in EXAMPLE_FIELDS if hasattr(method, "loss") else ():
        if not hasattr(method, name):
            raise SettingsError(
                f"it goes down a loss, so it needs a {name}; add a field such as `{EXAMPLE_FIELDS[name]}`"
            )


def _check_traits(method: Any) -> None:
    instance = method()
    traits = getattr(instance, "traits", None)
    if not isinstance(traits, Traits):
        raise SettingsError('no traits; add `traits = Traits(needs=frozenset({"image"}))` or what it needs')
    for name, kind in TRAIT_TYPES.items():
        check_type(f"traits.{name}", getattr(traits, name), kind)
    if unknown_needs := traits.needs - set(NEEDS):
        raise SettingsError(f"it needs {min(unknown_needs)!r}; an encoder can offer {', '.join(NEEDS)}")
    settings = {field.name for field in fields(method)}
    set_traits = {name for name in SETTING_TRAITS if getattr(traits, name) is not None}
    if missing := sorted((set_traits | set(traits.tunable or ())) - settings):
        raise SettingsError(f"its traits speak of {missing[0]}, which is no setting of it; add a field of that name")
    statistics_verbs = {name for name in ("covered_classes", "class_means") if hasattr(method, name)}
    if len(statistics_verbs) == 1 or (statistics_verbs and traits.min_class_samples is None):
        raise SettingsError(
            "an upload of class statistics is described by covered_classes, class_means and the trait "
            "min_class_samples together; add what is missing"
        )


def methods() -> dict[str, type[Method]]:
    """All methods: our own and those of outside packages (entry-point group fedvlm.methods)."""
    import fedvlm.methods  # noqa: F401  registers our own

    load_outside("fedvlm.methods")
    return dict(sorted(METHODS.items()))


def is_method(value: object) -> TypeGuard[Method]:
    """Whether it is a method with its settings, and not a name or a class."""
    return not isinstance(value, type) and isinstance(getattr(value, "traits", None), Traits)


def make(name: str, **settings: Any) -> Method:
    """A method by name with settings, checked against its fields."""
    available = methods()
    if name not in available:
        raise unknown_name("method", name, available)
    return available[name](**check_settings(name, settings, available[name]))
