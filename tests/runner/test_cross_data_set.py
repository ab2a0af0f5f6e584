"""Cross-data-set: trained on one data set, tested on it and on others by their own class names."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvlm.data.table import with_test_data
from fedvlm.encoders.store import save_store
from fedvlm.errors import DataError, SettingsError
from fedvlm.record import Record
from fedvlm.report.page.model import build_model
from fedvlm.runner.load import load
from fedvlm.runner.prepare import check_samples, prepare, split_classes
from fedvlm.runner.run import execute
from fedvlm.runner.settings import build

NAMES = ("same", "others")
PROMPTS = {"name": "promptfl", "rounds": 1, "local_epochs": 1, "ctx_init": "template", "lr": 0.3}


def settings(method="zero-shot", **extra):
    return build({"method": method, "protocol": "cross-data-set", "test_data": list(NAMES), "smoke": True, **extra})


@pytest.fixture(scope="module")
def halves():
    """Emoji of eight classes, and emoji of the other eight as a data set of its own."""
    base, new = split_classes(load(build({"method": "promptfl", "smoke": True}), lambda *_: None)[0])
    return [half.select(np.flatnonzero(half.labels >= 0)) for half in (base, new)]


@pytest.fixture(scope="module")
def rows(halves):
    """The first half, with its own test samples and the other half to test on."""
    source, others = halves
    one = {"partition": "iid", "count": 1}
    own_test = prepare(settings(clients=one), source, 0).partition.clients
    (member,) = own_test.values()
    return with_test_data(source, {"same": source.select(member.test), "others": others})


@pytest.mark.parametrize(
    "method", ["zero-shot", PROMPTS, {"name": "fedtpg", "rounds": 1}, {"name": "coop", "rounds": 1}]
)
def test_the_sources_own_test_samples_as_a_target_have_its_numbers(rows, tmp_path, method):
    done = execute(settings(method, clients={"partition": "iid", "count": 1}), tmp_path / "run", embedded=rows)
    (table,) = done.tables
    assert table["on same"] == pytest.approx(table["source"])
    assert table["targets"] == pytest.approx((table["on same"] + table["on others"]) / 2)
    assert 0 < table["on others"] < 1


def test_zero_shot_names_the_targets_own_classes(rows, tmp_path):
    done = execute(settings(), tmp_path / "run", embedded=rows)
    other = rows.test_data["others"]
    guess = (other.x @ other.text.T).argmax(1).numpy()
    assert done.tables[0]["on others"] == pytest.approx((guess == other.labels).mean())


def test_training_reaches_the_target(rows, tmp_path):
    (zero,), (trained,) = (
        execute(settings(method), tmp_path / name, embedded=rows).tables
        for name, method in (("zero", "zero-shot"), ("trained", PROMPTS))
    )
    assert trained["on others"] != zero["on others"]
    (sentence,) = build_model([Record(tmp_path / "zero"), Record(tmp_path / "trained")])["sentences"]
    assert sentence.startswith("On the test samples of the data that were trained on, ")


def test_an_image_that_is_trained_on_is_not_tested_on(halves):
    source, _ = halves
    ready = prepare(settings(test_data=["copy"]), with_test_data(source, {"copy": source}), 0)
    members = ready.partition.clients.values()
    used = {source.content[i] for m in members for i in (*m.train, *m.validation, *m.calibration)}
    for member in ready.others["copy"].members.values():
        assert len(member.test)
        assert not used & {source.content[i] for i in member.test}


def test_a_target_with_a_test_split_is_tested_on_it_alone(halves):
    source, others = halves
    splits = np.where(np.arange(len(others.labels)) % 3 == 0, "test", "train")
    ready = prepare(
        settings(test_data=["others"]), with_test_data(source, {"others": replace(others, splits=splits)}), 0
    )
    for member in ready.others["others"].members.values():
        assert set(member.test % 3) == {0}


def test_stores_are_named_as_targets(halves, tmp_path):
    source, others = halves
    for name, half in (("source", source), ("others", others)):
        save_store(tmp_path / f"{name}.safetensors", replace(half, text_tower=None, patches=None))
    target = f"store:{tmp_path / 'others.safetensors'}"
    values = {
        "protocol": "cross-data-set",
        "encoder": f"store:{tmp_path / 'source.safetensors'}",
        "method": "zero-shot",
    }
    done = execute(build({**values, "test_data": target}), tmp_path / "run")
    guess = (others.x @ others.text.T).argmax(1).numpy()
    assert done.tables[0][f"on {target}"] == pytest.approx((guess == others.labels).mean())
    with pytest.raises(SettingsError, match="'digits' cannot be embedded, because the training data are store:"):
        execute(build({**values, "test_data": "digits"}), tmp_path / "refused")


def test_what_cannot_be_tested_is_refused_with_the_reason(rows):
    with pytest.raises(
        SettingsError, match="'cross-data-set' tests .* fedot cannot predict .*'head' has a row per class"
    ):
        check_samples(settings("fedot"), rows)
    with pytest.raises(SettingsError, match="which auto cannot predict"):
        check_samples(settings("auto"), rows)
    with pytest.raises(SettingsError, match="'cross-data-set' is measured in one process"):
        settings(engine="flower")
    with pytest.raises(SettingsError, match=r"test_data = \[\]; name one or more"):
        settings(test_data=[]).rules().trainings({"a": ""}, 0)
    with pytest.raises(SettingsError, match="test_data = 'missing' is not among the samples in memory"):
        check_samples(settings(test_data=["missing"]), rows)
    other = rows.test_data["others"]
    small = replace(other, x=torch.nn.functional.normalize(other.x[:, :8]))
    with pytest.raises(DataError, match="others has dimension, logit scale and text .8,"):
        check_samples(settings(test_data=["others"]), with_test_data(rows, {"others": small}))
    with pytest.raises(SettingsError, match="promptfl needs text tower"):
        check_samples(
            settings("promptfl", test_data=["others"]),
            with_test_data(rows, {"others": replace(other, text_tower=None)}),
        )
