"""Runs as pandas data frames, which are asked for only here."""

from collections.abc import Sequence
from typing import Any

from fedvlm.errors import SettingsError
from fedvlm.evaluate import scores
from fedvlm.evaluate.metrics import METRICS
from fedvlm.record import Record
from fedvlm.report.columns import generalises, on_demand, split
from fedvlm.report.tables import label
from fedvlm.runner.sweep import flat


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise SettingsError("a data frame needs pandas; pip install 'fedvlm[frame]'") from error
    return pandas


def frame(result: Record) -> Any:
    """One row per seed, training and client that has test rows, a column per metric."""
    pandas = _pandas()
    rows = []
    for seed in result.manifest["identity"]["seeds"]:
        for training, about in result.trainings(seed).items():
            known = about["unseen"] if generalises(result) else []
            for id, one in about["scores"].items():
                if not one["test_rows"] or id not in (*about["train"], *known):
                    continue
                numbers = {key: one.get(key) for key in METRICS}
                numbers["accuracy"] = one["test_hits"] / one["test_rows"]
                place = {"seed": seed, "training": training, "client": id, "unseen": id in known}
                rows.append({**place, "rows": one["test_rows"], **numbers})
    return pandas.DataFrame(rows)


def compared(results: Sequence[Record], asked: Sequence[str] = ()) -> Any:
    """One row per run: the mean over seeds of every column, and its deviation beside it.

    `asked` are further columns and settings, as `compare --columns` takes them.
    """
    pandas = _pandas()
    if not results:
        raise SettingsError("no run is named; give one or more runs")
    names, settings = split(results, asked)
    rows = []
    for result in results:
        identity = flat(result.manifest["identity"])
        row: dict[str, Any] = {"method": label(result, settings)}
        row |= {name: identity.get(name) for name in settings} | {"seeds": len(result.tables)}
        both = scores.spread(result.tables) | scores.spread(on_demand(result, names))
        for key, (mean, deviation) in both.items():
            row |= {key: mean, f"{key} deviation": deviation}
        exchanges, moved = result.traffic
        rows.append({**row, "exchanges": exchanges, "kB per client": moved / 1000})
    return pandas.DataFrame(rows).set_index("method")
