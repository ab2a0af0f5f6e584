"""Pictures of several runs: what they draw, and what they refuse."""

import shutil
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedvlm
from fedvlm import cli
from fedvlm.data.clients import SUPERCLASSES
from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.report import charts
from fedvlm.report.charts import PLOT_KINDS, PlotOptions
from fedvlm.report.columns import column_value
from fedvlm.report.explain import prompt_map
from fedvlm.report.plots import draw_runs, figure_of, run_charts
from fedvlm.report.runs import identities_of, run_names

PLAIN = ("rounds", "sweep", "bars", "reliability", "roc", "decision", "partition", "kite")


@pytest.fixture(scope="module")
def runs(rows_like, tmp_path_factory):
    folder, rows = tmp_path_factory.mktemp("plots"), rows_like()
    return [
        fedvlm.run(
            {"name": "fedot", "rounds": 3, "blocks": blocks, "lr": 0.05},
            embedded=rows,
            out=folder / f"{blocks}",
            seeds=[0, 1],
        )
        for blocks in (1, 2, 8)
    ]


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """Runs of two methods on a few of the embedded images, and one of the images."""
    root = tmp_path_factory.mktemp("prompted")
    names = ("bee", "beetle", "shark", "trout")  # of two superclasses
    with ZipFile(Path(fedvlm.__file__).parent / "data" / "demo" / "emoji.zip") as box:
        files = [name for name in box.namelist() if name.endswith(".png")]
        for place, file in enumerate(files[:80]):
            path = root / "data" / names[place % 4] / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(box.read(file))
    made = [
        fedvlm.run(
            {"name": method, "rounds": 1, "local_epochs": 1, "n_ctx": 2},
            data=f"folder:{root / 'data'}",
            source={"layout": "class"},
            encoder="demo",
            protocol="own-test",
            clients={"partition": "coarse", "count": 4},
            out=root / method,
        )
        for method in ("coop", "promptfl")
    ]
    return made, sorted((root / "data" / "bee").iterdir())[0]


def draw(kind, results, options):
    return figure_of(run_charts(kind, results, options))


@pytest.mark.parametrize("kind", PLAIN)
def test_several_runs_are_drawn_to_png_and_svg(kind, runs, tmp_path):
    with Image.open(draw_runs(kind, runs, tmp_path / "a.png")) as image:
        assert (np.asarray(image.convert("L")) < 250).sum() > 1000
    first, two = (draw_runs(kind, runs, tmp_path / f"{name}.svg").read_text() for name in "bc")
    assert "<svg" in first
    assert len(first) == len(two)


def test_lines_over_the_rounds_end_as_the_record_does(runs):
    panel = draw("rounds", runs[:1], PlotOptions()).axes[0]
    (line,) = panel.get_lines()
    lines = [line for line in runs[0].lines() if line["round"] == 2]
    accuracies = [
        np.mean([client["test_hits"] / client["test_rows"] for client in line["clients"].values()]) for line in lines
    ]
    assert len(lines) == 6  # three trainings of two seeds
    assert line.get_ydata()[-2] == pytest.approx(100 * np.mean(accuracies))
    assert line.get_ydata()[-1] == pytest.approx(100 * column_value(runs[0], "C")[0])  # what the table reports


@pytest.mark.parametrize("column", ["cosine", "loss", "difference", "seconds"])
def test_lines_of_what_is_no_share_are_not_in_per_cent(runs, column):
    panel = draw("rounds", runs[:1], PlotOptions((column,))).axes[0]
    (line,) = panel.get_lines()
    values = [line[column] for line in runs[0].lines() if line["round"] == 2]
    assert line.get_ydata()[-1] == pytest.approx(np.mean(values))
    assert panel.get_ylabel() == column


def test_lines_over_a_setting_go_through_the_columns_of_the_tables(runs):
    figure = draw("sweep", runs[::-1], PlotOptions(("P", "dof")))
    for panel, scale in zip(figure.axes, (100, 1), strict=True):
        (line,) = panel.get_lines()
        assert line.get_xdata().tolist() == [1, 2, 8]
        means = [column_value(run, panel.get_title())[0] for run in runs]
        np.testing.assert_allclose(line.get_ydata(), [scale * run for run in means])
    assert figure.axes[0].get_xlabel() == "blocks"


def test_bars_are_as_high_as_the_means(runs):
    panel = draw("bars", runs, PlotOptions(("G",))).axes[0]
    heights = [bar.get_height() for bar in panel.patches]
    assert heights == pytest.approx([100 * column_value(run, "G")[0] for run in runs])


def test_the_clients_that_train_are_along_the_axis_of_a_cross_device_run(rows, tmp_path):
    run = fedvlm.run(
        {"name": "fedavg", "rounds": 1},
        embedded=rows,
        out=tmp_path / "a",
        protocol="cross-device",
        counts=[1, 2],
        unseen=1,
    )
    (line,) = draw("sweep", [run], PlotOptions()).axes[0].get_lines()
    assert line.get_xdata().tolist() == [1, 2]
    assert line.get_ydata()[1] == pytest.approx(100 * run.tables[0]["unseen, n=2"])


def test_every_client_has_a_panel_and_every_run_a_curve(runs):
    figure = draw("reliability", runs, PlotOptions())
    assert [panel.get_title() for panel in figure.axes] == ["photo", "sketch", "art, unseen"]
    for panel in figure.axes:
        assert len(panel.get_legend_handles_labels()[1]) == len(runs)
    curves = draw("roc", runs, PlotOptions()).axes[0].get_lines()
    for panel in curves[: len(runs)]:
        assert (np.diff(panel.get_xdata()) >= 0).all()
        assert (np.diff(panel.get_ydata()) >= 0).all()


def test_titles_say_in_what_runs_of_a_method_differ(runs, prompted):
    identities = identities_of(runs)
    assert run_names(identities) == ["fedot (blocks=1)", "fedot (blocks=2)", "fedot (blocks=8)"]
    assert run_names(identities, ["method.blocks"]) == ["fedot"] * 3
    assert run_names([identities[0], *identities_of(prompted[0])]) == ["fedot", "coop", "promptfl"]


def test_local_prompts_are_coloured_by_superclass(prompted, tmp_path):
    (coop, _), _ = prompted
    groups = prompt_map(coop).groups
    assert groups == ("fish", "fish", "insects", "insects")
    assert set(groups) <= set(SUPERCLASSES)
    assert draw_runs("tsne", [coop], tmp_path / "a.png").exists()


def test_prompts_of_other_methods_look_at_an_image_too(prompted, tmp_path):
    prompted_runs, image = prompted
    path = draw_runs("heat", prompted_runs, tmp_path / "a.png", image=image, class_name="bee")
    with Image.open(path) as drawn:
        assert drawn.width > drawn.height
    with pytest.raises(SettingsError, match="no class is called 'cat'"):
        draw_runs("heat", prompted_runs, tmp_path / "b.png", image=image, class_name="cat")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pie", {}, "no kind of plot is called 'pie'"),
        ("heat", {}, "give --image FILE"),
        ("heat", {"image": Path("a.png"), "over": "x"}, "--x-axis has no use"),
        ("roc", {"columns": ["C"]}, "--columns has no use"),
        ("rounds", {"training": "art"}, "--training has no use"),
        ("rounds", {"columns": ["Q"]}, "no curve over the rounds is called 'Q'"),
        ("bars", {"columns": ["Q"]}, "no column is called 'Q'"),
        ("sweep", {"over": "method.block"}, "no run has both"),
        ("decision", {"training": "arts"}, "did you mean 'art'"),
        ("tsne", {}, "a t-SNE map is of one run"),
    ],
)
def test_what_cannot_be_drawn_is_refused(kind, options, message, runs, tmp_path):
    with pytest.raises(FedVLMError, match=message):
        draw_runs(kind, runs, tmp_path / "a.png", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_over_several_settings_asks_which(runs, rows, tmp_path):
    other_run = fedvlm.run({"name": "fedot", "rounds": 1, "blocks": 4}, embedded=rows, out=tmp_path / "a")
    with pytest.raises(SettingsError, match="differ in method.blocks.* name one by --x-axis"):
        draw_runs("sweep", [*runs, other_run], tmp_path / "a.png")
    with pytest.raises(SettingsError, match="differ in no setting"):
        draw_runs("sweep", runs[:1], tmp_path / "a.png")
    with pytest.raises(SettingsError, match=r"end it in \.png, \.svg or \.pdf"):
        draw_runs("bars", runs, tmp_path / "a.gif")


def test_the_command_draws_beside_the_runs_and_lists_every_kind(runs):
    places = [str(run.folder) for run in runs]
    output = CliRunner().invoke(cli.app, ["plot", *places, "--kind", "bars"], catch_exceptions=False)
    assert output.exit_code == 0, output.output
    assert (runs[0].folder.parent / "bars.png").exists()
    text = " ".join(CliRunner().invoke(cli.app, ["plot", "--help"], terminal_width=200).output.split())
    assert all(kind in text for kind in PLOT_KINDS)
    assert CliRunner().invoke(cli.app, ["plot", *places]).exit_code != 0


def test_an_experiments_folder_with_baselines_is_drawn_as_a_sweep(runs, rows_like, tmp_path):
    home = tmp_path / "sw"
    for run in runs:
        shutil.copytree(run.folder, home / run.folder.name)
    fedvlm.run("zero-shot", embedded=rows_like(), out=home / "baselines" / "zero-shot", seeds=[0, 1])
    output = CliRunner().invoke(cli.app, ["plot", str(home), "--kind", "sweep"], catch_exceptions=False)
    assert output.exit_code == 0, output.output
    assert (home / "sweep.png").exists()


def test_words_along_an_axis_are_dots_and_not_joined(runs):
    chart = charts._line_chart("C", "head", {"fedot": [("text", 0.5, 0.1), ("random", 0.4, 0.0)]})
    assert chart.kind == "dots" and chart.categories == ["random", "text"]
    (line,) = figure_of([chart]).axes[0].get_lines()[:1]
    assert line.get_linestyle() == "None" and line.get_marker() == "o"
