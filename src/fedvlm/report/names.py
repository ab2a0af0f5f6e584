"""What a run is called in a table, and whether it says anything of unseen clients."""

from collections.abc import Collection, Mapping
from typing import Any

from fedvlm.errors import join_names
from fedvlm.record import Record

UNSEEN_PREFIXES = ("target ", "unseen")  # how columns of unseen clients begin, beside G and global


def run_label(result: Record, without: Collection[str] = ()) -> str:
    """The method, with the settings in which it differs from its defaults, but for some."""
    settings = dict(result.manifest["identity"]["method"])
    name = settings.pop("name")
    defaults = result.manifest.get("usual") or _defaults(name, settings)
    if allows_small := result.manifest["identity"].get("allow_small", False):
        settings.pop("min_class_samples", None)
    shown_settings = {key: value for key, value in settings.items() if f"method.{key}" not in without}
    differences = [f"{key}={value}" for key, value in shown_settings.items() if defaults["method"][key] != value]
    differences += [key for key in ("descriptions", "texts") if result.manifest["identity"].get(key)]
    if tuned := result.manifest.get("tuned"):
        differences += _describe_tuning(tuned)
    if first := result.manifest["identity"].get("warm_start"):
        differences.append(f"warm start by {first['name']}")
    if result.manifest["identity"].get("centralised"):
        differences.append("centralised")
    elif defaults["centralised"]:
        differences.append("not federated")
    if defaults["reference"] == "target":
        differences = [description for description in differences if description != "reference=target"]
        differences.append("TRANSDUCTIVE: adapts to the test rows")
    default_channel = defaults["channel"]
    channel = result.manifest["identity"].get("channel", default_channel)
    differences += [f"channel.{key}={value}" for key, value in channel.items() if default_channel[key] != value]
    if attack := result.manifest["identity"].get("attack"):
        differences.append(f"ATTACK: {attack} by {result.manifest['identity']['attacker_fraction']:.0%}")
    chosen = result.manifest["identity"]["selection"]
    if chosen == "oracle":
        differences.append("ORACLE: best test round")
    elif chosen == "validation":
        differences.append("best validation round")
    if allows_small:
        differences.append("ALLOW-SMALL")
    if result.manifest["identity"]["smoke"]:
        differences.append("SMOKE")
    return f"{name} ({', '.join(differences)})" if differences else str(name)


def _defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record that does not say it; to ask the method takes seconds, for it takes torch."""
    from fedvlm.core import make
    from fedvlm.runner.provenance import default_values

    return default_values(make(name, **settings))


def _describe_tuning(tuned: Mapping[str, Any]) -> list[str]:
    """How often a race was run, and what it chose where seeds chose for themselves."""
    if "seeds" not in tuned:
        return [f"tuned on validation rows ({len(tuned['trials'])} trials)"]
    searches = list(tuned["seeds"].values())
    values = {name: join_names([f"{search['chosen'][name]:g}" for search in searches], 5) for name in tuned["asked"]}
    descriptions = [f"{name} by seed {listed}" for name, listed in values.items()]
    return [*descriptions, f"tuned on validation rows ({len(searches[0]['trials'])} trials a seed)"]


def has_unseen_scores(result: Record) -> bool:
    """Whether a run has numbers of unseen clients; a method that shares nothing has none."""
    table = result.tables[0]
    unseen_columns = [key for key in table if key in ("G", "global") or key.startswith(UNSEEN_PREFIXES)]
    return any(table[key] is not None for key in unseen_columns)
