"""What a run is called in a table, and whether it says anything of unseen clients."""

from collections.abc import Collection, Mapping
from typing import Any

from fedvlm.errors import listing
from fedvlm.record import Record

UNSEEN = ("target ", "unseen")  # how columns of unseen clients begin, beside G and global


def label(result: Record, besides: Collection[str] = ()) -> str:
    """The method, with the settings in which it differs from its defaults, but for some."""
    settings = dict(result.manifest["identity"]["method"])
    name = settings.pop("name")
    usual = result.manifest.get("usual") or _usual(name, settings)
    if small := result.manifest["identity"].get("allow_small", False):
        settings.pop("min_class_samples", None)
    rest = {key: value for key, value in settings.items() if f"method.{key}" not in besides}
    odd = [f"{key}={value}" for key, value in rest.items() if usual["method"][key] != value]
    odd += [key for key in ("descriptions", "texts") if result.manifest["identity"].get(key)]
    if tuned := result.manifest.get("tuned"):
        odd += _raced(tuned)
    if first := result.manifest["identity"].get("warm_start"):
        odd.append(f"warm start by {first['name']}")
    if result.manifest["identity"].get("centralised"):
        odd.append("centralised")
    elif usual["centralised"]:
        odd.append("not federated")
    if usual["reference"] == "target":
        odd = [one for one in odd if one != "reference=target"]
        odd.append("TRANSDUCTIVE: adapts to the test rows")
    plain = usual["channel"]
    through = result.manifest["identity"].get("channel", plain)
    odd += [f"channel.{key}={value}" for key, value in through.items() if plain[key] != value]
    if attack := result.manifest["identity"].get("attack"):
        odd.append(f"ATTACK: {attack} by {result.manifest['identity']['attackers']:.0%}")
    chosen = result.manifest["identity"]["selection"]
    if chosen == "oracle":
        odd.append("ORACLE: best test round")
    elif chosen == "validation":
        odd.append("best validation round")
    if small:
        odd.append("ALLOW-SMALL")
    if result.manifest["identity"]["smoke"]:
        odd.append("SMOKE")
    return f"{name} ({', '.join(odd)})" if odd else str(name)


def _usual(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record that does not say it; to ask the method takes seconds, for it takes torch."""
    from fedvlm.core import make
    from fedvlm.runner.provenance import usual

    return usual(make(name, **settings))


def _raced(tuned: Mapping[str, Any]) -> list[str]:
    """How often a race was run, and what it chose where seeds chose for themselves."""
    if "seeds" not in tuned:
        return [f"tuned on validation rows ({len(tuned['trials'])} trials)"]
    each = list(tuned["seeds"].values())
    values = {
        name: listing([f"{one['chosen'][name]:g}" for one in each], 5) for name in tuned["asked"]
    }
    said = [f"{name} by seed {those}" for name, those in values.items()]
    return [*said, f"tuned on validation rows ({len(each[0]['trials'])} trials a seed)"]


def generalises(result: Record) -> bool:
    """Whether a run has numbers of unseen clients; a method that shares nothing has none."""
    table = result.tables[0]
    told = [key for key in table if key in ("G", "global") or key.startswith(UNSEEN)]
    return any(table[key] is not None for key in told)
