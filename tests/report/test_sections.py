"""Sections of the page that stand on more than the table: papers, audit, risk, clients."""

import re

import pytest
import torch
from typer.testing import CliRunner

import fedvlm
from fedvlm.cli import app
from fedvlm.evaluate.metrics import diagram_data
from fedvlm.record import AUDIT_FILE
from fedvlm.report.page.model import build_model
from fedvlm.report.page.render import client_gains, render_page
from fedvlm.report.paper_tables import compare_with_papers, verdict_sentence
from fedvlm.report.papers import find_item, numbers
from fedvlm.report.runs import pool_scores
from fedvlm.report.tables import read_audit, write_audit
from fedvlm.report.verify import verify_files
from fedvlm.runner.audit import audit
from fedvlm.runner.settings import build


def printed(method, data="pacs", column="G", item="fedot-v1/T1"):
    return next(
        number for number in numbers()[item] if (number.method, number.data, number.column) == (method, data, column)
    )


def run_of(number, measured, **changed):
    """A run as the model has it, of just what a number is printed for."""
    expected = {"data": number.data, "method.name": number.method, **find_item(number.name).settings}
    values: dict = {"seeds": [50, 77, 98]}
    for key, value in {**expected, **number.settings, **changed}.items():
        head, _, name = key.partition(".")
        if name:
            values.setdefault(head, {})[name] = value
        else:
            values[head] = value
    tables = [{number.column: measured / 100}] * 3
    return {"identity": build(values).identity(), "tables": tables, "reproduces": [number.name]}


def line_of(number, run):
    [line] = (comparison for comparison in compare_with_papers([run]) if comparison["row"] == number.row)
    return line


def test_a_run_as_published_has_a_line_for_its_number_and_a_verdict():
    number = printed("fedot")
    for gap, word in ((0.5, "met"), (-0.05, "within noise"), (-9.0, "differs")):
        line = line_of(number, run_of(number, number.value + gap))
        assert (line["item"], line["column"], line["verdict"]) == ("fedot-v1/T1", "G", word)
        assert line["measured"] - line["published"] == pytest.approx(gap)
        assert verdict_sentence([line]) == [f"Of 1 published numbers that these runs have too: 1 {word}."]


def test_void_numbers_and_other_settings_are_told_with_the_reason():
    void = printed("zero-shot", "femnist")
    line = line_of(void, run_of(void, 49.0))
    assert line["verdict"] == "void" and "writers" in line["reason"]
    number = printed("fedot")
    line = line_of(number, run_of(number, 94.0, smoke=True))
    assert (line["verdict"], line["reason"]) == ("not comparable", "a smoke run")


def test_nothing_is_compared_that_does_not_say_what_it_reproduces():
    run = run_of(printed("fedot"), 94.0)
    assert compare_with_papers([{**run, "reproduces": []}]) == []
    assert compare_with_papers([{**run, "tables": [{"own": 0.9}]}]) == []
    other_data = {**run, "identity": {**run["identity"], "data": "demo"}}
    assert compare_with_papers([other_data]) == []
    assert verdict_sentence([]) == []


def test_the_page_shows_verdicts_and_strikes_out_what_is_void(bad_runs):
    model = build_model(bad_runs)
    assert model["published"] == [] and 'id="published"' not in render_page(model)
    runs = [run_of(printed("zero-shot", "femnist"), 49.0), run_of(printed("fedot"), 95.0)]
    model["published"] = compare_with_papers(runs)
    text = render_page(model)
    assert re.search(r"<s>49\.22</s>.*?void <small>\(", text)
    assert re.search(r"95\.00 ± 0\.00.*?<td class=\"words\">met</td>", text)


def test_an_experiment_says_what_it_reproduces_in_its_record(rows_like, tmp_path):
    run = fedvlm.run("zero-shot", embedded=rows_like(), out=tmp_path / "r", reproduces=["fedot-v1/T1"])
    assert build_model([run])["runs"][0]["reproduces"] == ["fedot-v1/T1"]


def test_risk_is_the_share_of_errors_among_the_surest_rows():
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(200, 4, generator=generator)).softmax(1).double()
    y = torch.randint(4, (200,), generator=generator)
    middle = len(y) // 2  # two clients
    scores = {
        name: {"test_rows": middle, **diagram_data(p[rows], y[rows])}
        for name, rows in (("a", slice(0, middle)), ("b", slice(middle, None)))
    }
    curve = pool_scores(scores.values())["risk"]
    sure, guess = p.max(1)
    expected = []
    for edge in range(14, -1, -1):
        above = sure > edge / 15
        if above.any() and (not expected or above.sum() > expected[-1][2]):
            wrong = (guess != y)[above].double().mean().item()
            expected.append((above.double().mean().item(), wrong, above.sum()))
    assert curve == [[pytest.approx(a, abs=1e-4), pytest.approx(b, abs=1e-4)] for a, b, _ in expected]
    assert curve[-1] == [1.0, pytest.approx((guess != y).double().mean().item(), abs=1e-4)]


@pytest.fixture(scope="module")
def three(rows_like, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    settings = {"embedded": rows_like(), "protocol": "own-test"}
    methods = ("alone", {"name": "fedavg", "rounds": 3, "lr": 0.1}, "zero-shot")
    return [fedvlm.run(method, out=folder / str(place), **settings) for place, method in enumerate(methods)]


def test_clients_go_from_zero_shot_over_federated_to_alone_and_the_worst_stands_first(three):
    model = build_model(three)
    table = client_gains(model)
    assert table["names"] == ["zero-shot", "fedavg", "alone"]
    alone, fedavg, plain = ({cell["client"]: cell["accuracy"] for cell in run["cells"]} for run in model["runs"])
    assert [id for id, _, _ in table["rows"]] == sorted(fedavg, key=lambda id: fedavg[id])
    for id, values, gain in table["rows"]:
        assert values == [plain[id], fedavg[id], alone[id]]
        assert gain == pytest.approx(fedavg[id] - plain[id])
    assert 'id="step-table"' in render_page(model)
    assert client_gains({"runs": model["runs"][:1]}) is None


def test_a_kept_audit_is_on_the_page_and_goes_when_the_run_is_run_again(rows_like, tmp_path):
    rows = rows_like()
    method = {"name": "fedavg", "rounds": 2, "lr": 0.1}
    run = fedvlm.run(method, embedded=rows, out=tmp_path / "r")
    assert read_audit(run) == [] and "audit RUN --save" in render_page(build_model([run]))
    lines = audit(run.folder, embedded=rows)
    write_audit(run, lines)
    assert read_audit(run) == lines and verify_files(str(run.folder))[1] == []
    text = render_page(build_model([run]))
    assert "Audit of" in text and "audit RUN --save" not in text
    strongest = max(lines, key=lambda line: line["AUC upload"])
    assert f"an AUC of {strongest['AUC upload']:.2f}" in text
    fedvlm.run(method, embedded=rows, out=tmp_path / "r", again=True)
    assert not (run.folder / AUDIT_FILE).exists()


def test_the_audit_command_keeps_what_it_prints(rows_like, tmp_path, monkeypatch):
    rows = rows_like()
    run = fedvlm.run("tofa", embedded=rows, out=tmp_path / "r", allow_small=True)
    monkeypatch.setattr(  # the command has no rows from memory
        "fedvlm.runner.audit.reopen_run", lambda result, *_: (build(result.manifest["identity"]), rows)
    )
    for words, is_kept in (([], False), (["--save"], True)):
        done = CliRunner().invoke(app, ["audit", str(run.folder), *words], catch_exceptions=False)
        assert "AUC upload" in done.output
        assert bool(read_audit(run)) == is_kept
    assert read_audit(run) == audit(run.folder)
