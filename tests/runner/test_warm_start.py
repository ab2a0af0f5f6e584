"""A warm start: one exchange more in the record, and a head that is better from the first round."""

import pytest
import torch

import fedvlm
from fedvlm.errors import SettingsError
from fedvlm.maths import calibration, gaussian_classes
from fedvlm.report.tables import compare_table
from fedvlm.result import Result
from fedvlm.runner.settings import build
from tests.helpers.running import execute

TOFA = {"name": "tofa", "text": False}


def go(tmp_path, rows, name="run", **settings):
    run_settings = {"method": {"name": "fedot", "rounds": 2, "tau": 20.0}, "allow_small": True, **settings}
    return execute(build(run_settings), tmp_path / name, embedded=rows)


def test_the_head_starts_at_the_one_shot_classifier(tmp_path, rows):
    warm = go(tmp_path, rows, warm_start=TOFA)
    cold = go(tmp_path, rows, "cold")
    first = [[line["accuracy"] for line in run.rounds if line["round"] == 0] for run in (warm, cold)]
    assert min(a - b for a, b in zip(*first, strict=True)) > 0


def test_the_record_counts_the_warm_start_as_a_round_below_zero(tmp_path, rows):
    warm, cold = go(tmp_path, rows, warm_start="tofa"), go(tmp_path, rows, "cold")
    lines = [line for line in warm.rounds if line["training"] == "0-art"]
    assert [line["round"] for line in lines] == [-1, 0, 1]
    assert lines[0]["warm start"] == "tofa"
    assert warm.traffic[0] == cold.traffic[0] + 1
    assert warm.traffic[1] > cold.traffic[1]
    table = compare_table([warm, cold], traffic=True)
    assert "warm start by tofa" in table
    assert "kB per client" in table.splitlines()[0]


def test_a_stopped_run_starts_warm_only_once(tmp_path, rows):
    """The second time the first training is done and the others start again."""
    warm = go(tmp_path, rows, warm_start="tofa")
    expected_lines = [{k: v for k, v in line.items() if k != "seconds"} for line in warm.rounds]
    folder = tmp_path / "run"
    (folder / "result.json").unlink()
    for path in (folder / "trainings").glob("0-photo*"):
        path.unlink()
    again = go(tmp_path, rows, warm_start="tofa")
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in again.rounds]
    key = lambda line: (line["training"], line["round"])  # noqa: E731
    assert sorted(lines, key=key) == sorted(expected_lines, key=key)


def test_the_rule_on_small_classes_holds_for_a_warm_start(tmp_path, rows):
    settings = build({"method": "fedot", "warm_start": "tofa"})
    assert settings.warm_start.min_class_samples == 16
    assert build({"method": "fedot", "warm_start": "tofa", "allow_small": True}).identity()["allow_small"]
    with pytest.raises(SettingsError, match="allow_small"):
        build({"method": "fedot", "warm_start": {"name": "tofa", "min_class_samples": 1}})


@pytest.mark.parametrize(
    ("method", "first", "message"),
    [("tofa", "tofa", "shares no head"), ("fedot", "fedavg", "has no head to start from")],
)
def test_who_gives_or_takes_no_head_is_refused(tmp_path, rows, method, first, message):
    with pytest.raises(SettingsError, match=message):
        fedvlm.run(method, embedded=rows, out=tmp_path / "run", warm_start=first)


def test_settings_without_a_warm_start_are_what_they_were():
    assert build({"method": "fedot"}).identity()["warm_start"] is None


def test_a_bias_is_lost_in_rows_that_share_a_mean():
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 4
    centres = torch.randn(4, 32, generator=draw)
    x = 6 + centres[y] + 0.5 * torch.randn(200, 32, generator=draw)
    x = torch.nn.functional.normalize(x, dim=1)
    has_class = gaussian_classes.moments_from_sums(*gaussian_classes.class_sums(x, y, 5))  # the last class is nobody's
    rule = gaussian_classes.fit_discriminant(has_class, gaussian_classes.ridge(has_class, 1.0))
    head = calibration.fold_bias(rule.weight, rule.bias, has_class.means, has_class.counts > 0)
    with_bias, without = rule.logits(x.double())[:, :4], (x.double() @ head.mT)[:, :4]
    assert (with_bias.argmax(1) == without.argmax(1)).double().mean() > 0.98
    sure = without.softmax(1).amax(1).mean()
    assert 0.5 < sure < 1
    assert (head[4] == 0).all()


def test_traffic_of_a_run_that_sends_nothing_is_nothing(tmp_path, rows):
    fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "run")
    assert Result(tmp_path / "run").traffic == (0, 0.0)


def test_traffic_is_the_mean_over_clients_of_all_that_moves(tmp_path, rows):
    fedvlm.run({"name": "fedavg", "rounds": 3}, embedded=rows, out=tmp_path / "run")
    head = 4 * 4 * 16  # classes · dim · bytes
    assert Result(tmp_path / "run").traffic == (3, 3 * 2 * head)
