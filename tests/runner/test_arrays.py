"""Runs on rows in memory, and classifiers asked with arrays."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.errors import DataError, SettingsError

NAMES = ("cat", "dog", "owl")


def rows(seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    return np.eye(8)[y] + rng.normal(0, 0.3, (count, 8)), y


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_arrays_run_in_a_few_lines_and_leave_no_file(tmp_path: Path) -> None:
    result = fedvlm.run("auto", clients={"a": rows(0), "b": rows(1)}, classes=NAMES)
    classifier = result.personalised("a")
    x, y = rows(2)
    assert classifier.score(x, y) > 0.9
    assert classifier.score(x, [NAMES[i] for i in y]) == classifier.score(torch.tensor(x), torch.tensor(y))
    assert classifier.predict(x[:3]) == list(NAMES)
    chances = classifier.predict_proba(x)
    assert isinstance(chances, np.ndarray) and chances.shape == (60, 3)
    assert np.allclose(chances.sum(1), 1, atol=1e-6)
    assert not list(tmp_path.iterdir())
    folder = result.folder
    assert folder.exists()
    del result
    gc.collect()
    assert not folder.exists()


def test_data_frames_and_series_give_the_same_run(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pairs = {"a": rows(0), "b": rows(1)}
    frames = {
        id: (pandas.DataFrame(x), pandas.Series([NAMES[i] for i in y], dtype="category"))
        for id, (x, y) in pairs.items()
    }
    text = np.eye(8)[:3]
    runs = [
        fedvlm.run("fedavg", clients=clients, classes=NAMES, text=vectors, rounds=2)
        for clients, vectors in ((pairs, text), (frames, pandas.DataFrame(text)))
    ]
    assert runs[0].tables == runs[1].tables
    x, y = frames["a"]
    assert runs[0].personalised("a").score(x, y) == runs[0].personalised("a").score(*rows(0))
    assert runs[0].personalised("a").classes_.tolist() == list(NAMES)


def test_tensors_names_and_numbers_give_the_same_run(tmp_path: Path) -> None:
    pairs = {"a": rows(0), "b": rows(1)}
    named = {id: (torch.tensor(x), [NAMES[i] for i in y]) for id, (x, y) in pairs.items()}
    text = np.eye(8)[:3]
    tables = [
        fedvlm.run("fedavg", clients=clients, classes=NAMES, text=text, rounds=2).tables for clients in (pairs, named)
    ]
    assert tables[0] == tables[1]


def test_a_setting_of_the_method_is_understood_as_keyword(tmp_path: Path) -> None:
    result = fedvlm.run("fedavg", clients={"a": rows(0)}, text=np.eye(8)[:3], rounds=3, lr=0.1)
    recorded_method = result.manifest["identity"]["method"]
    assert (recorded_method["rounds"], recorded_method["lr"], len(result.rounds)) == (3, 0.1, 3)
    with pytest.raises(SettingsError, match="no setting of a run or of fedot .*'round'.*'rounds'"):
        fedvlm.run("fedot", round=3)


def test_a_method_setting_in_the_wrong_table_is_sent_to_its_place() -> None:
    from fedvlm.runner.settings import build

    with pytest.raises(SettingsError, match="--set method.rounds="):
        build({"method": "fedot", "rounds": 3})


def test_reprs_are_short(tmp_path: Path) -> None:
    result = fedvlm.run("alone", clients={"a": rows(0), "b": rows(1)}, classes=NAMES)
    assert repr(result) == "<alone on memory: 2 clients, 3 classes>"
    assert repr(result.personalised("b")) == "<alone of b: 3 classes, memory, 8 dimensions>"


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((np.ones((4, 8)), [0, 1, 2]), "4 embeddings and labels of shape"),
        ((np.zeros((3, 8)), [0, 1, 2]), "row 0 is zero"),
        ((np.ones((3, 8)), [0, 1, 7]), "label 7 is outside the 3 classes"),
        ((np.ones((3, 8)), ["cat", "dog", "emu"]), "'emu' is no class"),
        ((np.ones((3, 5)), [0, 1, 2]), "unequal length"),
        ((np.ones(8), [0]), r"embeddings of shape \(8,\).*takes \(samples, dim\)"),
        ((np.ones((3, 8, 1)), [0, 1, 2]), r"embeddings of shape \(3, 8, 1\)"),
        ((np.ones((3, 8)), [0, 1, 2], np.ones((2, 8)), [0]), r"4 arrays.*\(x, y, unlabelled_x\)"),
        ((np.ones((3, 8)), [0, 1, 2], [0]), r"unlabelled has embeddings of shape \(1,\)"),
        ((np.ones((3, 8)), [0, 1, 2], np.ones((2, 4))), "unequal length"),
        ((np.ones((3, 8)), [0.0, 1.5, 2.0]), "label 1.5"),
        ((np.ones((3, 8)), [0.0, np.nan, 2.0]), "label nan"),
        ((np.ones((3, 8)), ["cat", None, "dog"]), "label None"),
    ],
)
def test_unfit_arrays_are_refused_by_name(pair: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        fedvlm.run("alone", clients={"a": rows(0), "b": pair}, classes=NAMES)
    assert not list(tmp_path.iterdir())


def test_a_dict_as_embedded_is_sent_to_clients() -> None:
    with pytest.raises(DataError, match="clients="):
        fedvlm.run("alone", embedded={"a": rows(0)})


def test_labels_that_a_table_made_floats_are_the_numbers_they_were() -> None:
    pairs = {"a": rows(0), "b": rows(1)}
    floats = {id: (x, y.astype(float)) for id, (x, y) in pairs.items()}
    tables = [fedvlm.run("alone", clients=clients).tables for clients in (pairs, floats)]
    assert tables[0] == tables[1]


def test_no_clients_are_no_rows_and_never_the_demo() -> None:
    with pytest.raises(DataError, match="clients must be a dict of arrays by client name.*got {}"):
        fedvlm.run("alone", clients={})


def test_one_class_is_refused_before_any_training() -> None:
    x, y = rows(0)
    with pytest.raises(DataError, match="only one class, '0'"):
        fedvlm.run("auto", clients={"a": (x[y == 0], y[y == 0])})


def test_rows_in_memory_without_text_are_told_how_to_get_on() -> None:
    with pytest.raises(SettingsError, match=r"give text=.*or set head = 'random'"):
        fedvlm.run("fedavg", clients={"a": rows(0)})
    with pytest.raises(SettingsError) as refusal:
        fedvlm.run("zero-shot", clients={"a": rows(0)})
    assert "head = 'random'" not in str(refusal.value)


def test_whoever_has_a_test_set_sets_no_rows_aside_for_one() -> None:
    pairs = {"a": rows(0), "b": rows(1)}
    result = fedvlm.run("alone", clients=pairs, ratios=[0.75, 0.25, 0])
    assert result.manifest["clients"]["a"] == {
        "train": 45,
        "validation": 10,
        "test": 0,
        "calibration": 5,
    }
    assert result.personalised("a").score(*rows(2)) > 0.9
    with pytest.raises(DataError, match=r'clients=\{"ratios": …\}'):
        fedvlm.run("alone", ratios=[0.75, 0.25, 0])


def test_no_method_is_auto_as_on_the_command_line() -> None:
    result = fedvlm.run(clients={"a": rows(0), "b": rows(1)})
    assert result.manifest["identity"]["method"]["name"] == "auto"


@pytest.mark.parametrize("name", ["data", "encoder"])
def test_data_and_encoder_do_not_go_with_arrays(name):
    x, y = rows(0)
    with pytest.raises(DataError, match=f"{name} = 'demo' does not apply to samples in memory"):
        fedvlm.run("alone", clients={"a": (x, y)}, **{name: "demo"})


def test_a_list_of_pairs_is_answered_with_names_for_the_clients():
    x, y = rows(0)
    with pytest.raises(DataError, match=r'clients must be a dict of arrays by client name, as \{"a": .*got a list'):
        fedvlm.run("alone", clients=[(x, y)])


def test_python_warns_of_the_data_as_the_command_line_does():
    x, y = rows(0)
    few = {"a": (x[:30], y[:30]), "b": (x[30:60], y[30:60])}
    with pytest.warns(fedvlm.DataWarning, match="too few validation samples for model selection"):
        fedvlm.run("alone", clients=few)
