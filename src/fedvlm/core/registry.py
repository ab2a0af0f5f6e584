"""The list of all methods: how one gets in, and how one is made."""

from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar, get_origin

from fedvlm.core.contract import NEEDS, VERBS
from fedvlm.core.schema import check_type
from fedvlm.errors import FedVLMError, SettingsError, unknown

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
