"""The face of a finished run: its table and the classifiers it has made; and how to get one."""

from pathlib import Path
from typing import Any

from fedvlm.classifier.personalised import Personalised, of_client, of_newcomer
from fedvlm.data.table import Embedded
from fedvlm.record import Record
from fedvlm.report.tables import compare
from fedvlm.runner import run as runner
from fedvlm.runner.run import Progress
from fedvlm.runner.settings import build


class Result(Record):
    """A finished run as its directory tells it."""

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One entry per round of every training, as recorded."""
        return self.lines()

    def table(self, form: str = "text") -> str:
        """Mean ± deviation over seeds as text, markdown, latex or csv."""
        return compare([self], form)

    def personalised(self, client: str, seed: int | None = None) -> Personalised:
        """A client's own classifier, from the first training it took part in."""
        return of_client(self, client, seed)

    def unseen(self, job: str | None = None, seed: int | None = None) -> Personalised:
        """The classifier of a client that joins later: what is shared, and the first local."""
        return of_newcomer(self, job, seed)


def run(
    method: Any = "fedot",
    *,
    out: str | Path | None = None,
    again: bool = False,
    embedded: Embedded | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Runs a method by name or as an object; keyword arguments are settings of the run.

    `embedded` takes rows that are already in memory instead of data and encoder. A finished run
    of the same settings is not run again unless `again`; an unfinished one goes on.
    """
    built = build({"method": method, **settings})
    return Result(runner.execute(built, out, again, embedded, progress).folder)


def resume(folder: str | Path, progress: Progress | None = None) -> Result:
    """Goes on where a run was stopped, however it was stopped; a finished run is just read."""
    return Result(runner.resume(folder, progress).folder)
