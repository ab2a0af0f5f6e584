"""Nothing that fedvlm does by itself reaches for the network."""

import os
import subprocess
import sys

WATCH = """
import sys
def watch(event, words):
    if event == "socket.getaddrinfo":
        host = words[0]
    elif event in ("socket.connect", "socket.sendto"):
        host = words[1][0] if isinstance(words[1], tuple) else "127.0.0.1"  # else a file's path
    else:
        return
    if host not in (None, "", "127.0.0.1", "::1", "localhost"):
        with open({log!r}, "a") as file:
            file.write(f"{{event}} {{host}}\\n")
sys.addaudithook(watch)
"""
SCRIPT = """
import sys
from typer.testing import CliRunner
from fedvlm.cli import app
run = ["run", "--method", "fedavg", "--smoke", "--no-baselines", "--output"]
for words in (
    [*run, "plain"],
    [*run, "flower", "--set", "engine=flower"],
    ["compare", "plain", "flower"],
    ["report", "plain", "--output", "page.html"],
    ["verify", "plain"],
    ["audit", "plain"],
    ["list", "methods"],
):
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, (words, told.output, told.exception)
"""


def run(tmp_path, code):
    log = tmp_path / "log"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(log=str(log)))
    offline = ("HF_", "TRANSFORMERS_", "FLWR_")  # as a person's shell has it: no switch is set
    env = {key: value for key, value in os.environ.items() if not key.startswith(offline)}
    paths = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    env |= {"PYTHONPATH": paths, "FEDVLM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    return done, log.read_text().splitlines() if log.exists() else []


def test_a_run_its_report_and_its_audit_ask_nobody(tmp_path):
    done, requests = run(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert requests == []


def test_the_watch_sees_who_asks(tmp_path):
    code = (
        "import socket\n"
        "one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "one.connect(('192.0.2.1', 9))\n"  # of documentation; a datagram socket sends nothing
    )
    _, requests = run(tmp_path, code)
    assert requests == ["socket.connect 192.0.2.1"]
