"""Three sites through doctor, a run, a late joiner, a refusal, a killed site and a withdrawal.

    python -m tools.recording        # writes docs/how-to/recording.md; two minutes

What it writes is what the commands printed, in the order they were called, between real processes
on one machine. Left out are lines about this machine, and most of a policy's words.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep

import numpy as np
from PIL import Image

from fedvlm.deploy.flower.processes import free_port
from fedvlm.deploy.kits import create_kits
from fedvlm.deploy.site.policy import example_policy

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "recording.md"
SITES = ["north", "south", "west", "east"]
CLASSES = ["circle", "square", "triangle"]
LOCAL = re.compile(r"GB|free on|torch|Python|^    Why|left, [0-9.]+/s")  # lines that are left out
HEAD = """\
# A recording

Written by `python -m tools.recording`: what the commands printed, between real processes on one
machine. Lines about the machine are left out, and most of the words about a policy. North, south
and west run; east comes late; south says no to a method; west is killed; south withdraws.
"""


def images(root: Path) -> None:
    """A class is a colour, a site a brightness, and all differ a little."""
    draw = np.random.default_rng(0)
    for s, site in enumerate(SITES):
        for c, name in enumerate(CLASSES):
            for row in range(30):
                colour = np.full(3, 30 + 25 * s) + draw.integers(0, 40, 3)
                colour[c] += 70
                path = root / site / name / f"{row}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), tuple(int(channel_value) for channel_value in colour)).save(path)


class Show:
    """Commands in a folder of their own, with what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, [HEAD]
        self.running: dict[str, subprocess.Popen[str]] = {}

    def title(self, text: str) -> None:
        self.lines += [f"\n## {text}\n"]

    def add_output(self, command: str, text: str) -> None:
        lines = [line for line in text.splitlines() if not LOCAL.search(line)]
        plain = "\n".join(lines).replace(f"{self.folder}/", "").replace(str(self.folder), ".")
        block = "\n".join(line.rstrip() for line in [f"$ {command}", *plain.splitlines()])
        self.lines += ["```text", block, "```"]

    def call(self, command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command.split(" ")],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env=self.env,
        )
        self.add_output(command, done.stdout + done.stderr)
        return done.stdout + done.stderr

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "FEDVLM_CACHE": str(self.folder / "cache"), "COLUMNS": "110"}

    def start(self, name: str, command: str, until: str) -> None:
        log = self.folder / f"{name}.log"
        with open(log, "w") as file:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", *command.split(" ")],
                cwd=self.folder,
                stdout=file,
                stderr=file,
                text=True,
                env=self.env,
                start_new_session=True,
            )
        self.wait(name, until)

    def wait(self, name: str, until: str, seconds: float = 120.0) -> None:
        end = monotonic() + seconds
        while until not in self.log(name):
            assert monotonic() < end, (name, until, self.log(name))
            sleep(0.1)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait(30)


def experiment(show: Show, method: str, rounds: int) -> str:
    classes = ", ".join(f'"{name}"' for name in CLASSES)
    text = f'protocol = "own-test"\n[source]\nclasses = [{classes}]\n[method]\nname = "{method}"\n'
    (show.folder / f"{method}.toml").write_text(text + f"rounds = {rounds}\n")
    return f"{method}.toml"


def site(show: Show, name: str) -> None:
    command = f"fedvlm deploy site fed/site-{name} --data images/{name} --encoder demo"
    show.start(name, command, "the server answers")


def record(show: Show) -> None:
    images(show.folder / "images")
    create_kits(show.folder / "fed", SITES, "127.0.0.1", free_port())
    south = show.folder / "fed" / "site-south" / "policy.toml"
    south.write_text(example_policy(("tofa",)))
    show.start("server", "fedvlm deploy server fed/server", "the server is up")
    for name in SITES[:3]:
        site(show, name)
    show.title("Doctor")
    show.call("fedvlm deploy doctor fed/server")
    show.call("fedvlm deploy doctor fed/site-north")
    show.title("A run; east is not there")
    first_run = experiment(show, "tofa", 1)
    show.call(f"fedvlm deploy run fed/server {first_run} --output one --wait 5")
    show.add_output("what north has read meanwhile", show.log("north"))
    show.title("A late joiner")
    site(show, "east")
    show.call("fedvlm deploy join fed/server one east")
    show.title("A refusal, and a killed site")
    second_run = experiment(show, "fedavg", 4)
    show.start(
        "run",
        f"fedvlm deploy run fed/server {second_run} --output other --wait 5 --deadline 8",
        "round 1 of 4",
    )
    os.killpg(show.running["west"].pid, signal.SIGKILL)
    show.running["run"].wait(180)
    command = f"fedvlm deploy run fed/server {second_run} --output other --wait 5 --deadline 8"
    show.add_output(f"{command}    # west is killed in round 2", show.log("run"))
    show.call("fedvlm deploy status fed/server")
    show.title("A withdrawal")
    show.call("fedvlm deploy withdraw fed/site-south --by A.Person")
    show.call("fedvlm deploy withdraw fed/server fed/site-south/withdrawal.safetensors --record one --record other")
    show.call("fedvlm ledger fed/server")
    show.call("fedvlm deploy keys fed/server")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        show = Show(Path(place))
        try:
            record(show)
        finally:
            show.stop()
        PAGE.write_text("\n".join(show.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
