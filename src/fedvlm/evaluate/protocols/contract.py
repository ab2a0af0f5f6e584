"""What a protocol is: who trains and who stays unseen, and what the hits add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from fedvlm.errors import SettingsError, unknown_name
from fedvlm.evaluate.scores import Results, Table
from fedvlm.plugins import add_entry, load_outside

Weights = Mapping[tuple[str, str], float]  # of (training, client) in a column
Participants = Mapping[str, tuple[Sequence[str], Sequence[str]]]  # by training: who trains, who is unseen
GROUP = "fedvlm.protocols"


@dataclass(frozen=True)
class Training:
    """One training of a protocol."""

    name: str
    train: tuple[str, ...]
    unseen: tuple[str, ...]


TrainingResults = Mapping[str, tuple[Training, Results]]  # by the name of the training


class Rules(Protocol):
    """A frozen dataclass; its fields are its knobs, and settings of a run by the same name."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    summary: ClassVar[str]  # in a line
    every_round: ClassVar[bool]  # measure every metric in every round, not only at the end

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        """Of clients by id, with the domain of each."""
        ...

    def table(self, domains: Mapping[str, str], done: TrainingResults, generalises: bool) -> Table:
        """One seed's numbers; a method that trains and shares nothing does not generalise."""
        ...

    def weights(self, participants: Participants, generalises: bool) -> dict[str, Weights]:
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
    for verb in ("trainings", "table", "weights", "summary", "every_round"):
        if not hasattr(rules, verb):
            raise SettingsError(f"protocol {rules.__name__}: no {verb}; add it")
    add_entry(PROTOCOLS, "protocol", name, rules)
    return rules


def protocols() -> dict[str, type[Any]]:
    """All protocols: our own and those of outside packages."""
    load_outside(GROUP)
    return dict(PROTOCOLS)


def make_protocol(name: str, **settings: Any) -> Rules:
    """A protocol by name; a knob that it does not have is refused unless it says nothing."""
    if name not in PROTOCOLS:
        load_outside(GROUP)
    if name not in PROTOCOLS:
        raise unknown_name("protocol", name, PROTOCOLS)
    setting_names = {entry.name for entry in fields(PROTOCOLS[name])}
    for key, value in settings.items():
        if value and key not in setting_names:
            owners = [repr(protocol_name) for protocol_name, entry in PROTOCOLS.items() if key in _setting_names(entry)]
            raise SettingsError(
                f"{key} = {list(value) if isinstance(value, tuple) else value} is for protocol = "
                f"{' or '.join(owners)}, not {name!r}; leave one of them out"
            )
    made: Rules = PROTOCOLS[name](**{key: settings[key] for key in settings.keys() & setting_names})
    return made


def _setting_names(rules: Any) -> set[str]:
    return {field.name for field in fields(rules)}


def uniform_weights(training: str, ids: Sequence[str]) -> Weights:
    """Every client counts the same."""
    return {(training, id): 1 / len(ids) for id in ids}
