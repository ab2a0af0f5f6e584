"""Settings of a run: from TOML, `--set a.b=1` or keyword arguments, checked in one place."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from fedvlm.channel.settings import Channel, check_channel
from fedvlm.core import MIN_CLASS_CLIENTS, MIN_CLASS_SAMPLES, Method, is_method, make
from fedvlm.core.schema import NON_NEGATIVE, POSITIVE_FRACTION, check_ranges, list_field, ranged_field, read_table
from fedvlm.data.clients import Clients
from fedvlm.engines.client import Attack, Kind
from fedvlm.errors import SettingsError, renamed, unknown_name
from fedvlm.evaluate import protocols
from fedvlm.evaluate.protocols import Rules
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.parts.bodies import adapts


@dataclass(frozen=True)
class Settings:
    method: Method  # a registered method with its settings
    warm_start: Method | None = None  # a one-shot method whose result the method's head starts from
    data: str = "demo"
    encoder: str = "demo"
    source: dict[str, Any] = field(default_factory=dict)  # how to read the data: layout, classes, …
    access: dict[str, Any] = field(default_factory=dict)  # how to reach an encoder: token_file, …
    precision: Literal["float32", "float16"] = "float32"  # of cached pooled embeddings
    descriptions: str = ""  # JSON of sentences by class, the server's; or "keywords" for the demo
    texts: str = ""  # JSON of sentences by client and class, which only those clients have
    clients: Clients = field(default_factory=Clients)
    protocol: str = "leave-one-domain-out"
    selection: Literal["last", "validation", "oracle"] = "last"
    seeds: tuple[int, ...] = (0,)
    tune: tuple[str, ...] = list_field()  # the method's settings to choose on validation rows, as lr
    fraction: float = ranged_field(1.0, POSITIVE_FRACTION)  # of the clients that take part in a round
    counts: tuple[int, ...] = list_field()  # cross-device: how many clients train
    unseen: int = 0  # cross-device: how many clients are only tested on
    target: tuple[str, ...] = list_field()  # source-target: domains or clients that are only tested on
    global_test: bool = False  # own-test: what is shared is also tested on all test rows
    centralised: bool = False  # all rows of the clients that train at one, and no federation
    engine: Literal["batched", "single", "flower"] = "batched"
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"  # where a method's verbs are worked out
    workers: int = ranged_field(0, NON_NEGATIVE)  # processes; 0 is as many as cores, if the run is long enough
    allow_small: bool = False  # class statistics of few rows may be uploaded too
    smoke: bool = False  # a short run on few rows, to see that everything works
    channel: Channel = field(default_factory=Channel)  # what an upload goes through
    attack: Kind = "none"  # by some clients, to see what it does; simulations only
    attacker_fraction: float = 0.1  # share of the training clients that attack, drawn by seed
    attack_strength: float = 0.0  # of the attack; 0: the usual one
    reproduces: tuple[str, ...] = list_field()  # tables and figures of papers, as fedot-v1/T1; only noted

    def rules(self) -> Rules:
        """The protocol with its knobs, which are settings of the run."""
        knobs = {"counts": self.counts, "unseen": self.unseen, "target": self.target}
        knobs |= {"global_test": self.global_test}
        return protocols.make_protocol(self.protocol, **knobs)

    def identity(self) -> dict[str, Any]:
        """What decides the numbers; two runs of the same identity are the same run."""
        values = asdict(self)
        idle = ["workers", "access", "reproduces"]
        idle += ["device"] if self.device == "cpu" else []
        idle += ["attack", "attacker_fraction", "attack_strength"] if self.attack == "none" else []
        used_methods = [method for method in (self.method, self.warm_start) if method is not None]
        if not (self.allow_small and any(method.traits.classes.min_class_samples for method in used_methods)):
            idle.append("allow_small")
        for key in idle:
            del values[key]
        for key in ("method", "warm_start"):
            method = getattr(self, key)
            values[key] = None if method is None else {"name": method.name, **asdict(method)}
        return values


def build(values: Mapping[str, Any]) -> Settings:
    """Settings from nested values; every unknown name and misfit is refused."""
    setting_names = {setting.name for setting in fields(Settings)}
    for key in sorted(values.keys() - setting_names):
        _refuse_unknown(key, values.get("method"), setting_names)
    if "method" not in values:
        raise SettingsError('no method is chosen; add method = "fedot" (`fedvlm list methods`)')
    _check_seeds(values.get("seeds"))
    inner = {key: read(values[key]) for key, read in NESTED_READERS.items() if key in values}
    plain = {key: value for key, value in values.items() if key not in NESTED_READERS}
    return _check_combination(read_table(Settings, "", plain, **inner))


def _refuse_unknown(key: str, method: Any, setting_names: Iterable[str]) -> None:
    """A name that no run has: it may be one of its method's."""
    if method is not None:
        chosen = read_method(method)
        mine = {setting.name for setting in fields(chosen)}
        name = key if key in mine else renamed(key, mine)
        if name and not renamed(key, setting_names):
            called = "" if name == key else f"{key!r} is called {name!r}: "
            raise SettingsError(
                f"{called}{name} is a setting of the method {chosen.name}: write it in [method], or "
                f"--set method.{name}=…"
            )
    raise unknown_name("setting", key, setting_names)


def with_method(method: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a run with its method, which takes those that are the method's own settings."""
    chosen = read_method(method)
    setting_names = {setting.name for setting in fields(Settings)}
    method_names = {setting.name for setting in fields(chosen)} - setting_names
    method_values = {key: value for key, value in values.items() if key in method_names}
    rest = {key: value for key, value in values.items() if key not in method_names}
    for key in rest:
        if key not in setting_names:
            raise unknown_name(f"setting of a run or of {chosen.name}", key, setting_names | method_names)
    if method_values:
        chosen = make(chosen.name, **{**asdict(chosen), **method_values})
    return {"method": chosen, **rest}


def _check_combination(settings: Settings) -> Settings:
    """What no single value shows: whether the settings fit each other."""
    settings.rules()
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise SettingsError(f"seeds = {list(settings.seeds)}; name one or more, each once")
    check_channel(settings.channel, settings.method)
    if settings.centralised and adapts(settings.method):
        raise SettingsError(
            f"centralised = true: {settings.method.name} adapts to every client in the end, which "
            "is not all rows at one; choose another method"
        )
    _check_attack(settings)
    if settings.protocol == BaseToNew.name and settings.engine == "flower":
        raise SettingsError(
            "protocol = 'base-to-new' is measured in one process; with engine = 'flower' what a "
            "client keeps stays with it, so leave engine out"
        )
    first = settings.warm_start
    settings = replace(
        settings,
        method=_with_privacy_guard(settings.method, settings),
        warm_start=None if first is None else _with_privacy_guard(first, settings),
    )
    if settings.smoke:
        settings = replace(settings, seeds=settings.seeds[:1])
    return settings


def attack_of(settings: Settings) -> Attack | None:
    if settings.attack == "none":
        return None
    return Attack(settings.attack, settings.attacker_fraction, settings.attack_strength)


def _check_attack(settings: Settings) -> None:
    if attack_of(settings) is None:
        return
    if settings.engine == "flower":
        raise SettingsError(
            f"attack = {settings.attack!r} is a simulation in one process; with engine = 'flower' "
            "clients upload for themselves, so leave engine out"
        )
    if not settings.method.rounds:
        raise SettingsError(
            f"attack = {settings.attack!r}: {settings.method.name} has no rounds, so no upload "
            "to attack; choose a method that trains"
        )


def read_method(value: Any) -> Method:
    if isinstance(value, str):
        return make(value)
    if is_method(value):
        check_ranges(value.name, value)
        return value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return make(**value)
    raise SettingsError(f'method = {value!r} has no name; write [method] with name = "fedot"')


def _with_privacy_guard(method: Method, settings: Settings) -> Method:
    """A method that uploads class statistics, held to those of enough rows and enough clients."""
    smallest, contributors = method.traits.classes.min_class_samples, method.traits.classes.min_class_clients
    if settings.allow_small:
        return method if smallest is None else replace(method, min_class_samples=1)
    if smallest is not None and smallest < MIN_CLASS_SAMPLES:
        raise SettingsError(
            f"{method.name}.min_class_samples = {smallest}: the statistics of a class of fewer "
            f"than {MIN_CLASS_SAMPLES} rows give its rows away; set allow_small = true (--allow-small) if "
            "they may be uploaded all the same"
        )
    if not settings.channel.secure or contributors is None or contributors >= MIN_CLASS_CLIENTS:
        return method
    return replace(method, min_class_clients=MIN_CLASS_CLIENTS, rounds=method.rounds + (contributors == 1))


def read_clients(value: Any) -> Clients:
    """How rows become clients, from a table of settings or just the word for `partition`."""
    if isinstance(value, Clients):
        return value
    return read_table(Clients, "clients", {"partition": value} if isinstance(value, str) else value)


def read_channel(value: Any) -> Channel:
    return value if isinstance(value, Channel) else read_table(Channel, "channel", value)


NESTED_READERS: Mapping[str, Callable[[Any], Any]] = {  # settings that are tables of their own
    "method": read_method,
    "warm_start": lambda value: None if value is None else read_method(value),
    "clients": read_clients,
    "channel": read_channel,
}


def _check_seeds(value: Any) -> None:
    if type(value) is not int:
        return
    seeds = list(range(value)) if 0 < value < 10 else [0, 1, 2]
    count = {1: "one seed", 2: "two seeds", 3: "three seeds"}.get(len(seeds), f"{len(seeds)} seeds")
    raise SettingsError(
        f"seeds = {value} may mean two things; write {seeds} for {count}, [{value}] for the seed {value}"
    )


def override(values: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Values with `a.b=1` laid over them; the right side is TOML, or else a plain word."""
    out = dict(values)
    for text in assignments:
        path, equals, raw = text.partition("=")
        if not equals:
            raise SettingsError(f"--set {text!r} is not of the form a.b=value")
        out = set_value(out, path.strip(), parse_value(raw), f"--set {text!r}")
    return out


def parse_value(text: str) -> Any:
    """A value on the command line: TOML, or else a plain word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def set_value(values: Mapping[str, Any], path: str, value: Any, prefix: str = "") -> dict[str, Any]:
    """A copy of values with one at a dotted name; `said` is what a refusal begins with."""
    out, keys, prefix = dict(values), path.split("."), prefix or f"{path} = {value!r}"
    if not all(keys) or len(keys) > 2:
        raise SettingsError(f"{prefix} is not of the form a.b=value")
    if len(keys) == 1:
        return {**out, path: value}
    table = out.get(keys[0], {})
    if isinstance(table, str):  # method = "fedot" given as a word
        table = {"partition" if keys[0] == "clients" else "name": table}
    if not isinstance(table, Mapping):
        raise SettingsError(f"{prefix}: {keys[0]} is {table!r}, which has no parts")
    return {**out, keys[0]: {**table, keys[1]: value}}
