"""Progress: a line per tenth off a terminal, a bar on one, nothing for what is short."""

import io

from rich.console import Console
from rich.progress import Progress, TextColumn

from fedvlm.cli.progress import QUIET_SECONDS, ProgressBars, ProgressLines, clock_time
from fedvlm.cli.run import progress_line
from fedvlm.core import make


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def progress_lines(seconds, total=100, task="fedavg", lines=()):
    """All that is said of so many steps that take so many seconds each."""
    clock, output = Clock(), []
    watch = ProgressLines(output.append, clock)
    for done in range(total + 1):
        for line in lines:
            watch.update_status(task, line)
        watch(task, done, total)
        clock.now += seconds
    return output


def test_off_a_terminal_there_is_one_line_per_tenth():
    output = progress_lines(1.0)
    assert len(output) == 10
    assert output[0] == "fedavg: 10 of 100, 0:00:10 elapsed, 0:01:30 left, 1.0/s"
    assert output[-1] == "fedavg: 100 of 100, 0:01:40 elapsed, 0:00:00 left, 1.0/s"


def test_nothing_is_said_of_what_takes_a_few_seconds():
    assert progress_lines(QUIET_SECONDS / 101) == []


def test_a_resumed_run_counts_only_what_it_does_itself():
    clock, output = Clock(), []
    watch = ProgressLines(output.append, clock)
    watch("fedot", 80, 100)
    clock.now = 10.0
    watch("fedot", 90, 100)
    assert output == ["fedot: 90 of 100, 0:00:10 elapsed, 0:00:10 left, 1.0/s"]


def test_another_run_of_the_same_name_is_told_anew():
    clock, output = Clock(), []
    watch = ProgressLines(output.append, clock)
    for _ in range(2):
        for done in range(11):
            watch("fedavg", done, 10)
            clock.now += 5.0
    assert len(output) == 20
    assert output[10:] == output[:10]


def test_images_are_counted_by_the_second_while_they_are_encoded():
    assert progress_lines(0.5, task="embedding")[-1].endswith(", 2.0 images/s")


def test_a_line_says_the_training_its_round_and_accuracy_on_validation_rows():
    line = {"training": "0-art", "round": 4, "validation": 0.8125, "accuracy": 0.99}
    output = progress_lines(1.0, lines=[line])[0]
    assert output.startswith("fedavg: training 0-art, round 5, 81.2 % validation accuracy: 10 of 100")
    assert "99" not in output  # nothing of test rows before a run has ended
    assert progress_lines(1.0, lines=[{**line, "validation": None}])[0].startswith(
        "fedavg: training 0-art, round 5: 10 of 100"
    )


def test_methods_side_by_side_are_told_apart():
    clock, output = Clock(), []
    watch = ProgressLines(output.append, clock)
    for done in range(3):
        for name in ("fedotp", "promptfl"):
            watch.update_status(name, {"training": f"0-{name}", "round": done, "validation": None})
            watch(name, done, 10)
        clock.now += QUIET_SECONDS
    assert [text.split(": ")[:2] for text in output] == [
        [name, f"training 0-{name}, round {done + 1}"] for done in (1, 2) for name in ("fedotp", "promptfl")
    ]


def test_a_bar_says_the_same_and_takes_names_as_they_are():
    clock, out = Clock(), io.StringIO()
    columns = (
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[rate]}"),
    )
    bar = Progress(*columns, console=Console(file=out, width=120), auto_refresh=False)
    watch = ProgressBars(bar, clock)
    watch("fedavg", 0, 10)
    clock.now = 1.0
    watch("fedavg", 1, 10)
    assert not bar.tasks  # not yet
    clock.now = 10.0
    watch.update_status("fedavg", {"training": "0-[red]x", "round": 4, "validation": 0.5})
    watch("fedavg", 5, 10)
    bar.stop()
    assert "fedavg: training 0-[red]x, round 5, 50.0 % validation accuracy" in out.getvalue()
    assert "0.5/s" in out.getvalue()


def test_hours_are_written_as_on_a_clock():
    assert clock_time(3725.4) == "1:02:05"


def test_progress_shows_no_accuracy_that_adaptation_will_change():
    """`alone` and `auto` fit their classifiers after the last round: before it they are at chance."""
    line = {"training": "0-all", "round": 0, "validation": 0.044}
    for name, accuracy in {"alone": None, "auto": None, "fedavg": 0.044}.items():
        assert progress_line(make(name), line)["validation"] == accuracy
