"""The ledger: whatever a hand or a crash does to it shows."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.errors import DataError

TENSORS = {"head": torch.zeros(4, 6), "n": torch.zeros(4, dtype=torch.int64)}


def filled(folder, count=5):
    ledger = Ledger(folder)
    for number in range(count):
        ledger.add("out", number, TENSORS, b"message %d" % number, run="r1")
    return ledger


def test_a_line_says_what_travelled_and_never_a_value(tmp_path):
    head = filled(tmp_path, 1).add("refused", 1, reason="the method x is not allowed here")
    history = Ledger(tmp_path).read()
    first, second = history.lines
    assert first["fields"] == {"head": "float32 [4, 6]", "n": "int64 [4]"}
    assert (first["bytes"], first["round"], first["direction"]) == (9, 0, "out")
    assert {"time", "content", "run"} <= set(first)
    assert second["reason"] == "the method x is not allowed here"
    assert (history.head, history.torn, history.broken) == (head, (), ())


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (
            lambda t: [*t[:2], t[2].replace('"round": 2', '"round": 7'), *t[3:]],
            "line 3 was changed",
        ),
        (lambda t: [*t[:2], *t[3:]], "line 3 does not follow"),
        (lambda t: [t[1], t[0], *t[2:]], "line 1 does not follow"),
        (lambda t: [*t[:3], t[1], *t[3:]], "line 4 does not follow"),
        (lambda t: [*t[:2], "x", *t[3:]], "line 4 does not follow"),
    ],
)
def test_a_line_changed_or_moved_or_taken_out_is_found(tmp_path, harm, error):
    ledger = filled(tmp_path)
    lines = ledger.path.read_text().splitlines()
    ledger.path.write_text("\n".join(harm(lines)) + "\n")
    assert any(error in message for message in ledger.read().broken)


def test_a_line_rewritten_with_a_new_hash_is_found_by_the_next(tmp_path):
    from fedvlm.deploy.site.ledger import _hash_line

    ledger = filled(tmp_path)
    lines = [json.loads(text) for text in ledger.path.read_text().splitlines()]
    lines[1]["bytes"] = 0
    lines[1]["hash"] = _hash_line({key: value for key, value in lines[1].items() if key != "hash"})
    ledger.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ledger.read().broken == ("line 3 does not follow the line before it",)


def test_an_end_cut_off_is_found_by_a_head_kept_elsewhere(tmp_path):
    ledger = filled(tmp_path)
    head = ledger.read().head
    lines = ledger.path.read_text().splitlines()
    ledger.path.write_text("\n".join(lines[:3]) + "\n")
    history = ledger.read()
    assert history.broken == ()
    assert not history.contains(head)
    assert history.contains(history.head[:12])


def test_a_line_torn_by_a_crash_is_said_and_the_ledger_goes_on(tmp_path):
    ledger = filled(tmp_path)
    intact = ledger.path.read_bytes()
    for cut in (1, 2, 40, 150):
        ledger.path.write_bytes(intact[:-cut])
        history = ledger.read()
        assert history.torn == (() if cut == 1 else (5,))
        ledger.add("in", 5)
        history = ledger.read()
        assert history.broken == ()
        assert history.torn == (() if cut == 1 else (5,))
        assert history.lines[-1]["round"] == 5


def test_long_lines_are_followed_too(tmp_path):
    ledger = filled(tmp_path, 2)
    large_tensors = {f"tensor-{number}": torch.zeros(1) for number in range(4000)}
    ledger.add("out", 2, large_tensors)
    ledger.add("out", 3)
    assert ledger.read().broken == ()


def test_several_processes_write_one_chain(tmp_path):
    code = (
        "import sys\nfrom fedvlm.deploy.site.ledger import Ledger\n"
        "for n in range(30): Ledger(sys.argv[1]).add('out', n, who=sys.argv[2])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path, str(i)]) for i in range(3)]
    assert [process.wait() for process in writers] == [0, 0, 0]
    history = Ledger(tmp_path).read()
    assert (len(history.lines), history.broken, history.torn) == (90, (), ())


def test_the_command_prints_names_shapes_and_refusals(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add("out", 3, {"head": torch.zeros(4, 16)}, b"x" * 9, kind="round")
    refusal = "refused by its policy: nobody at this site has consented to training"
    ledger.add("refused", 4, {}, b"", kind="round", error=f"{refusal}\nand more")
    output = CliRunner().invoke(app, ["ledger", str(tmp_path)])
    assert output.exit_code == 0
    _, _, sent, refused, *_ = output.stdout.splitlines()
    assert "out        round  3      9" in sent and sent.endswith("head float32 [4, 16]")
    assert refused.endswith(refusal)


def test_a_folder_without_a_ledger_is_said(tmp_path):
    with pytest.raises(DataError, match="there is no .*ledger.jsonl"):
        Ledger(tmp_path).read()


def test_a_history_that_is_followed_is_the_one_that_is_read(tmp_path):
    """Line by line, over torn lines, a rewritten file and one that was cut."""
    ledger = filled(tmp_path, 3)
    assert ledger.history() == ledger.read()
    ledger.add("in", 3)
    assert ledger.history() == ledger.read()
    with open(ledger.path, "ab") as file:
        file.write(b'{"time": "2026')
    assert ledger.history() == ledger.read() and ledger.history().torn == (5,)
    ledger.add("in", 4)
    assert ledger.history() == ledger.read() and ledger.history().torn == (5,)
    text = ledger.path.read_text()
    ledger.path.write_text(text.replace('"round": 1', '"round": 7'))
    assert ledger.history() == ledger.read() and ledger.history().broken
    ledger.path.write_text("\n".join(text.splitlines()[:2]) + "\n")
    assert ledger.history() == ledger.read() and len(ledger.history().lines) == 2
    ledger.path.unlink()
    assert ledger.history().lines == ()
