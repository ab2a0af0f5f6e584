"""What outside packages add: methods, encoders, data, metrics and protocols, by entry points."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedvlm import data, encoders, plugins
from fedvlm.core import make, methods, registry
from fedvlm.deploy.site.policy import Policy
from fedvlm.errors import OutsideWarning, SettingsError
from fedvlm.evaluate import metrics, protocols

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUPS = {
    "methods": ("new_method", "fedbias"),
    "encoders": ("new_encoder", "colours:SIDE"),
    "data": ("new_reader", "npz:PLACE"),
    "datasets": ("new_dataset", "slides"),
    "metrics": ("new_metric", "cohen"),
    "protocols": ("new_protocol", "worst-unseen"),
}


def package(folder, name, points, code=None):
    """An installed package, as importlib.metadata finds it."""
    if code is not None:
        (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"[{group}]\n{point} = {module}\n" for group, point, module in points]
    (info / "entry_points.txt").write_text("".join(lines))


@pytest.fixture
def anew(monkeypatch):
    """A process that has not looked for outside packages yet."""
    monkeypatch.setattr(plugins, "_LOADED", set())


@pytest.fixture
def installed(tmp_path):
    """Every example as a package, and beside them one whose modules all fail."""
    for kind, (module, _) in GROUPS.items():
        group = "fedvlm.data" if kind == "datasets" else f"fedvlm.{kind}"
        package(tmp_path, f"p{kind}", [(group, kind, module)])
    groups = sorted({f"fedvlm.{kind}" for kind in GROUPS} - {"fedvlm.datasets"})
    broken = [(group, "aaa", "abroken") for group in groups]
    package(tmp_path, "abroken", broken, "raise ValueError('line one\\nline two')\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{EXAMPLES}"}


def test_every_example_is_found_by_its_entry_point_beside_a_broken_package(installed):
    program = (
        "import json, sys\nfrom fedvlm.report.lists import LISTS\n"
        "print(json.dumps({kind: [list(row.values())[0] for row in LISTS[kind]()] "
        "for kind in sys.argv[1:]}))"
    )
    done = subprocess.run([sys.executable, "-c", program, *GROUPS], env=installed, capture_output=True, text=True)
    modules = json.loads(done.stdout)
    for kind, (_, name) in GROUPS.items():
        assert name in modules[kind]
    assert done.stderr.count("aaa = abroken") == len(GROUPS) - 1  # data and datasets are one group


def test_the_command_line_names_a_broken_package_in_one_line(installed):
    done = subprocess.run(
        [sys.executable, "-m", "fedvlm", "list", "metrics"],
        env=installed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "cohen" in done.stdout
    [line] = done.stderr.splitlines()
    assert line == (
        "fedvlm: the entry point aaa = abroken of group fedvlm.metrics cannot be loaded and is "
        "left out (ValueError: line one line two); repair or uninstall it"
    )


def test_methods_of_outside_packages_are_found(tmp_path, monkeypatch, anew):
    code = (
        "from dataclasses import dataclass\n"
        "from fedvlm.core import make, register\n"
        "from fedvlm.methods.zeroshot import ZeroShot\n"
        "make('fedavg')  # a package may ask for the list while it is being made\n"
        "@register\n@dataclass(frozen=True)\nclass Outside(ZeroShot):\n    name = 'outside'\n"
    )
    package(tmp_path, "outside", [("fedvlm.methods", "outside", "outside")], code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "METHODS", methods())
    assert "outside" in methods()


def test_a_method_that_register_refuses_is_warned_of_and_ours_stay(tmp_path, monkeypatch, anew):
    code = "from fedvlm.core import register\n@register\nclass Half: pass\n"
    package(tmp_path, "halfoutside", [("fedvlm.methods", "mine", "halfoutside")], code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(OutsideWarning, match="entry point mine = halfoutside .*frozen dataclass"):
        assert "fedavg" in methods()


def test_entry_points_are_looked_for_once_per_process(monkeypatch, anew):
    groups = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: groups.append(group) or [])
    for _ in range(3):
        make("fedavg")
        data.kinds()
        encoders.encoders()
        metrics.metrics()
        protocols.protocols()
    assert sorted(groups) == sorted(set(groups))
    assert len(groups) == 5


def test_a_name_has_one_owner_who_may_come_again():
    def function():
        """A thing."""

    table = {}
    plugins.add_entry(table, "metric", "one", metrics.auc)
    plugins.add_entry(table, "metric", "one", metrics.auc)
    with pytest.raises(SettingsError, match="metric 'one': the name is taken"):
        plugins.add_entry(table, "metric", "one", function)
    for name in ("", "a:b", "two\nlines"):
        with pytest.raises(SettingsError, match="choose another"):
            plugins.add_entry(table, "metric", name, function)
    assert table == {"one": metrics.auc}


def test_what_cannot_be_used_is_refused_with_what_to_add():
    def bare(p, y): ...

    kind = encoders.Kind("mine:X", "mine", ("image", "sound"), "mine", "Mine")
    with pytest.raises(SettingsError, match=r"encoder mine:X: it offers sound; it can offer image"):
        encoders.register(kind)
    with pytest.raises(SettingsError, match="encoder 'demo': the name is taken"):
        encoders.register(encoders.Kind("demo", "mine", ("image",), "mine", "Mine"))
    with pytest.raises(SettingsError, match="data 'mine': its reader has no docstring"):
        data.register("mine", bare)
    with pytest.raises(SettingsError, match="metric 'mine': it has no docstring"):
        metrics.register("mine", bare)
    with pytest.raises(SettingsError, match="'loss': the name is taken by a column of tables"):
        metrics.register("loss", metrics.auc)
    with pytest.raises(SettingsError, match="'kappa': the name is taken by a column of tables"):
        metrics.register("kappa", metrics.auc)  # which is a condition number


def test_an_outside_metric_is_measured_and_stays_at_its_site(monkeypatch):
    def rows(p, y):
        """How many rows there are."""
        return float(len(y))

    monkeypatch.setattr(metrics, "ALL", dict(metrics.ALL))
    metrics.register("row count", rows)
    p, y = torch.eye(3), torch.arange(3)
    scores = metrics.compute_metrics(p, y)
    assert scores["row count"] == 3
    assert scores["accuracy"] == 1
    counts = dict.fromkeys(("validation_rows", "validation_hits", "test_rows", "test_hits"), 3)
    allowed = Policy(methods=("*",)).allowed_scores({**counts, **scores})
    assert "row count" not in allowed
    assert "F1" in allowed


def test_an_outside_metric_that_fails_is_named(monkeypatch):
    def wrong(p, y):
        """Nothing."""
        return 1 / 0

    monkeypatch.setattr(metrics, "ALL", dict(metrics.ALL))
    metrics.register("wrong", wrong)
    with pytest.raises(SettingsError, match=r"the metric 'wrong' .*ZeroDivisionError.*uninstall"):
        metrics.compute_metrics(torch.eye(3), torch.arange(3))
