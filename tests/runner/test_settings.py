"""Settings: what a file, a command and Python may write, and how it is refused."""

from dataclasses import dataclass

import pytest

import fedvlm
from fedvlm.errors import SettingsError
from fedvlm.evaluate.protocols import Training, contract, own_test
from fedvlm.runner.experiments import experiment_runs
from fedvlm.runner.settings import build


@pytest.fixture
def first_clients(monkeypatch):
    """A protocol of another package, with a setting that no protocol of fedvlm has."""
    monkeypatch.setattr(contract, "PROTOCOLS", dict(contract.PROTOCOLS))

    @contract.register
    @dataclass(frozen=True)
    class FirstClients(own_test.OwnTest):
        how_many: int = 1
        only: tuple[str, ...] = ()

        name = "first-clients"
        summary = "train on the first clients only"

        def trainings(self, domains, seed):
            return [Training("all", tuple(domains)[: self.how_many], ())]

    return FirstClients


def test_a_protocol_of_another_package_has_settings_of_its_own(first_clients, rows, tmp_path):
    settings = build({"method": "fedavg", "protocol": "first-clients", "how_many": 2, "only": ["a"]})
    assert (settings.rules().how_many, settings.rules().only) == (2, ("a",))
    assert build(settings.identity()) == settings
    run = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "r", protocol="first-clients", how_many=2)
    assert len(run.trainings()["all"]["scores"]) == 2
    assert run.manifest["identity"]["how_many"] == 2
    swept = experiment_runs({"method": "fedavg", "protocol": "first-clients", "sweep": {"how_many": [1, 2]}})
    assert [build(values).rules().how_many for values in swept] == [1, 2]


def test_a_protocols_setting_is_checked_and_refused_beside_another_protocol(first_clients):
    with pytest.raises(SettingsError, match="first-clients.how_many.*'two'"):
        build({"method": "fedavg", "protocol": "first-clients", "how_many": "two"})
    with pytest.raises(SettingsError, match="no setting is called 'how_many'"):
        build({"method": "fedavg", "how_many": 2})


def test_a_list_of_methods_is_a_sweep():
    runs = [build(values) for values in experiment_runs({"method": ["fedot", "fedavg"]})]
    assert [run.method.name for run in runs] == ["fedot", "fedavg"]


@pytest.mark.parametrize("method", [3, {"nam": "fedot"}, [["fedot"]], None, {}])
def test_a_method_without_a_name_is_refused_in_a_sentence(method):
    with pytest.raises(SettingsError, match="method"):
        [build(values) for values in experiment_runs({"method": method})]
