"""What only a simulation can do is refused before any site is asked."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fedvlm.deploy.server.run import check_deployable
from fedvlm.errors import SettingsError
from fedvlm.runner.settings import build


def test_pooled_rows_are_refused_between_machines():
    kit = SimpleNamespace(rehearsal=True, folder=Path())
    check_deployable(kit, build({"method": "alone"}))
    with pytest.raises(SettingsError, match="pooled is not federated"):
        check_deployable(kit, build({"method": "pooled"}))


def test_base_to_new_classes_are_refused_between_machines():
    kit = SimpleNamespace(rehearsal=True, folder=Path())
    with pytest.raises(SettingsError, match="'base-to-new' is for simulations"):
        check_deployable(kit, build({"method": "promptfl", "protocol": "base-to-new"}))


def test_a_server_does_not_choose_what_a_site_computes_on():
    kit = SimpleNamespace(rehearsal=True, folder=Path())
    with pytest.raises(SettingsError, match="'auto' is for simulations"):
        check_deployable(kit, build({"method": "fedavg", "device": "auto"}))
