"""Settings of a run, built and checked in one place for the command line, Python, experiments and deployment.

A default here is the default everywhere: in particular, nothing is tuned unless `tune` names it.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from fedvlm.channel.settings import Channel, check_channel, with_found_noise
from fedvlm.channel.verified import check_verified
from fedvlm.core import MIN_CLASS_SAMPLES, Method, check_class_weights, is_method, make, schema, setting
from fedvlm.data.clients import Clients
from fedvlm.engines.client import Attack, GroupRule, Kind
from fedvlm.errors import SettingsError, unknown_name
from fedvlm.evaluate import protocols
from fedvlm.evaluate.protocols import Rules
from fedvlm.evaluate.protocols.contract import NEW_CLASS_PROTOCOLS
from fedvlm.evaluate.protocols.leave_one_domain_out import LeaveOneDomainOut
from fedvlm.evaluate.protocols.source_target import SourceTarget
from fedvlm.parts.bodies import adapts

SUBSET_PROTOCOLS = (LeaveOneDomainOut.name, SourceTarget.name)  # they train on some of the clients, in turn
MAX_STATEMENT_CHARS = 500  # of `purpose` and of `contact`


@dataclass(frozen=True)
class Settings:
    method: Method  # a registered method with its settings
    warm_start: Method | None = None  # a one-shot method whose result the method's head starts from
    data: str = "demo"  # a name of `fedvlm list datasets`, a path, or KIND:PLACE
    encoder: str = "demo"  # as `fedvlm list encoders` writes it
    source: dict[str, Any] = field(default_factory=dict)  # how to read the data: layout, classes, templates, …
    access: dict[str, Any] = field(default_factory=dict)  # how to reach an encoder: token_file, ca_file, …
    precision: Literal["float32", "float16"] = "float32"  # of cached pooled embeddings
    descriptions: str = ""  # JSON file of sentences by class, shared by all; or "keywords" for the demo
    texts: str = ""  # JSON file of sentences by client and class, private to each client
    clients: Clients = field(default_factory=Clients)  # a table, or only the word for `partition`
    protocol: str = "leave-one-domain-out"  # who trains, and on which samples each is tested
    selection: Literal["last", "validation", "oracle"] = "last"  # the reported round; oracle looks at test samples
    group_metrics: GroupRule = "image"  # "mean" or "max": score each patient or slide by its images' logits
    subgroups: tuple[str, ...] = (
        schema.list_field()
    )  # columns of the data to report metrics by, as sex; never leave a site
    ordered: bool = False  # the classes are grades in this order: kappa is weighted by the squared distance
    seeds: tuple[int, ...] = (0,)  # a list: all trainings are done once per seed
    tune: tuple[str, ...] = schema.list_field()  # settings of the method to tune on validation samples, as lr
    fraction: float = schema.ranged_field(
        1.0, schema.POSITIVE_FRACTION
    )  # of the training clients in each round, at least one
    counts: tuple[int, ...] = schema.list_field()  # cross-device: how many clients train
    unseen: int = 0  # cross-device: how many clients are only tested on
    target: tuple[str, ...] = schema.list_field()  # source-target: domains or clients that are only tested on; each
    global_test: bool = False  # own-test: also test the shared model on the test samples of all
    centralised: bool = False  # train on the pooled samples of all clients, without a federation
    engine: Literal["batched", "single", "flower"] = "batched"  # clients at once, one by one, or by messages
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"  # where a method computes
    workers: int = schema.ranged_field(0, schema.NON_NEGATIVE)  # processes; 0: one per core, if the run is long enough
    transductive: bool = False  # also learn from the clients' test images, without their labels
    allow_small: bool = False  # also upload class statistics of few samples
    smoke: bool = False  # a short run: about 600 samples, 3 rounds, 10 clients, the first seed
    channel: Channel = field(default_factory=Channel)  # clipping, noise, … of uploads
    attack: Kind = "none"  # simulated attack by some clients
    attacker_fraction: float = 0.1  # of the training clients, at least one, drawn by seed
    attack_strength: float = 0.0  # 0: the default of the attack
    purpose: str = ""  # what a deployed run is for, as its sites' people read it; only recorded
    contact: str = ""  # whom they can ask; only recorded
    reproduces: tuple[str, ...] = schema.list_field()  # tables and figures of papers, as fedot-v1/T1; only recorded
    protocol_settings: dict[str, Any] = field(default_factory=dict)  # those that only the protocol has, as given

    def rules(self) -> Rules:
        """Return the protocol with its settings, which are settings of the run by the same names."""
        names = ("counts", "unseen", "target", "global_test")
        own = {name: getattr(self, name) for name in names}
        return protocols.make_protocol(self.protocol, **own, **self.protocol_settings)

    @property
    def statement(self) -> dict[str, str]:
        """Return what the people of a site read beside the settings; it decides no number."""
        return {"purpose": self.purpose, "contact": self.contact}

    def identity(self) -> dict[str, Any]:
        """Return what decides the numbers; two runs of the same identity are the same run."""
        values = asdict(self)
        values |= values.pop("protocol_settings")
        idle = ["workers", "access", "reproduces", "purpose", "contact"]
        idle += ["device"] if self.device == "cpu" else []
        idle += ["attack", "attacker_fraction", "attack_strength"] if self.attack == "none" else []
        used_methods = [method for method in (self.method, self.warm_start) if method is not None]
        if not (self.allow_small and any(method.traits.classes.min_class_samples for method in used_methods)):
            idle.append("allow_small")
        idle += [name for name in ("transductive", "ordered", "subgroups") if not getattr(self, name)]
        for key in idle:
            del values[key]
        for key in ("method", "warm_start"):
            method = getattr(self, key)
            values[key] = None if method is None else {"name": method.name, **asdict(method)}
            if setting(method, "class_weights") == "none":
                del values[key]["class_weights"]
        return values


SETTING_NAMES = {setting.name for setting in fields(Settings)} - {"protocol_settings"}


def protocol_setting_names(values: Mapping[str, Any]) -> set[str]:
    """Return the settings that only the protocol of these values has."""
    kind = protocols.protocols().get(str(values.get("protocol", Settings.protocol)))
    return set() if kind is None else {setting.name for setting in fields(kind)} - SETTING_NAMES


def build(values: Mapping[str, Any]) -> Settings:
    """Build settings from nested values; refuse every unknown name, wrong type and value out of range."""
    own = protocol_setting_names(values)
    for key in sorted(values.keys() - SETTING_NAMES - own):
        _refuse_unknown(key, values.get("method"), SETTING_NAMES | own)
    if "method" not in values:
        raise SettingsError('no method is chosen; add method = "fedot" (`fedvlm list methods`)')
    _check_seeds(values.get("seeds"))
    nested = {key: read(values[key]) for key, read in NESTED_READERS.items() if key in values}
    if given := {key: value for key, value in values.items() if key in own}:
        protocol = values.get("protocol", Settings.protocol)
        nested["protocol_settings"] = schema.check_settings(protocol, given, protocols.protocols()[protocol])
    plain = {key: value for key, value in values.items() if key not in NESTED_READERS and key not in own}
    return _check_combination(schema.read_table(Settings, "", plain, **nested))


def _refuse_unknown(key: str, method: Any, setting_names: Iterable[str]) -> None:
    """Refuse an unknown name; if it is a setting of the method, say where to write it."""
    if method is not None:
        chosen = read_method(method)
        if key in {setting.name for setting in fields(chosen)}:
            remedy = f"write it in [method], or --set method.{key}=…"
            raise SettingsError(f"{key} is a setting of the method {chosen.name}: {remedy}")
    raise unknown_name("setting", key, setting_names)


def with_method(method: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run with its method, which takes those that are settings of its own."""
    chosen = read_method(method)
    setting_names = SETTING_NAMES | protocol_setting_names(values)
    method_names = {setting.name for setting in fields(chosen)} - setting_names
    method_values = {key: value for key, value in values.items() if key in method_names}
    rest = {key: value for key, value in values.items() if key not in method_names}
    check_class_weights(chosen.name, values)
    for key in rest:
        if key not in setting_names:
            raise unknown_name(f"setting of a run or of {chosen.name}", key, setting_names | method_names)
    if method_values:
        chosen = make(chosen.name, **{**asdict(chosen), **method_values})
    return {"method": chosen, **rest}


def _check_combination(settings: Settings) -> Settings:
    """Check what no single value shows: whether the settings fit each other."""
    settings.rules()
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise SettingsError(f"seeds must be one or more different numbers, got {list(settings.seeds)}")
    channel, method = with_found_noise(settings.channel, settings.method)
    settings = replace(settings, channel=channel, method=method)
    check_channel(settings.channel, settings.method)
    _check_verified(settings)
    if settings.centralised and adapts(settings.method):
        reason = f"{settings.method.name} adapts to every client"
        raise SettingsError(f"centralised = true pools all samples, but {reason}; choose another method")
    for name, text in settings.statement.items():
        if len(text) > MAX_STATEMENT_CHARS or not text.isprintable():
            limit = f"one line of at most {MAX_STATEMENT_CHARS} characters"
            raise SettingsError(f"{name} must be {limit}, got {len(text)}; shorten it and leave out line breaks")
    _check_attack(settings)
    _check_transductive(settings)
    if settings.protocol in NEW_CLASS_PROTOCOLS and settings.engine == "flower":
        reason = "is measured in one process, but with engine = 'flower' local tensors stay with the clients"
        raise SettingsError(f"protocol = {settings.protocol!r} {reason}; leave engine out")
    first = settings.warm_start
    warm_start = None if first is None else _with_privacy_guard(first, settings)
    settings = replace(settings, method=_with_privacy_guard(settings.method, settings), warm_start=warm_start)
    if settings.smoke:
        settings = replace(settings, seeds=settings.seeds[:1])
    return settings


def attack_of(settings: Settings) -> Attack | None:
    if settings.attack == "none":
        return None
    return Attack(settings.attack, settings.attacker_fraction, settings.attack_strength)


def _check_transductive(settings: Settings) -> None:
    if settings.transductive and not settings.method.traits.training.unlabelled:
        reason = f"{settings.method.name} does not learn from images without a label"
        raise SettingsError(f'transductive = true: {reason}; leave it out, or use method = "auto"')


def _check_attack(settings: Settings) -> None:
    if attack_of(settings) is None:
        return
    if settings.engine == "flower":
        reason = "is simulated in one process, but with engine = 'flower' clients upload for themselves"
        raise SettingsError(f"attack = {settings.attack!r} {reason}; leave engine out")
    if not settings.method.rounds:
        problem = f"attack = {settings.attack!r}: {settings.method.name} has no rounds and so no uploads"
        raise SettingsError(f"{problem}; choose one that trains")


def read_method(value: Any) -> Method:
    """Return a method by its name, by a table with its name and settings, or as it is."""
    if isinstance(value, str):
        return make(value)
    if is_method(value):
        schema.check_ranges(value.name, value)
        return value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return make(**value)
    raise SettingsError(f'method must be a name or a table with a name, as [method] name = "fedot"; got {value!r}')


def _check_verified(settings: Settings) -> None:
    """Refuse what would show the difference of two sums, or what a sum cannot do."""
    if not settings.channel.verified:
        return
    check_verified(settings.channel, settings.method)
    subset = f"fraction = {settings.fraction}" if settings.fraction < 1 else ""
    subset = f"protocol = {settings.protocol!r}" if settings.protocol in SUBSET_PROTOCOLS else subset
    subset = f"tune = {list(settings.tune)}" if settings.tune else subset
    if subset:
        raise SettingsError(
            f"channel.verified and {subset} do not go together: sums over different members, or over the same samples "
            "again, differ by single uploads; leave it out, or set channel.verified = false"
        )


def _with_privacy_guard(method: Method, settings: Settings) -> Method:
    """Return a method that uploads class statistics only of enough samples of a class."""
    min_samples = method.traits.classes.min_class_samples
    if settings.allow_small or settings.channel.honest > 1:  # of shared noise, a client's own hides no count
        return method if min_samples is None else replace(method, min_class_samples=1)
    if min_samples is not None and min_samples < MIN_CLASS_SAMPLES:
        raise SettingsError(
            f"{method.name}.min_class_samples must be at least {MIN_CLASS_SAMPLES}, got {min_samples}: statistics of "
            "a smaller class reveal its samples; set allow_small = true (--allow-small) to upload them anyway"
        )
    return method


def read_clients(value: Any) -> Clients:
    """Return how samples become clients, from a table of settings or the name of a partition."""
    if isinstance(value, Clients):
        return value
    return schema.read_table(Clients, "clients", {"partition": value} if isinstance(value, str) else value)


NESTED_READERS: Mapping[str, Callable[[Any], Any]] = {  # settings that are tables of their own
    "method": read_method,
    "warm_start": lambda value: None if value is None else read_method(value),
    "clients": read_clients,
    "channel": lambda value: value if isinstance(value, Channel) else schema.read_table(Channel, "channel", value),
}


def _check_seeds(value: Any) -> None:
    if type(value) is not int:
        return
    seeds = list(range(value)) if 0 < value < 10 else [0, 1, 2]
    count = {1: "one seed", 2: "two seeds", 3: "three seeds"}.get(len(seeds), f"{len(seeds)} seeds")
    raise SettingsError(f"seeds = {value} is ambiguous; write {seeds} for {count}, or [{value}] for the seed {value}")


def override(values: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return values with assignments `a.b=1` of --set applied."""
    out = dict(values)
    for text in assignments:
        path, equals, raw = text.partition("=")
        if not equals:
            raise SettingsError(f"--set {text!r} is not of the form a.b=value")
        out = set_value(out, path.strip(), parse_value(raw), f"--set {text!r}")
    return out


def parse_value(text: str) -> Any:
    """Read a value of the command line: TOML, or else a plain word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def set_value(values: Mapping[str, Any], path: str, value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a copy of values with one set at a dotted name; `prefix` begins the message of a refusal."""
    keys, prefix = path.split("."), prefix or f"{path} = {value!r}"
    if not all(keys) or len(keys) > 2:
        raise SettingsError(f"{prefix} is not of the form a.b=value")
    if len(keys) == 1:
        return {**values, path: value}
    table = values.get(keys[0], {})
    if isinstance(table, str):  # method = "fedot" without a table
        table = {"partition" if keys[0] == "clients" else "name": table}
    if not isinstance(table, Mapping):
        raise SettingsError(f"{prefix}: {keys[0]} is {table!r} and not a table")
    return {**values, keys[0]: {**table, keys[1]: value}}
