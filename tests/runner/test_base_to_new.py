"""Base-to-new classes: who trains on what, and which methods know a class by its name alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvlm import seeds
from fedvlm.core import make, methods
from fedvlm.data.table import EmbeddedTable
from fedvlm.encoders import open_encoder
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.protocols import make_protocol as protocol
from fedvlm.evaluate.protocols.base_to_new import harmonic
from fedvlm.runner.load import load
from fedvlm.runner.prepare import check_new_classes, check_samples, frozen_of, prepare, split_classes
from fedvlm.runner.run import execute
from fedvlm.runner.settings import build
from tests.helpers.plain_rows import make_rows

# Of all methods; what is not here has a place for each class, or keeps labels.
OPEN = {
    *("zero-shot", "coop", "cocoop", "promptfl", "promptfl-ft", "promptfl-fedprox"),
    *("promptfl-fedper", "promptfl-fedamp", "promptfolio", "dp-fpl", "fedotp", "fedot-prompt"),
    *("fedlpa", "fedbens", "fedclip", "faa-clip", "fedavg-tower", "fedprox-tower"),
    *("moon-tower", "lora", "fedpgp", "fedtpg", "pfedmoap"),
}


def settings(method="zero-shot", **extra):
    return build({"method": method, "protocol": "base-to-new", **extra})


@pytest.fixture(scope="module")
def rows():
    """Some of the emoji, with a text tower."""
    return load(build({"method": "promptfl", "smoke": True}), lambda *_: None)[0]


def embedded(count, classes):
    """Rows of two domains that stand for no images."""
    table = make_rows(count, classes=classes, domains=2)
    columns = {key: getattr(table, key) for key in ("labels", "domains", "clients", "splits")}
    x = torch.nn.functional.normalize(torch.randn(count, 8, generator=seeds.generator("rows")))
    optional = {"content": table.content, "scale": 100.0, "text": x[:classes], "patches": None}
    origin = {"encoder": "none", "fingerprint": "none"}
    return EmbeddedTable("rows", table.classes, x, **columns, **optional, **origin)


@pytest.mark.parametrize("by", ["domain", "dirichlet", "pathological"])
def test_no_row_of_a_new_class_is_trained_on_and_no_base_row_is_tested_as_new(rows, by):
    clients = {"partition": by, "count": 3, "min_samples": 1}
    ready = prepare(settings(clients=clients), rows, 0)
    assert ready.frozen.classes + ready.others["new"].frozen.classes == rows.classes
    assert ready.rows.x is rows.x  # no second copy of the embeddings
    base = np.concatenate([np.concatenate([m.train, m.validation, m.test]) for m in ready.partition.clients.values()])
    new = np.concatenate([m.test for m in ready.others["new"].members.values()])
    assert rows.labels[base].max() < 8 <= rows.labels[new].min()
    assert set(rows.labels[base]) | set(rows.labels[new]) == set(range(16))
    assert not {rows.content[i] for i in base} & {rows.content[i] for i in new}
    assert list(ready.others["new"].members) == list(ready.partition.clients)
    assert (rows.classes[8 + ready.others["new"].rows.labels[new[0]]]) == rows.classes[rows.labels[new[0]]]


def test_an_image_of_both_halves_is_not_tested_as_new():
    table = embedded(400, classes=8)
    twins = [str(i % 200) for i in range(400)]  # every image twice, of any class
    ready = prepare(settings(encoder="store:rows"), replace(table, content=twins), 0)
    base = {twins[i] for i in np.flatnonzero(table.labels < 4)}
    assert not base & {twins[i] for m in ready.others["new"].members.values() for i in m.test}


def test_an_odd_class_is_of_the_base_half():
    base, new = split_classes(embedded(140, classes=7))
    assert (len(base.classes), len(new.classes)) == (4, 3)
    assert ((base.labels >= 0) ^ (new.labels >= 0)).all()


@pytest.mark.parametrize("name", methods())
def test_a_method_is_taken_if_its_classes_come_from_text_alone(rows, name):
    frozen = replace(frozen_of(rows, 0), image_tower=open_encoder("demo").image_tower())
    if name in OPEN:
        check_new_classes(make(name), frozen)
        return
    with pytest.raises(SettingsError, match="has a row per class|stores labels of its samples"):
        check_new_classes(make(name), frozen)


def test_zero_shot_is_measured_among_the_names_of_each_half(rows, tmp_path):
    plain = replace(rows, text_tower=None)
    done = execute(settings(smoke=True), tmp_path / "run", embedded=plain)
    ready = prepare(settings(), plain, 0)
    (table,) = done.tables
    n_correct = {}
    for part, members, words in (
        ("base", ready.partition.clients, plain.text[:8]),
        ("new", ready.others["new"].members, plain.text[8:]),
    ):
        start = 0 if part == "base" else 8
        for id, member in members.items():
            guess = (plain.x[member.test] @ words.T).argmax(1).numpy() + start
            n_correct[f"{part} {id}"] = (guess == plain.labels[member.test]).mean()
            assert table[f"{part} {id}"] == pytest.approx(n_correct[f"{part} {id}"])
    base, new = (
        np.mean([value for key, value in n_correct.items() if key.startswith(part)]) for part in ("base", "new")
    )
    assert table["base"] == pytest.approx(base)
    assert table["new"] == pytest.approx(new)
    assert table["harmonic"] == pytest.approx(2 * base * new / (base + new))
    assert done.manifest["classes"] == list(rows.classes[:8])
    again = execute(settings(smoke=True), tmp_path / "run", embedded=plain)
    assert again.tables == done.tables


def test_a_local_prompt_is_what_new_classes_are_measured_with(rows, tmp_path):
    for number, rate in enumerate((1e-9, 0.5)):
        method = {
            "name": "coop",
            "rounds": 1,
            "local_epochs": 1,
            "ctx_init": "template",
            "lr": rate,
        }
        done = execute(settings(method), tmp_path / str(number), embedded=rows)
        zero = execute(settings(smoke=True), tmp_path / "zero", embedded=rows)
        (trained_table,), (theirs,) = done.tables, zero.tables
        assert (trained_table["new"] == pytest.approx(theirs["new"])) == (number == 0)


def test_bad_input_is_refused_with_the_reason(rows):
    with pytest.raises(SettingsError, match="fedot cannot predict .*'head' has a row per class"):
        check_samples(settings("fedot"), rows)
    with pytest.raises(DataError, match="needs at least 4 classes, got 3"):
        check_samples(settings(), embedded(60, classes=3))
    with pytest.raises(SettingsError, match="measured in one process"):
        settings(engine="flower")
    with pytest.raises(SettingsError, match="global_test = True is for protocol = 'own-test'"):
        settings(global_test=True)


def test_the_harmonic_mean_is_near_the_lower():
    assert harmonic(0.9, 0.1) == pytest.approx(0.18)
    assert harmonic(0.0, 0.5) == 0.0
    assert harmonic(None, 0.5) is None
    rules = protocol("base-to-new")
    (training,) = rules.trainings({"a": ""}, 0)
    table = rules.table({}, {"base": (training, {})}, True)
    assert table["harmonic"] is None
