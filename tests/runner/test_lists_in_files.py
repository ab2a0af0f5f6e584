"""A list for a setting that takes one value is a sweep."""

import pytest

from fedvlm.errors import SettingsError
from fedvlm.runner.experiments import experiment_runs, lists_to_sweep
from fedvlm.runner.settings import build


def test_a_list_is_the_same_as_a_sweep():
    written = {"method": {"name": "fedot", "lr": [0.1, 0.01]}, "fraction": [0.5, 1.0], "seeds": [0, 1]}
    swept = {"method": "fedot", "seeds": [0, 1], "sweep": {"fraction": [0.5, 1.0], "method.lr": [0.1, 0.01]}}
    runs = [[build(run).identity() for run in experiment_runs(values)] for values in (written, swept)]
    assert runs[0] == runs[1] and len(runs[0]) == 4


def test_settings_that_are_lists_stay_lists():
    values = {"method": "fedot", "seeds": [0, 1], "tune": ["lr"], "clients": {"ratios": [0.6, 0.2, 0.2]}}
    assert lists_to_sweep(values) == values
    assert len(experiment_runs(values)) == 1


def test_a_list_of_methods_and_lists_in_their_tables_give_a_run_each():
    runs = experiment_runs({"method": ["zero-shot", "fedot"], "clients": {"shots": [4, 8]}})
    assert [(run["method"]["name"], run["clients"]["shots"]) for run in runs] == [
        ("zero-shot", 4),
        ("zero-shot", 8),
        ("fedot", 4),
        ("fedot", 8),
    ]
    tables = [{"name": "fedot", "blocks": [1, 2]}, {"name": "fedavg"}]
    runs = experiment_runs({"methods": tables})
    assert [run["method"].get("blocks") for run in runs] == [1, 2, None]


def test_a_setting_with_a_list_and_in_the_sweep_is_refused():
    with pytest.raises(SettingsError, match="method.lr has a list of values and is in \\[sweep\\], too"):
        lists_to_sweep({"method": {"name": "fedot", "lr": [0.1, 1]}, "sweep": {"method.lr": [0.2]}})
