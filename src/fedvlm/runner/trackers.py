"""Send the lines of a record to experiment trackers as they are written.

A tracker that fails is dropped with a note; it never stops a run.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from fedvlm.errors import SettingsError, unknown_name

Line = Mapping[str, Any]


class Tracker(Protocol):
    def line(self, run: str, line: Line) -> None: ...
    def close(self) -> None: ...


def numbers(line: Line) -> dict[str, float]:
    """Return the numbers of a line that concern the whole training."""
    numeric = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "round"}
    return {key: float(value) for key, value in numeric.items() if not isinstance(value, bool)}


class TensorBoard:
    """Write an event file per training below a folder."""

    def __init__(self, place: str) -> None:
        from tensorboardX import SummaryWriter

        self.place, self.writer, self.open = place, SummaryWriter, dict[str, Any]()

    def line(self, run: str, line: Line) -> None:
        name = f"{run}/{line['training']}"
        if name not in self.open:
            self.open[name] = self.writer(f"{self.place}/{name}")
        for key, value in numbers(line).items():
            self.open[name].add_scalar(key, value, line["round"])

    def close(self) -> None:
        for writer in self.open.values():
            writer.close()


class MLflow:
    """Log a run per training at a tracking address, as sqlite:///FILE or a server's."""

    def __init__(self, place: str) -> None:
        from mlflow.tracking import MlflowClient

        self.client, self.open = MlflowClient(place or None), dict[str, str]()

    def line(self, run: str, line: Line) -> None:
        name = f"{run}/{line['training']}"
        if name not in self.open:
            experiment = self.client.get_experiment_by_name("fedvlm")
            home = experiment.experiment_id if experiment else self.client.create_experiment("fedvlm")
            self.open[name] = self.client.create_run(home, run_name=name).info.run_id
        for key, value in numbers(line).items():
            self.client.log_metric(self.open[name], key, value, step=line["round"])

    def close(self) -> None:
        for id in self.open.values():
            self.client.set_terminated(id)


TRACKER_CLASSES: Mapping[str, Callable[[str], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class Trackers:
    """Call several trackers; `notes` tells which of them failed, and why."""

    def __init__(self, targets: Sequence[str | Callable[[str, Line], None]]) -> None:
        self.notes: list[str] = []
        self.live: dict[str, Tracker] = {}
        for place, target in enumerate(targets):
            if callable(target):
                self.live[f"callback {place + 1}"] = SimpleNamespace(line=target, close=lambda: None)
                continue
            kind, _, address = target.partition(":")
            if kind not in TRACKER_CLASSES:
                raise unknown_name("tracker", kind, TRACKER_CLASSES)
            if kind == "tensorboard" and not address:
                raise SettingsError("tensorboard needs a folder, as --track tensorboard:logs")
            try:
                self.live[target] = TRACKER_CLASSES[kind](address)
            except ImportError as error:
                raise SettingsError(f"{kind} cannot be imported ({error}); pip install 'fedvlm[track]'") from error
            except Exception as error:  # of any kind: it comes from the tracker's library
                self._note_failure(target, error)

    def __call__(self, run: str, line: Line) -> None:
        self._call_all(lambda tracker: tracker.line(run, line))

    def close(self) -> None:
        self._call_all(lambda tracker: tracker.close())

    def _call_all(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.live.items()):
            try:
                act(tracker)
            except Exception as error:  # a tracker must not stop the run
                self.live.pop(name)
                self._note_failure(name, error)

    def _note_failure(self, name: str, error: Exception) -> None:
        self.notes.append(f"the tracker {name} failed and was dropped ({type(error).__name__}: {error})")
