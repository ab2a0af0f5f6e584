"""The public API of runs: run, resume, sweep and compare, and the result of a run."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Unpack
from warnings import warn

from markupsafe import Markup

from fedvlm.classifier.personalised import Personalised, client_classifier, unseen_classifier
from fedvlm.data.arrays import are_arrays, from_arrays
from fedvlm.data.table import EmbeddedTable
from fedvlm.errors import DataError, DataWarning
from fedvlm.record import Record
from fedvlm.report.columns import ranking_curve
from fedvlm.report.plots import diagram
from fedvlm.report.runs import read_runs
from fedvlm.report.subgroups import subgroup_rows
from fedvlm.report.tables import compare_table, comparison_frame, scores_frame, table_cells
from fedvlm.runner import run as runner
from fedvlm.runner.experiments import build_all, expand, split_outcomes
from fedvlm.runner.experiments import read_grid as grid_of
from fedvlm.runner.load import Progress
from fedvlm.runner.settings import Settings, build, with_method
from fedvlm.runner.trackers import Trackers
from fedvlm.runner.typed_settings import RunSettings


class Result(Record):
    """A finished run, opened by its directory.

    Args:
        folder: of the run, as `fedvlm.run(..., out=folder)` wrote it.

    Example:
        >>> result = fedvlm.Result("runs/demo/0-zero-shot")  # doctest: +SKIP
        >>> print(result.table())  # doctest: +SKIP
    """

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One entry per round of every training, as recorded."""
        return self.lines()

    def table(self, form: str = "text", columns: Sequence[str] = ()) -> str:
        """Return mean ± standard deviation over seeds as text, markdown or latex; `columns` adds further ones."""
        return compare_table([self], form, extra_columns=columns)

    def curve(self, kind: str = "ROC", training: str | None = None, seed: int | None = None) -> list[list[float]]:
        """Return the points of the ROC or PR curve of a training's clients on their test samples."""
        return ranking_curve(self, kind, training, seed)

    def __repr__(self) -> str:
        manifest = self.manifest
        name, clients = manifest["identity"]["method"]["name"], len(manifest["clients"])
        return f"<{name} on {manifest['data']}: {clients} clients, {len(manifest['classes'])} classes>"

    def frame(self) -> Any:
        """Return a pandas data frame with a row per seed, training and client, and a column per metric."""
        return scores_frame(self)

    def subgroups(self, column: str, metric: str = "", seed: int | None = None) -> list[dict[str, Any]]:
        """Return a metric of each subgroup of a column that the setting `subgroups` names; small ones are suppressed.

        Args:
            column: of the data, as "sex".
            metric: of `fedvlm.report.subgroups.METRICS`; AUC by default.
            seed: the first if left out.
        """
        return subgroup_rows(self, column, metric, seed)

    def figure(self, kind: str = "rounds", training: str | None = None, seed: int | None = None) -> Any:
        """Return a matplotlib figure of one training: reliability, decision or rounds."""
        return diagram(self, [kind], training, seed)

    def _repr_html_(self) -> str:
        """Return the table as HTML for notebooks."""
        head, body = table_cells([self])
        lines = []
        for tag, row in (("th", head), *(("td", row) for row in body)):
            lines.append(Markup("").join(Markup("<{0}>{1}</{0}>").format(tag, content) for content in row))
        rows = Markup("").join(Markup("<tr>{}</tr>").format(line) for line in lines)
        return str(Markup("<table>{}</table>").format(rows))

    def personalised(self, client: str, seed: int | None = None) -> Personalised:
        """Return a client's own classifier, from the first training in which it trained."""
        return client_classifier(self, client, seed)

    def unseen(self, training: str | None = None, seed: int | None = None) -> Personalised:
        """Return the classifier of an unseen client: the shared and the initial local tensors."""
        return unseen_classifier(self, training, seed)


def compare_runs(*runs: Record | str | Path, columns: Sequence[str] = ()) -> Any:
    """Compare runs in a pandas data frame.

    Args:
        runs: results, their directories, or report pages.
        columns: further ones, as condition_number or worst, and settings, as method.blocks.

    Returns:
        A data frame with a row per run.

    Example:
        >>> fedvlm.compare("runs/pacs", columns=["worst", "method.lr"])  # doctest: +SKIP
    """
    records = [[run] if isinstance(run, Record) else read_runs(Path(run)) for run in runs]
    return comparison_frame([record for group in records for record in group], columns)


def run(
    method: Any = "auto",
    *,
    out: str | Path | None = None,
    again: bool = False,
    embedded: EmbeddedTable | None = None,
    classes: Sequence[str] | None = None,
    text: Any = None,
    scale: float = 100.0,
    ratios: Sequence[float] | None = None,
    progress: Progress | None = None,
    track: Sequence[str | Callable[[str, Any], None]] = (),
    **settings: Unpack[RunSettings],
) -> Result:
    """Run a method, or read its finished run.

    `clients` may be samples in memory: {"a": (x, y), …} of arrays or tensors. Then nothing stays on disk without `out`.

    Args:
        method: a method or its name.
        out: folder of the run; made from the settings if it is left out.
        again: run again even if a finished run of the same settings exists.
        embedded: a table of embedded samples in memory, instead of `data` and `encoder`.
        classes: names of the classes, for samples in memory.
        text: (classes, dim) embeddings of these names, for samples in memory.
        scale: logit scale of the text embeddings.
        ratios: of samples in memory, for training, validation and test; the last may be 0.
        progress: called with a step's name, its number and their total.
        track: trackers, as "tensorboard:DIR", or functions of the run's name and a line of its record.
        settings: any of the run and of the method, as `data`, `seeds` or `lr`.

    Returns:
        The run's record, with tables, curves and classifiers.

    Example:
        >>> import fedvlm, numpy as np
        >>> x = np.random.default_rng(0).normal(size=(2, 60, 8))
        >>> y = np.tile([0, 1], 30)
        >>> result = fedvlm.run("ridge", clients={"a": (x[0], y), "b": (x[1], y)}, classes=["cat", "dog"])
        >>> result
        <ridge on memory: 2 clients, 2 classes>
    """
    values: dict[str, Any] = {**settings}
    clients = values.get("clients")
    has_arrays = are_arrays(clients)
    if clients == {} or isinstance(clients, list | tuple):
        shown = "{}" if clients == {} else f"a {type(clients).__name__}"
        example = '{"a": (x, y), "b": (x, y)}'
        raise DataError(f"clients must be a dict of arrays by client name, as {example}; got {shown}")
    if has_arrays:
        if beside := [name for name in ("data", "encoder", "source", "access") if name in values]:
            name = beside[0]
            raise DataError(f"{name} = {values[name]!r} does not apply to samples in memory (clients); leave it out")
        embedded = from_arrays(values.pop("clients"), classes, text, scale)
        clients_settings = {"partition": "own"} | ({} if ratios is None else {"ratios": list(ratios)})
        values = {"clients": clients_settings, "protocol": "own-test", **values}
    elif ratios is not None:
        raise DataError('ratios are for samples in memory; for other data write clients={"ratios": …}')
    elif classes is not None or text is not None:
        raise DataError('classes and text are for samples in memory: clients={"a": (x, y), …}')
    if embedded is not None and not isinstance(embedded, EmbeddedTable):
        kind = type(embedded).__name__
        raise DataError(f'embedded must be a table of fedvlm, got a {kind}; give arrays as clients={{"a": (x, y), …}}')
    run_settings = build(with_method(method, values))
    trackers = Trackers(track)
    temporary = tempfile.mkdtemp(prefix="fedvlm-") if has_arrays and out is None else None
    messages: list[str] = []
    options: dict[str, Any] = {"again": again, "embedded": embedded, "progress": progress, "warn": messages.append}
    try:
        done = runner.execute(run_settings, temporary or out, on_line=trackers if track else None, **options)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        trackers.close()
        for message in messages:
            warn(message, DataWarning, stacklevel=2)
    for message in trackers.notes:
        warn(message, stacklevel=2)
    result = Result(done.folder)
    if temporary is not None:  # the record is removed with its result
        weakref.finalize(result, shutil.rmtree, temporary, ignore_errors=True)
    return result


def resume(folder: str | Path, progress: Progress | None = None) -> Result:
    """Resume a run that was stopped or killed; a finished run is only read.

    Args:
        folder: of the run.
        progress: as of `fedvlm.run`.

    Returns:
        The finished run.

    Example:
        >>> fedvlm.resume("runs/fedot-pacs-1f2e3d4c")  # doctest: +SKIP
    """
    return Result(runner.resume(folder, progress).folder)


def sweep(
    over: Mapping[str, Sequence[Any]],
    method: Any = "fedot",
    *,
    out: str | Path | None = None,
    again: bool = False,
    embedded: EmbeddedTable | None = None,
    columns: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Unpack[RunSettings],
) -> Any:
    """Run every point of a grid over settings; finished points are read.

    Args:
        over: lists of values by setting, as {"blocks": [1, 2], "clients.shots": [4, 8]}.
        method: a method or its name.
        out: folder of the runs; "runs" if it is left out.
        again: run again even if finished runs exist.
        embedded: as of `fedvlm.run`.
        columns: further columns, as of `fedvlm.compare`.
        progress: as of `fedvlm.run`.
        settings: as of `fedvlm.run`.

    Returns:
        A pandas data frame with a row per point and a column per swept setting. A point that fails raises a warning
        and is named in `attrs["failed"]`.

    Example:
        >>> fedvlm.sweep({"blocks": [1, 2, 4]}, "fedot", data="demo")  # doctest: +SKIP
    """
    values = with_method(method, settings)
    method_object = values["method"]
    run_fields = {field.name for field in fields(Settings)}
    method_fields = {field.name for field in fields(method_object)} - run_fields
    points = grid_of({f"method.{key}" if key in method_fields else key: values for key, values in over.items()})
    row = {**values, "method": {"name": method_object.name, **asdict(method_object)}}

    all_settings = build_all(expand([row], points), list(points))
    home = Path(out) if out is not None else Path("runs")
    requests = [(run_settings, home / runner.default_name(run_settings, embedded)) for run_settings in all_settings]
    options = {"again": again, "embedded": embedded, "progress": progress}
    outcomes = runner.execute_all(requests, **options, keep_going=bool(points))
    done, failed = split_outcomes(all_settings, outcomes, list(points))
    for message in failed:
        warn(message, stacklevel=2)
    frame = comparison_frame(done, [*points, *columns])
    frame.attrs["failed"] = failed
    return frame
