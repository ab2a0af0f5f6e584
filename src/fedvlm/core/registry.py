"""Register methods, list them and make them by name."""

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from difflib import get_close_matches
from inspect import isfunction
from typing import Any, TypeGuard, TypeVar

from fedvlm.core import contract
from fedvlm.core.schema import check_settings, check_type
from fedvlm.errors import SettingsError, join_names, unknown_name
from fedvlm.plugins import load_outside, qualified_name

METHODS: dict[str, type[contract.Method]] = {}
T = TypeVar("T", bound=type[Any])
EXAMPLE_FIELDS = {"batch_size": "int = 32", "local_epochs": "int = 1", "lr": "float = 1e-3"}
OPTIONAL_VERBS = tuple(  # what their protocols ask for beside them are settings
    name
    for protocol in contract.OPTIONAL_PROTOCOLS
    for name, member in vars(protocol).items()
    if isfunction(member) and not name.startswith("_")
)
SETTING_TRAITS = ("min_class_samples", "min_class_clients", "reference")  # traits that are settings' values
SIMILAR_NAME_CUTOFF = 0.85  # by difflib: `update_any` is close to update_many, `runs` is not to rounds
TRAIT_TYPES = {("", "needs"): frozenset[str]} | {
    (group, trait.name): trait.type for group, traits in contract.TRAIT_GROUPS.items() for trait in fields(traits)
}
CONTRACT_SETTINGS = {setting.name for setting in fields(contract.Schedule)} | {"rounds", "tau", "head"}
FOREIGN_NAMES = {  # other names of the settings and traits that are read by name
    "batch": "batch_size",
    "bs": "batch_size",
    "decay": "weight_decay",
    "epoch": "local_epochs",
    "epochs": "local_epochs",
    "learning_rate": "lr",
    "num_epochs": "local_epochs",
    "num_rounds": "rounds",
    "rate": "lr",
    "smallest": "min_class_samples",
}


def register(method: T) -> T:
    """Check a method class and add it to the list; an error names everything that is missing.

    Args:
        method: a frozen dataclass with a name, traits and the six verbs.

    Returns:
        The same class, so that it can be used as a decorator.

    Example:
        >>> import fedvlm
        >>> fedvlm.register(fedvlm.methods()["fedavg"]).name
        'fedavg'
    """
    problems = list(_check_class(method))
    if not problems:
        problems = [*_check_names(method), *_check_gradient_settings(method), *_check_traits(method)]
    if problems:
        raise SettingsError(f"method {method.__name__}: " + "\n  and: ".join(problems))
    METHODS[method.name] = method
    return method


def _check_class(method: Any) -> Iterator[str]:
    """A frozen dataclass with a name of its own, the six verbs and a default for every field."""
    params = getattr(method, "__dataclass_params__", None)
    if params is None or not params.frozen:
        yield "not a frozen dataclass; put @dataclass(frozen=True) below @register"
        return
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name:
        yield 'no name; add a class attribute such as `name = "mine"`, without a type'
    elif name in METHODS and qualified_name(METHODS[name]) != qualified_name(method):
        yield f"the name {name!r} is taken by {METHODS[name].__name__}; choose another"
    for verb in contract.VERBS:
        if not callable(getattr(method, verb, None)):
            yield f"no {verb}; write it or name a part, as `send = parts.send_all`"
    for field in fields(method):
        if field.default is MISSING and field.default_factory is MISSING:
            yield f"its field {field.name} has no default; give it the paper's value"
    if not isinstance(getattr(method, "rounds", None), int):
        yield "no rounds; add a field such as `rounds: int = 50`"


def _check_names(method: Any) -> Iterator[str]:
    """No name that is almost one of the contract: nothing would ever read it."""
    settings = {field.name for field in fields(method)}
    for name in sorted(settings & {*contract.VERBS, *OPTIONAL_VERBS, "traits", "name"}):
        yield f"its setting {name} has the name of a verb or of a part of the contract; rename it"
    for name in OPTIONAL_VERBS:
        if name not in settings and not callable(getattr(method, name, register)):
            yield f"its {name} is not a function, but has the name of a verb; rename it"
    allowed = {*contract.VERBS, *OPTIONAL_VERBS, *CONTRACT_SETTINGS, "name", "traits"}
    groups = {trait: group for group, trait in TRAIT_TYPES}
    for name in dir(method):
        if name.startswith("_") or name in allowed or name in settings & groups.keys():
            continue
        if name in groups:
            group = groups[name]
            value = f"{group}={contract.TRAIT_GROUPS[group].__name__}({name}=...)" if group else f"{name}=..."
            yield f"{name} is a trait; write it as `traits = Traits({value})`"
        elif name in FOREIGN_NAMES:
            yield f"setting {name!r} is called {FOREIGN_NAMES[name]!r}; rename it"
        elif suggestions := get_close_matches(name, allowed, 1, SIMILAR_NAME_CUTOFF):
            yield f"it has a {name}, which nothing reads; did you mean {suggestions[0]}? if not, choose another name"


def _check_gradient_settings(method: Any) -> Iterator[str]:
    """What a gradient part reads: a loss, and the settings of minibatches and steps."""
    has_loss = hasattr(method, "loss")
    if method.update in contract.GRADIENT_UPDATES and not has_loss:
        yield "its update is a gradient part, so it needs a `loss`; add one"
    for name, example in EXAMPLE_FIELDS.items():
        if has_loss and not hasattr(method, name):
            yield f"it has a loss, so it needs a {name}; add a field such as `{name}: {example}`"


def _check_traits(method: Any) -> Iterator[str]:
    traits = getattr(method(), "traits", None)
    if not isinstance(traits, contract.Traits):
        yield 'no traits; add `traits = Traits(needs=frozenset({"image"}))` or what it needs'
        return
    values = {key: getattr(getattr(traits, key[0]) if key[0] else traits, key[1]) for key in TRAIT_TYPES}
    for (group, name), annotation in TRAIT_TYPES.items():
        try:
            check_type(".".join(filter(None, ("traits", group, name))), values[group, name], annotation)
        except SettingsError as error:
            yield str(error)
    if unknown_needs := set(traits.needs) - set(contract.NEEDS):
        yield f"it needs {min(unknown_needs)!r}; an encoder can offer {', '.join(contract.NEEDS)}"
    settings = {field.name for field in fields(method)}
    set_traits = {name for (_, name), value in values.items() if name in SETTING_TRAITS and value is not None}
    for name in sorted((set_traits | set(traits.training.tunable or ())) - settings):
        yield f"its traits name {name}, which is not one of its settings; add a field of that name"
    statistics_verbs = [name for name in ("covered_classes", "class_means") if hasattr(method, name)]
    if len(statistics_verbs) == 1 or (statistics_verbs and traits.classes.min_class_samples is None):
        yield (
            "an upload of class statistics is described by covered_classes, class_means and the trait "
            "min_class_samples together; add what is missing"
        )


def methods() -> dict[str, type[contract.Method]]:
    """Return all methods: our own and those of other packages (entry-point group fedvlm.methods).

    Returns:
        Classes by name, sorted.

    Example:
        >>> import fedvlm
        >>> "auto" in fedvlm.methods()
        True
    """
    import fedvlm.methods  # noqa: F401  registers our own

    load_outside("fedvlm.methods")
    return dict(sorted(METHODS.items()))


def is_method(value: object) -> TypeGuard[contract.Method]:
    """Tell whether it is a method with its settings, not a name or a class."""
    return not isinstance(value, type) and isinstance(getattr(value, "traits", None), contract.Traits)


def make(name: str, **settings: Any) -> contract.Method:
    """Make a method by name with settings, checked against its fields.

    Args:
        name: as `fedvlm list methods` prints it.
        settings: values of the method's fields; others keep their defaults.

    Returns:
        The method, which `fedvlm.run` takes.

    Example:
        >>> import fedvlm
        >>> fedvlm.make("fedavg", rounds=3).rounds
        3
    """
    available = methods()
    if name not in available:
        raise unknown_name("method", name, available)
    check_class_weights(name, settings)
    return available[name](**check_settings(name, settings, available[name]))


def check_class_weights(name: str, settings: Iterable[str]) -> None:
    """Refuse class weights for a method that does not train by the cross-entropy of single samples."""
    available = {other for other, method in methods().items() if any(f.name == "class_weights" for f in fields(method))}
    if "class_weights" in settings and name not in available:
        raise SettingsError(
            f"{name} has no class_weights: they weight the cross-entropy of a client's own samples, and {name} does "
            f"not train by that alone; methods that do: {join_names(sorted(available), 40)}"
        )
