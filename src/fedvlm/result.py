"""The face of a finished run: its table and the classifiers it has made; and how to get one."""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from warnings import warn

from markupsafe import Markup

from fedvlm.classifier.personalised import Personalised, of_client, of_newcomer
from fedvlm.data.table import Embedded
from fedvlm.record import Record
from fedvlm.report.diagrams import diagram
from fedvlm.report.frames import compared, frame
from fedvlm.report.page.render import opened
from fedvlm.report.tables import compare
from fedvlm.runner import run as runner
from fedvlm.runner.run import Progress
from fedvlm.runner.settings import build
from fedvlm.runner.track import Trackers


class Result(Record):
    """A finished run as its directory tells it."""

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One entry per round of every training, as recorded."""
        return self.lines()

    def table(self, form: str = "text") -> str:
        """Mean ± deviation over seeds as text, markdown, latex or csv."""
        return compare([self], form)

    def frame(self) -> Any:
        """A pandas data frame: one row per seed, training and client, a column per metric."""
        return frame(self)

    def figure(self, kind: str = "rounds", job: str | None = None, seed: int | None = None) -> Any:
        """A matplotlib figure of one training: reliability, decision or rounds."""
        return diagram(self, [kind], job, seed)

    def _repr_html_(self) -> str:
        """What a notebook shows: the table."""
        head, *body = csv.reader(io.StringIO(self.table("csv")))
        lines = [
            Markup("").join(Markup("<{0}>{1}</{0}>").format(tag, one) for one in row)
            for tag, row in (("th", head), *(("td", row) for row in body))
        ]
        rows = Markup("").join(Markup("<tr>{}</tr>").format(line) for line in lines)
        return str(Markup("<table>{}</table>").format(rows))

    def personalised(self, client: str, seed: int | None = None) -> Personalised:
        """A client's own classifier, from the first training it took part in."""
        return of_client(self, client, seed)

    def unseen(self, job: str | None = None, seed: int | None = None) -> Personalised:
        """The classifier of a client that joins later: what is shared, and the first local."""
        return of_newcomer(self, job, seed)


def compare_runs(*runs: Record | str | Path) -> Any:
    """Runs side by side as a pandas data frame; a run is a result, its directory, or a page."""
    return compared(
        [one for run in runs for one in ([run] if isinstance(run, Record) else opened(Path(run)))]
    )


def run(
    method: Any = "fedot",
    *,
    out: str | Path | None = None,
    again: bool = False,
    embedded: Embedded | None = None,
    progress: Progress | None = None,
    track: Sequence[str | Callable[[str, Any], None]] = (),
    **settings: Any,
) -> Result:
    """Runs a method by name or as an object; keyword arguments are settings of the run.

    `embedded` takes rows that are already in memory instead of data and encoder. A finished run
    of the same settings is not run again unless `again`; an unfinished one goes on. `track` names
    trackers, as "tensorboard:DIR", or functions of the run's name and a line of its record.
    """
    built = build({"method": method, **settings})
    trackers = Trackers(track)
    done = runner.execute(built, out, again, embedded, progress, trackers if track else None)
    trackers.close()
    for note in trackers.notes:
        warn(note, stacklevel=2)
    return Result(done.folder)


def resume(folder: str | Path, progress: Progress | None = None) -> Result:
    """Goes on where a run was stopped, however it was stopped; a finished run is just read."""
    return Result(runner.resume(folder, progress).folder)
