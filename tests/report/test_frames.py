"""Runs as data frames, figures and notebook tables say what their tables say."""

import pytest

import fedvlm
from fedvlm.errors import SettingsError


def test_frame_has_a_row_per_seed_training_and_client_and_gives_the_table(bad_runs):
    frame = bad_runs[1].frame()
    assert len(frame) == 2 * 3 * 3
    unseen = frame[frame.unseen].groupby("seed").accuracy.mean()
    assert unseen.tolist() == pytest.approx([table["G"] for table in bad_runs[1].tables])


def test_compare_gives_a_row_per_run_of_results_directories_and_pages(bad_runs, bad_page):
    frame = fedvlm.compare(*bad_runs)
    assert len(frame) == 3
    mean = sum(table["P"] for table in bad_runs[1].tables) / 2
    assert frame["P"].iloc[1] == pytest.approx(mean)
    assert frame.equals(fedvlm.compare(*(run.folder for run in bad_runs)))
    assert frame.equals(fedvlm.compare(bad_page))
    with pytest.raises(SettingsError, match="no run is named"):
        fedvlm.compare()


@pytest.mark.parametrize("kind", ["reliability", "decision", "rounds"])
def test_figure_is_one_panel_with_lines(bad_runs, kind):
    [panel] = bad_runs[1].figure(kind).axes
    assert panel.lines


def test_figure_does_without_a_client_that_did_not_answer_in_the_end(bad_runs, monkeypatch):
    """As a site of a deployed run that was gone when all were asked to adapt."""
    trainings = bad_runs[1].trainings()
    name = next(iter(trainings))
    lost = trainings[name]["train"][0]
    scores = {id: client_scores for id, client_scores in trainings[name]["scores"].items() if id != lost}
    less = {**trainings, name: {**trainings[name], "scores": scores}}
    monkeypatch.setattr(type(bad_runs[1]), "trainings", lambda self, seed=None: less)
    assert bad_runs[1].figure("reliability", name).axes[0].lines


def test_unknown_figure_is_refused(bad_runs):
    with pytest.raises(SettingsError, match="did you mean 'rounds'"):
        bad_runs[1].figure("round")


def test_notebook_table_escapes_names(bad_runs):
    html = bad_runs[1]._repr_html_()
    assert html.startswith("<table><tr><th>method</th>") and "fedavg" in html
    assert "<script" not in html


def test_a_result_is_opened_by_its_directory_as_text(bad_runs):
    result = fedvlm.Result(str(bad_runs[1].folder))
    assert result.tables == bad_runs[1].tables and "fedavg" in repr(result)
