"""The page of a run: one file that asks for nothing, and that says what the record says."""

import json
import re
import shutil
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import fedvlm
from fedvlm.cli import app
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.metrics import mean_and_std
from fedvlm.record import Record
from fedvlm.report.charts import CLIENT_PALETTE, PALETTE
from fedvlm.report.experiment import with_earlier_runs, write_folder
from fedvlm.report.page.model import build_model, run_warnings
from fedvlm.report.page.render import four_digits, render_page, write_page
from fedvlm.report.page.svg import nice_ticks
from fedvlm.report.runs import listed_runs, read_page, read_runs, run_names
from fedvlm.report.tables import compare_table, table_cells


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
    for options in ({}, {"all_columns": True, "form": "csv"}, {"traffic": True, "extra_columns": ["F1", "ECE"]}):
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
            assert (int(place) in verdict["similar"]) == (low <= 0 <= high)
    assert all(
        model["runs"][v["best"]]["name"] in s
        for v, s in zip(model["verdicts"].values(), model["sentences"], strict=False)
    )


def test_runs_of_other_rows_are_not_compared(bad_runs, rows_like, tmp_path):
    other_data = fedvlm.run("zero-shot", out=tmp_path / "o", embedded=rows_like(seed=5), seeds=[0, 1])
    model = build_model([bad_runs[0], other_data])
    assert model["verdicts"] == {}
    assert "No test of significance" in model["sentences"][-1]
    render_page(model)


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [("own-test", {}), ("source-target", {"target": ["art"]}), ("cross-device", {"counts": [1, 2], "unseen": 1})],
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
    assert "unseen" not in model["runs"][2]["calibration"]  # it has learnt nothing for them
    out = write_page(runs, tmp_path / "page.html")
    assert compare_table(read_page(out)) == compare_table(runs)


def test_badges_say_what_makes_numbers_weak(rows_like, tmp_path):
    settings = {"embedded": rows_like(), "selection": "oracle"}
    run = fedvlm.run({"name": "fedavg", "rounds": 2}, out=tmp_path / "r", **settings)
    badges = dict(build_model([run])["badges"])
    assert "ORACLE" in badges and "SMOKE" not in badges


def test_names_are_as_short_as_tells_runs_apart():
    def run(**settings):
        return {"seeds": [0], "method": settings}

    assert run_names([run(name="a", lr=1, x=2), run(name="b", lr=3)]) == ["a", "b"]
    runs = [run(name="a", lr=1, x=2), run(name="a", lr=3, x=2)]
    assert run_names(runs) == ["a (lr=1)", "a (lr=3)"]
    assert run_names([run(name="a"), run(name="a")], unique=True) == ["a [1]", "a [2]"]


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


@pytest.fixture(scope="module")
def with_pooled(rows_like, tmp_path_factory):
    """Two federated methods and the baselines that every table of own data has."""
    folder = tmp_path_factory.mktemp("pooled")
    methods = (
        "zero-shot",
        "alone",
        "pooled",
        {"name": "fedavg", "rounds": 3, "lr": 0.1},
        {"name": "fedot", "rounds": 2},
    )
    return [
        fedvlm.run(method, out=folder / str(place), embedded=rows_like(), seeds=[0, 1])
        for place, method in enumerate(methods)
    ]


def test_differences_of_a_pooled_run_are_those_of_the_table_and_it_is_never_best(with_pooled):
    model = build_model(with_pooled)
    pooled = model["runs"][2]
    assert {cell["client"] for cell in pooled["cells"]} == {cell["client"] for cell in model["runs"][3]["cells"]}
    assert {cell["unseen"] for cell in pooled["cells"]} == {True, False}
    for column, verdict in model["verdicts"].items():
        means = [mean_and_std(run["tables"])[column][0] for run in model["runs"]]
        assert verdict["best"] != 2
        assert verdict["differences"]["2"][0] == pytest.approx(means[2] - means[verdict["best"]], abs=1e-5)


def test_the_headline_names_the_best_federated_method_and_its_gaps(with_pooled):
    model = build_model(with_pooled)
    for column in ("G", "P"):
        means = [mean_and_std(run["tables"])[column][0] for run in model["runs"]]
        best = max((3, 4), key=lambda place: means[place])
        [sentence] = [text for text in model["sentences"] if f"({column})" in text]
        assert f"the best federated method is {model['runs'][best]['name']}" in sentence
        assert f"pooled {round(100 * (means[best] - means[2]), 1) + 0.0:+.1f}" in sentence
        assert "significant" in sentence or "alone" not in sentence


def test_a_warning_names_its_methods_and_stands_once(bad_runs):
    model = build_model(bad_runs)
    for run in model["runs"][:2]:
        run["notes"] = ["36 % of the classes are suppressed", "36 % of the classes are suppressed"]
    assert run_warnings(model["runs"]) == ["zero-shot, fedavg: 36 % of the classes are suppressed"]
    model["warnings"] = run_warnings(model["runs"])
    assert render_page(model).partition('id="main"')[2].partition("</main>")[0].count("are suppressed") == 1


def test_sections_have_the_names_of_the_field_and_tables_say_how_they_average(text):
    for title in ("Data per client", "Calibration and utility", "Method diagnostics"):
        assert f"<h2>{title}</h2>" in text
    assert "Metrics are means over clients" in text and "pooled ECE" in text and "pooled micro-average AUC" in text


@pytest.mark.parametrize(
    ("value", "shown"), [(0.123456, "0.1235"), (1234.56, "1235"), (12345.6, "12.35k"), (2.5e7, "25M"), (None, "-")]
)
def test_numbers_have_at_most_four_digits(value, shown):
    assert four_digits(value) == shown


def test_colours_of_clients_are_none_of_the_methods(text):
    assert not set(PALETTE) & set(CLIENT_PALETTE)
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert all(colour in style for colour in (*PALETTE, *CLIENT_PALETTE))


def test_a_report_of_one_run_keeps_the_runs_it_was_compared_with(bad_runs, tmp_path):
    home = tmp_path / "r"
    shutil.copytree(bad_runs[1].folder, home)
    shutil.copytree(bad_runs[0].folder, home / "baselines" / "zero-shot")
    write_folder(home, {}, [Record(home / "baselines" / "zero-shot"), Record(home)])
    CliRunner().invoke(app, ["report", str(home)], catch_exceptions=False)
    assert len(read_page(home / "report.html")) == 2


def test_an_unfinished_run_is_refused_with_the_command_that_resumes_it(bad_runs, tmp_path):
    shutil.copytree(bad_runs[1].folder, tmp_path / "r")
    (tmp_path / "r" / "result.json").unlink()
    with pytest.raises(DataError, match=r"is not finished; `fedvlm resume .*r` continues it"):
        read_runs(tmp_path / "r")


def test_runs_of_other_encoders_or_protocols_say_which(bad_runs, rows_like, tmp_path):
    other = fedvlm.run("zero-shot", out=tmp_path / "o", embedded=rows_like(), protocol="own-test")
    head, cells = table_cells([bad_runs[0], other])
    assert head[:2] == ["method", "protocol"]
    assert [row[1] for row in cells] == ["leave-one-domain-out", "own-test"]
    assert "protocol" not in table_cells(bad_runs)[0]


def test_later_commands_keep_the_runs_and_settings_of_earlier_ones(bad_runs, tmp_path):
    home = tmp_path / "images"
    write_folder(home, {"encoder": "a"}, bad_runs[:1])
    write_folder(home, {"encoder": "b"}, with_earlier_runs(home, bad_runs[1:2]))
    write_folder(home, {"encoder": "b"}, with_earlier_runs(home, bad_runs[1:2]))
    assert listed_runs(home) == [bad_runs[1].folder, bad_runs[0].folder]
    assert sorted(path.name for path in home.glob("*.toml")) == ["images-1.toml", "images.toml"]
    assert 'encoder = "a"' in (home / "images-1.toml").read_text()
