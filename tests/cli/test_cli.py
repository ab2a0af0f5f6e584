"""What a person sees: tables, lists, and errors with exit code 2."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import fedvlm
from fedvlm import cli
from fedvlm.encoders.store import open_store, save_store
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

QUICK = ["--set", "method.rounds=2", "--set", "clients.partition=domain"]


def call(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "fedvlm", *map(str, words)],
        capture_output=True,
        text=True,
        **options,
    )


@pytest.fixture
def store(rows, tmp_path):
    return f"store:{save_store(tmp_path / 'rows.safetensors', rows)}"


@pytest.fixture
def ok(capsys):
    """Runs a command in this process and returns what it printed."""

    def invoke(*words):
        done = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout  # on stderr a slow machine may be told how far a run is

    return invoke


def test_help_does_not_wait_for_torch():
    code = "import sys, fedvlm.cli; sys.exit('torch' in sys.modules or 'rich.progress' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert "Adapt a frozen vision-language model" in call("--help").stdout


def test_run_prints_a_table_and_where_the_record_is(ok, store, tmp_path):
    out = ok("run", "--method", "fedot", "--encoder", store, "--output", tmp_path / "r", *QUICK)
    assert out.splitlines()[0].split() == ["method", "G", "P", "C", "seeds"]
    assert f"records: {tmp_path / 'r'}" in out
    assert out.splitlines()[-1] == f"report: {tmp_path / 'r' / 'report.html'}"
    steps = [line.split()[1:] for line in out.splitlines() if line.startswith("  fedvlm ")]
    assert len(steps) == 3
    for words in steps:
        ok(*words)


def test_no_report_leaves_the_page_out(ok, store, tmp_path):
    words = ("run", "--method", "zero-shot", "--encoder", store, "--output", tmp_path / "r")
    assert "report:" not in ok(*words, "--no-report")
    assert not (tmp_path / "r" / "report.html").exists()


def test_seeds_of_a_run_are_options(ok, store, tmp_path):
    words = ("run", "--method", "zero-shot", "--encoder", store, "--output", tmp_path / "r", "--no-baselines")
    ok(*words, "--no-report", "--seed", 3, "--seed", 5)
    assert json.loads((tmp_path / "r" / "manifest.json").read_text())["identity"]["seeds"] == [3, 5]


def test_source_of_a_run_is_an_option(tmp_path):
    done = CliRunner().invoke(cli.app, ["run", "--data", str(tmp_path), "--source", "layot=class"])
    assert "layot" in str(done.exception)


def test_quiet_hides_progress(ok, store, tmp_path, monkeypatch):
    monkeypatch.setattr("fedvlm.cli.progress.QUIET_SECONDS", -1.0)
    words = ["run", "--method", "fedavg", "--encoder", store, "--no-report", "--no-baselines", *map(str, QUICK)]
    shown, hidden = (
        CliRunner().invoke(cli.app, [*words, "--output", str(tmp_path / name), *quiet]).stderr
        for name, quiet in (("a", ()), ("b", ("--quiet",)))
    )
    assert "elapsed" in shown and "elapsed" not in hidden


def test_a_toml_file_with_several_methods_is_one_table(ok, store, tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(
        f'encoder = "{store}"\n[[methods]]\nname = "zero-shot"\n'
        '[[methods]]\nname = "fedavg"\nrounds = 2\n[paper.theirs]\nG = 12.5\n'
    )
    out = ok("run", path, "--output", tmp_path / "r")
    assert "published: theirs  12.50      -      -" in out
    folders = [tmp_path / "r" / "0-zero-shot", tmp_path / "r" / "1-fedavg"]
    assert ok("compare", *folders, "--format", "csv").startswith("method,data,seed,")
    assert "G art" in ok("compare", *folders, "--all")
    assert ok("compare", *folders, "--format", "markdown").startswith("| method")
    assert r"\begin{tabular}" in ok("compare", *folders, "--format", "latex")


def test_resume_of_a_finished_run_prints_its_table(ok, store, tmp_path):
    words = ("run", "--method", "fedavg", "--encoder", store, "--output", tmp_path / "r", *QUICK)
    table = ok(*words, "--no-baselines").split("records:")[0]
    assert ok("resume", tmp_path / "r") == table


@pytest.mark.parametrize("kind", ["methods", "encoders", "datasets", "experiments"])
def test_lists_are_for_people_and_programs(ok, kind):
    rows = json.loads(ok("list", kind, "--json"))
    names = [next(iter(row.values())) for row in rows]
    text = ok("list", kind)
    assert names
    assert all(name in text for name in names)


def test_partition_counts_rows_and_draws_them(ok, tmp_path):
    image = tmp_path / "p.png"
    out = ok(
        "partition",
        "demo",
        "--set",
        "clients.partition=dirichlet",
        "--set",
        "clients.count=5",
        "--output",
        image,
    )
    assert len([line for line in out.splitlines() if line[:1].isdigit() or "client" in line]) >= 5
    assert image.read_bytes()[:4] == b"\x89PNG"


def test_embed_fills_the_cache_once_and_cache_commands_see_it(ok, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    assert "is empty" in ok("cache", "ls")
    first = ok("embed", "demo")
    assert ": 0 computed now" not in first
    assert ": 0 computed now" in ok("embed", "demo")
    [entry] = json.loads(ok("cache", "ls", "--json"))
    assert entry["encoder"] == "demo"
    assert "all embeddings are intact" in ok("cache", "verify")
    assert "removed" in ok("cache", "rm", entry["fingerprint"][:8])
    assert "is empty" in ok("cache", "ls")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "nothing to run; name a TOML file, or --method"),
        (["run", "--method", "fedto"], "did you mean 'fedot'"),
        (["run", "--method", "fedot", "--set", "method.bloks=2"], "did you mean 'blocks'"),
        (["run", "--method", "fedot", "--set", "nonsense"], "is not of the form a.b=value"),
        (["run", "--method", "fedot", "--set", "protocl=1"], "did you mean 'protocol'"),
        (["run", "--method", "fedot", "--encoder", "clip"], "no encoder is called 'clip'"),
        (["run", "--method", "fedot", "--encoder", "store:nowhere.npz"], "nowhere.npz"),
        (["run", "--method", "fedot", "--encoder", "hf:no/such/folder"], "no/such/folder"),
        (["run", "--method", "fedot", "--data", "pasc"], "did you mean 'pacs'"),
        (["run", "nothing.toml"], "there is no settings file nothing.toml"),
        (["run", "demmo"], "no experiment is called 'demmo'; did you mean 'demo'"),
        (["list", "method"], "did you mean 'methods'"),
        (["resume", "nowhere"], "is nowhere a run directory?"),
        (["compare", "nowhere"], "is nowhere a run directory?"),
        (["embed", "no/such/folder"], "no/such/folder"),
        (["cache", "rm", "abc"], "abc"),
    ],
)
def test_bad_input_is_said_in_a_line_with_exit_code_2(refused, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = refused(*words)
    assert message in text
    assert "Traceback" not in text
    assert not [path for path in tmp_path.rglob("*") if path.name in ("manifest.json", "result.json")]


def test_an_option_a_store_does_not_have_is_refused(refused, store):
    text = refused("run", "--method", "fedot", "--encoder", store, "--set", "source.root=here")
    assert "no option of store:FILE_OR_DIR is called 'root'" in text


def test_a_toml_typo_is_said_with_its_place(refused, tmp_path):
    (tmp_path / "bad.toml").write_text('method = "fedot\n')
    assert "is not valid TOML" in refused("run", tmp_path / "bad.toml")
    (tmp_path / "worse.toml").write_text('metod = "fedot"\n')
    assert "did you mean 'method'" in refused("run", tmp_path / "worse.toml")


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def interrupt(*words, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedvlm.deploy.kits.create_kits", interrupt)
    monkeypatch.setattr(sys, "argv", ["fedvlm", "deploy", "init", "x", "--sites", "a"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130
    assert "the same command resumes the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("clientz.by=own", "did you mean 'clients'"),
        ("clients.coutn=3", "did you mean 'count'"),
        ("target=nto", "no domain or client is called 'nto'; did you mean 'noto'"),
        ("rounds=3", "rounds is a setting of the method"),
    ],
)
def test_partition_refuses_what_a_run_would_refuse(refused, word, message):
    assert message in refused("partition", "demo", "--set", word, "--set", "protocol=source-target")


@pytest.mark.parametrize("protocol", ["base-to-new", "own-test"])
def test_partition_shows_the_partition_of_a_run(ok, store, protocol):
    words = ("--set", f"protocol={protocol}", "--set", "clients.partition=domain")
    lines = [line.split() for line in ok("partition", store, *words).splitlines()[2:]]
    settings = build({"method": "zero-shot", "encoder": store, "protocol": protocol, "clients": "domain"})
    samples = open_store(store.removeprefix("store:"))
    prepared = prepare(settings, samples, 0)
    counts = {}
    for id, client in prepared.partition.clients.items():
        indices = [client.train, client.validation, client.test, client.calibration]
        indices += [other.members[id].test for other in prepared.others.values()]
        counts[id] = np.bincount(samples.labels[np.concatenate(indices)], minlength=len(samples.classes)).tolist()
    assert {line[0]: list(map(int, line[1:-1])) for line in lines} == counts


def test_an_unknown_cluster_is_refused_also_if_the_run_is_finished(ok, refused, store, tmp_path):
    words = ("run", "--method", "zero-shot", "--encoder", store, "--no-baselines", "--output", tmp_path / "r")
    ok(*words)
    assert "--on must be dask" in refused(*words, "--on", "slurm")


def test_partition_keeps_a_target_whole_and_takes_the_first_seed_of_a_run(ok):
    words = (
        "partition",
        "demo",
        "--set",
        "clients.partition=dirichlet",
        "--set",
        "clients.count=2",
    )
    target_table = ok(*words, "--set", "protocol=source-target", "--set", "target=noto")
    names = [line.split()[0] for line in target_table.splitlines()[2:]]
    assert names == ["client-0", "client-1", "noto"]
    assert ok(*words, "--set", "seeds=[7]") == ok(*words, "--seed", "7") != ok(*words)


def test_the_version_is_told(ok):
    assert ok("--version").strip() == f"fedvlm {fedvlm.__version__}"


@pytest.mark.parametrize("words", [["deploy", "init"], ["run"], ["audit"]])
def test_help_has_no_escapes(ok, words):
    text = ok(*words, "--help")
    assert "\\" not in text
    assert "[required]" in text or "[default: " in text


def test_a_missing_folder_is_called_missing_with_the_nearest_name(refused, tmp_path):
    (tmp_path / "images").mkdir()
    text = refused("run", "--method", "fedot", "--data", tmp_path / "imagse")
    assert f"there is no file or folder {tmp_path / 'imagse'}; did you mean {tmp_path / 'images'}?" in text


def test_methods_fit_a_screen_and_one_of_them_tells_all():
    lines = CliRunner().invoke(cli.app, ["list", "methods"]).stdout.splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) > 30
    assert "ridge chosen on validation samples." in " ".join(" ".join(lines).split())
    output = CliRunner().invoke(cli.app, ["list", "methods", "fedot"]).stdout
    assert "settings: lr=5e-05" in output and "blocks=1" in output and "needs: image, text" in output


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (("run", "--data", "folder:{}"), "images"),
        (("run", "--data", "manifest:{}"), "rows.csv"),
        (("run", "--encoder", "store:{}"), "rows.npz"),
        (("run", "{}"), "mine.toml"),
        (("compare", "{}"), "a-run"),
        (("predict", "{}", "x.png"), "a-classifier"),
    ],
)
def test_whatever_path_is_missing_the_nearest_name_is_asked_for(refused, tmp_path, words, suggestion):
    place = tmp_path / suggestion
    place.mkdir() if "." not in suggestion else place.write_text("")
    wrong = tmp_path / (f"x{suggestion}")
    text = refused(*(word.format(wrong) for word in words))
    assert f"did you mean {place}?" in text


def test_a_clash_of_runs_tells_all_that_differs(refused, ok, store, tmp_path):
    words = (
        "run",
        "--method",
        "fedavg",
        "--encoder",
        store,
        "--output",
        tmp_path / "r",
        "--no-baselines",
    )
    ok(*words, *QUICK)
    extra_options = ("--set", "method.rounds=3", "--set", "clients.partition=own", "--set", "seeds=[4]")
    lines = refused(*words, *extra_options, "--tune", "lr").splitlines()
    assert "  method.rounds: there 2, here 3" in lines
    assert "  clients.partition: there 'domain', here 'own'" in lines
    assert "  seeds: there [0], here [4]" in lines
    assert "  tune: there [], here ['lr']" in lines
    assert len([line for line in lines if line.startswith("  ")]) == 4
