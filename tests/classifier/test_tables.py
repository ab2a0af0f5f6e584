"""Whoever has embeddings and no encoder asks a classifier with a table of them."""

import csv

import numpy as np
import pytest

import fedvlm

NAMES = np.array(["glioma", "méningiome"])


def table(path, count, seed, labelled=True):
    y = np.arange(count) % 2
    x = np.eye(4)[y] + np.random.default_rng(seed).normal(0, 0.2, (count, 4))
    head = ["e0", "e1", "e2", "e3", "path", *(["label", "client"] if labelled else [])]
    lines = [
        [*row, f"scan-{i}.png", *([NAMES[k], f"site-{i // 2 % 2}"] if labelled else [])]
        for i, (row, k) in enumerate(zip(x.tolist(), y, strict=True))
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *lines])
    return path, x, NAMES[y].tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("api")
    rows, _, _ = table(place / "rows.csv", 80, 0)
    words = {"clients": {"partition": "own"}, "protocol": "own-test", "out": place / "run"}
    result = fedvlm.run("alone", encoder=f"store:{rows}", **words)
    result.personalised("site-0").save_pretrained(place / "classifier")
    return place


def test_a_table_is_answered_row_by_row_as_python_does(saved, tmp_path, call):
    new, x, names = table(tmp_path / "new.csv", 10, 1, labelled=False)
    done = call("predict", saved / "classifier", new)
    lines = list(csv.DictReader(done.stdout.splitlines()))
    classifier = fedvlm.Personalised.from_pretrained(saved / "classifier")
    assert [line["class"] for line in lines] == classifier.predict(x) == names
    assert [line["file"] for line in lines] == [f"scan-{i}.png" for i in range(10)]
    assert "new.csv are assumed to be of store " in done.stderr


def test_a_row_without_a_direction_is_passed_over_and_named(saved, tmp_path, call):
    np.savez(tmp_path / "new.npz", x=np.array([[1.0, 0, 0, 0], [0, 0, 0, 0]]))
    done = call("predict", saved / "classifier", tmp_path / "new.npz")
    assert done.exit_code == 1
    assert len(done.stdout.splitlines()) == 2
    assert f"skipped {tmp_path / 'new.npz'}[1]: its row of" in done.stderr


def test_a_classifier_of_a_store_sees_no_images(saved, folder):
    from fedvlm.classifier.predict import predict
    from fedvlm.errors import EncoderError

    with pytest.raises(EncoderError, match="ask with a table of embeddings"):
        predict(saved / "classifier", [folder])


def test_the_card_of_a_store_names_a_table(saved, tmp_path, call):
    call("export", saved / "run", tmp_path / "made", "--client", "site-1")
    assert "fedvlm predict made TABLE" in (tmp_path / "made" / "README.md").read_text()


def test_partition_counts_the_rows_of_a_store(saved, call):
    place = f"store:{saved / 'rows.csv'}"
    lines = call("partition", place, "--set", "clients.partition=own").stdout.splitlines()
    assert [line.split() for line in lines[2:]] == [["site-0", "20", "20", "40"], ["site-1", "20", "20", "40"]]


def test_embeddings_of_a_data_frame_are_predicted_and_texts_are_refused(saved):
    pandas = pytest.importorskip("pandas")
    classifier = fedvlm.Personalised.from_pretrained(saved / "classifier")
    x = np.random.default_rng(0).normal(size=(4, classifier.frozen.dim)).astype(np.float32)
    assert classifier.predict(pandas.DataFrame(x)) == classifier.predict(x)
    with pytest.raises(fedvlm.errors.DataError, match="not numeric"):
        classifier.predict(pandas.DataFrame({"a": ["x", "y"]}))
