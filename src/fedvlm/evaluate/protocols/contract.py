"""What a protocol is: who trains and who stays unseen, and what the hits add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from fedvlm.errors import SettingsError, unknown
from fedvlm.evaluate.scores import Results, Table
from fedvlm.outside import enter, load_outside

Weights = Mapping[tuple[str, str], float]  # of (training, client) in a column
Who = Mapping[str, tuple[Sequence[str], Sequence[str]]]  # by training: who trains, who is unseen
GROUP = "fedvlm.protocols"


@dataclass(frozen=True)
class Training:
    """One training of a protocol."""

    name: str
    train: tuple[str, ...]
    unseen: tuple[str, ...]


Done = Mapping[str, tuple[Training, Results]]  # by the name of the training


class Rules(Protocol):
    """A frozen dataclass; its fields are its knobs, and settings of a run by the same name."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    what: ClassVar[str]  # in a line
    every_round: ClassVar[bool]  # measure every metric in every round, not only at the end

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        """Of clients by id, with the domain of each."""
        ...

    def table(self, domains: Mapping[str, str], done: Done, generalises: bool) -> Table:
        """One seed's numbers; a method that trains and shares nothing does not generalise."""
        ...

    def weights(self, who: Who, generalises: bool) -> dict[str, Weights]:
        """What the columns that are shares of hits weigh; `who` has only clients with test rows."""
        ...


PROTOCOLS: dict[str, type[Any]] = {}
T = TypeVar("T", bound=type[Any])


def register(rules: T) -> T:
    """Adds a protocol to the list, once it has been looked at."""
    name = getattr(rules, "name", None)
    if not is_dataclass(rules) or not isinstance(name, str):
        raise SettingsError(
            f"protocol {rules.__name__}: it is a frozen dataclass with a `name`; put "
            "@dataclass(frozen=True) below @register and add one"
        )
    for verb in ("trainings", "table", "weights", "what", "every_round"):
        if not hasattr(rules, verb):
            raise SettingsError(f"protocol {rules.__name__}: no {verb}; add it")
    enter(PROTOCOLS, "protocol", name, rules)
    return rules


def protocols() -> dict[str, type[Any]]:
    """All protocols: our own and those of outside packages."""
    load_outside(GROUP)
    return dict(PROTOCOLS)


def make(name: str, **knobs: Any) -> Rules:
    """A protocol by name; a knob that it does not have is refused unless it says nothing."""
    if name not in PROTOCOLS:
        load_outside(GROUP)
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    has = {one.name for one in fields(PROTOCOLS[name])}
    for key, value in knobs.items():
        if value and key not in has:
            owners = [repr(other) for other, one in PROTOCOLS.items() if key in _knobs(one)]
            raise SettingsError(
                f"{key} = {list(value) if isinstance(value, tuple) else value} is for protocol = "
                f"{' or '.join(owners)}, not {name!r}; leave one of them out"
            )
    made: Rules = PROTOCOLS[name](**{key: knobs[key] for key in knobs.keys() & has})
    return made


def _knobs(rules: Any) -> set[str]:
    return {one.name for one in fields(rules)}


def even(training: str, ids: Sequence[str]) -> Weights:
    """Every client counts the same."""
    return {(training, id): 1 / len(ids) for id in ids}
