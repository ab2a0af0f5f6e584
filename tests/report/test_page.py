"""The page of a run: one file that asks for nothing, and that says what the record says."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import fedvlm
from fedvlm.cli import app
from fedvlm.errors import DataError, SettingsError
from fedvlm.report.page.model import build_model, run_names
from fedvlm.report.page.render import render_page, write_page
from fedvlm.report.page.svg import nice_ticks
from fedvlm.report.runs import read_page
from fedvlm.report.tables import compare_table


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.current = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.current = tag

    def handle_data(self, data):
        if self.current in ("script", "style"):
            self.inside.append((self.current, data))

    def handle_endtag(self, tag):
        self.current = None


@pytest.fixture(scope="module")
def text(bad_page):
    return bad_page.read_text()


def test_page_names_no_address_and_has_no_style_or_handler_attribute(text):
    for tag, attrs in Elements(text).tags:
        assert not any(key == "style" or key.startswith("on") for key in attrs), (tag, attrs)
        for key in ("src", "href", "action", "srcset", "data", "xlink:href"):
            assert attrs.get(key, "#").startswith("#") or attrs[key] == "data:,", (tag, attrs)


def test_policy_allows_our_own_script_and_style_and_nothing_else(text):
    elements = Elements(text)
    policy = next(a["content"] for _, a in elements.tags if "http-equiv" in a)
    assert "unsafe" not in policy and policy.startswith("default-src 'none'; ")
    style = next(data for tag, data in elements.inside if tag == "style")
    script = elements.inside[-1][1]
    for name, data in (("style-src", style), ("script-src", script)):
        assert f"{name} 'sha256-{b64encode(sha256(data.encode()).digest()).decode()}'" in policy
    assert len(script.encode()) < 20_000


def test_bad_names_are_words_and_never_elements(text):
    tags = [tag for tag, _ in Elements(text).tags]
    assert tags.count("script") == 2 and "i" not in tags
    assert "<script>window" not in text


def test_compare_reads_a_page_back_as_the_runs_it_was_made_of(bad_runs, bad_page):
    records = read_page(bad_page)
    for options in (
        {},
        {"all_columns": True, "form": "csv"},
        {"traffic": True, "extra_columns": ["F1", "ECE"]},
    ):
        assert compare_table(records, **options) == compare_table(bad_runs, **options)


def test_file_without_runs_inside_is_refused(tmp_path):
    (tmp_path / "x.html").write_text("<p>hello</p>")
    with pytest.raises(DataError, match="is no page of `fedvlm report`"):
        read_page(tmp_path / "x.html")
    with pytest.raises(DataError, match="is no page of `fedvlm report`"):
        read_page(tmp_path / "nowhere.html")


def test_model_is_plain_json_and_the_same_twice(bad_runs):
    model = build_model(bad_runs)
    assert json.loads(json.dumps(model)) == json.loads(json.dumps(build_model(bad_runs)))
    assert render_page(model) == render_page(json.loads(json.dumps(model)))


def test_no_runs_are_refused():
    with pytest.raises(SettingsError, match="no run is named"):
        build_model([])


def test_best_has_the_largest_mean_and_level_runs_have_nought_in_their_interval(bad_runs):
    model = build_model(bad_runs)
    assert set(model["verdicts"]) == {"G", "P", "C"}
    for column, verdict in model["verdicts"].items():
        means = [sum(table[column] for table in run["tables"]) / len(run["tables"]) for run in model["runs"]]
        assert means[verdict["best"]] == max(means)
        for place, (mean, low, high) in verdict["differences"].items():
            assert mean == pytest.approx(means[int(place)] - max(means), abs=1e-5)
            assert (int(place) in verdict["level"]) == (low <= 0 <= high)
    assert all(
        model["runs"][v["best"]]["name"] in s
        for v, s in zip(model["verdicts"].values(), model["sentences"], strict=False)
    )


def test_runs_of_other_rows_are_not_compared(bad_runs, rows_like, tmp_path):
    other_data = fedvlm.run("zero-shot", out=tmp_path / "o", embedded=rows_like(seed=5), seeds=[0, 1])
    model = build_model([bad_runs[0], other_data])
    assert model["verdicts"] == {}
    assert "Nothing is compared" in model["sentences"][-1]
    render_page(model)


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        ("own-test", {}),
        ("source-target", {"target": ["art"]}),
        ("cross-device", {"counts": [1, 2], "unseen": 1}),
    ],
)
def test_every_protocol_has_a_page_with_a_verdict(rows_like, tmp_path, protocol, settings):
    runs = [
        fedvlm.run(
            {"name": name, **({"rounds": 2} if name != "zero-shot" else {})},
            out=tmp_path / name,
            embedded=rows_like(),
            protocol=protocol,
            **settings,
        )
        for name in ("zero-shot", "fedavg", "fedot-all-local")
    ]
    model = build_model(runs)
    assert model["verdicts"] and model["sentences"]
    assert "unseen" not in model["runs"][2]["sure"]  # it has learnt nothing for them
    out = write_page(runs, tmp_path / "page.html")
    assert compare_table(read_page(out)) == compare_table(runs)


def test_badges_say_what_makes_numbers_weak(rows_like, tmp_path):
    settings = {"embedded": rows_like(), "selection": "oracle"}
    run = fedvlm.run({"name": "fedavg", "rounds": 2}, out=tmp_path / "r", **settings)
    badges = dict(build_model([run])["badges"])
    assert "ORACLE" in badges and "SMOKE" not in badges


def test_names_are_as_short_as_tells_runs_apart():
    def run(**settings):
        return {"identity": {"seeds": [0], "method": settings}}

    assert run_names([run(name="a", lr=1, x=2), run(name="b", lr=3)]) == ["a", "b"]
    runs = [run(name="a", lr=1, x=2), run(name="a", lr=3, x=2)]
    assert run_names(runs) == ["a (lr 1)", "a (lr 3)"]
    assert run_names([run(name="a"), run(name="a")]) == ["a [1]", "a [2]"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.431, 0.562), (3, 3), (-2, 1e6), (1e-7, 2e-7)])
def test_ticks_are_few_and_span_the_numbers(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9 * max(1, high)
    assert 2 <= len(ticks) <= 9


def test_report_command_writes_beside_the_runs_and_compare_reads_it(bad_runs):
    folders = [str(run.folder) for run in bad_runs]
    done = CliRunner().invoke(app, ["report", *folders, "--title", "t"], catch_exceptions=False)
    [path] = re.findall(r"report: (.*report\.html)", done.output)
    assert path == str(bad_runs[0].folder.parent / "report.html")
    words = ["compare", path, "--columns", "AUC"]
    output = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "AUC, own" in output.splitlines()[0] and len(output.splitlines()) == 5
