"""Runs as pandas data frames, which are asked for only here."""

from collections.abc import Sequence
from typing import Any

from fedvlm.errors import SettingsError
from fedvlm.evaluate import metrics
from fedvlm.record import Record
from fedvlm.report.columns import compute_columns, settings_of, split_requested
from fedvlm.report.long import client_scores
from fedvlm.report.names import run_label


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise SettingsError("a data frame needs pandas; pip install 'fedvlm[frame]'") from error
    return pandas


def scores_frame(result: Record) -> Any:
    """One row per seed, training and client that has test rows, a column per metric."""
    pandas = _pandas()
    return pandas.DataFrame(list(client_scores(result)))


def comparison_frame(results: Sequence[Record], extra_columns: Sequence[str] = ()) -> Any:
    """One row per run: the mean over seeds of every column, and its deviation beside it.

    `asked` are further columns and settings, as `compare --columns` takes them.
    """
    pandas = _pandas()
    if not results:
        raise SettingsError("no run is named; give one or more runs")
    names, settings = split_requested(results, extra_columns)
    rows = []
    for result in results:
        row: dict[str, Any] = {"method": run_label(result, settings)}
        row |= settings_of(result, settings) | {"seeds": len(result.tables)}
        column_statistics = metrics.mean_and_std(result.tables) | metrics.mean_and_std(compute_columns(result, names))
        for key, (mean, deviation) in column_statistics.items():
            row |= {key: mean, f"{key} deviation": deviation}
        exchanges, moved = result.traffic
        rows.append({**row, "exchanges": exchanges, "kB per client": moved / 1000})
    return pandas.DataFrame(rows).set_index("method")
