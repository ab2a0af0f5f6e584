"""Descriptions reach the methods, and every mistake in their file is said."""

import json
from dataclasses import replace

import pytest
import torch

import fedvlm
from fedvlm.classifier.personalised import Personalised
from fedvlm.data.descriptions import read_common_descriptions, texts_by_client
from fedvlm.encoders import open_encoder
from fedvlm.encoders.text import add_descriptions
from fedvlm.errors import SettingsError
from fedvlm.result import Result

CLASSES = ("sea animal", "bird")


@pytest.fixture(scope="module")
def encoder():
    return open_encoder("demo")


@pytest.fixture
def table(rows_like, encoder):
    """Rows of two classes whose dimension is the demo encoder's."""
    rows = rows_like(dim=encoder.dim)
    return replace(rows, classes=CLASSES, labels=rows.labels % 2, text=rows.text[:2])


def written(path, value):
    path.write_text(json.dumps(value))
    return str(path)


GOOD = {"Sea_Animal": ["a fish with fins", "an octopus"], "bird": ["a bird has wings"]}


def test_sentences_are_embedded_once_and_padded_with_nothing(tmp_path, table, encoder):
    encoded = []

    class Counting:
        def __getattr__(self, name):
            return getattr(encoder, name)

        def embed_text(self, sentences):
            encoded.extend(sentences)
            return encoder.embed_text(sentences)

    path = written(tmp_path / "d.json", GOOD)
    first = add_descriptions(table, Counting(), path, "")
    again = add_descriptions(table, Counting(), path, "")
    assert sorted(encoded) == ["a bird has wings", "a fish with fins", "an octopus"]
    assert torch.equal(first.descriptions, again.descriptions)
    assert first.descriptions.shape == (2, 2, encoder.dim)
    assert torch.allclose(first.descriptions[0, 1], encoder.embed_text(["an octopus"])[0], atol=1e-5)
    assert (first.descriptions[1, 1] == 0).all()
    assert first.fingerprint != table.fingerprint


def test_other_sentences_are_other_rows(tmp_path, table, encoder):
    a = add_descriptions(table, encoder, written(tmp_path / "a.json", GOOD), "")
    b = add_descriptions(table, encoder, written(tmp_path / "b.json", {**GOOD, "bird": []}), "")
    assert a.fingerprint != b.fingerprint
    assert (b.descriptions[1] == 0).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"bird": ["a bird"]}, "lacks the class 'sea animal'"),
        ({**GOOD, "brid": []}, "did you mean 'bird'"),
        ({**GOOD, "bird": "a bird"}, "list of non-empty strings"),
        ({**GOOD, "bird": [" "]}, "list of non-empty strings"),
        (["a bird"], "no table"),
        ({**GOOD, "bird": ["word " * 80]}, "shorten it"),
    ],
)
def test_a_mistake_in_the_file_is_said(tmp_path, table, encoder, content, message):
    with pytest.raises(SettingsError, match=message):
        add_descriptions(table, encoder, written(tmp_path / "d.json", content), "")


def test_no_file_and_no_json_are_said(tmp_path, table, encoder):
    (tmp_path / "bad.json").write_text("{")
    for name, message in (("none.json", "cannot be read"), ("bad.json", "not valid JSON")):
        with pytest.raises(SettingsError, match=message):
            add_descriptions(table, encoder, str(tmp_path / name), "")


def test_the_demos_keywords_are_the_demos_only(table):
    with pytest.raises(SettingsError, match="those of the demo"):
        read_common_descriptions("keywords", table)


def test_own_texts_have_one_shape_and_unknown_clients_are_refused(tmp_path, table, encoder):
    client_texts = {"north": {"bird": ["a gull"]}, "south": {"sea animal": ["a crab", "a whale"]}}
    rows = add_descriptions(table, encoder, "", written(tmp_path / "own.json", client_texts))
    assert {id: tuple(texts.shape) for id, texts in rows.texts.items()} == {
        "north": (2, 2, encoder.dim),
        "south": (2, 2, encoder.dim),
    }
    everyone = texts_by_client(rows.texts, ["north", "south", "west"])
    assert (everyone["west"] == 0).all()
    assert everyone["west"].shape == everyone["south"].shape
    with pytest.raises(SettingsError, match="no client is called 'south'"):
        texts_by_client(rows.texts, ["north"])
    assert texts_by_client({}, ["north"]) == {}


def test_an_encoder_without_text_is_refused(tmp_path, table, encoder):
    blind = type("Blind", (), {"offers": frozenset({"image"}), "name": "blind"})()
    with pytest.raises(SettingsError, match="cannot embed descriptions, because it has no text tower"):
        add_descriptions(table, blind, written(tmp_path / "d.json", GOOD), "")


def test_rows_in_memory_bring_their_own_descriptions(tmp_path, rows):
    with pytest.raises(SettingsError, match="set them there"):
        fedvlm.run("tofa", embedded=rows, out=tmp_path / "run", descriptions="x.json")


def test_a_saved_classifier_keeps_the_descriptions_it_mixes(tmp_path, rows):
    unit = torch.nn.functional.normalize
    descriptions = unit(rows.text[:, None] + 0.1 * torch.randn(4, 3, 16), dim=-1)
    method = {"name": "tofa", "visual": False}
    fedvlm.run(method, embedded=replace(rows, descriptions=descriptions), out=tmp_path / "run")
    result = Result(tmp_path / "run")
    personalised = result.personalised("photo")
    personalised.save_pretrained(tmp_path / "mine")
    again = Personalised.from_pretrained(tmp_path / "mine")
    assert torch.equal(again.logits(rows.x), personalised.logits(rows.x))
    assert torch.equal(again.frozen.descriptions, descriptions)


def test_clients_own_texts_make_two_exchanges_of_the_record(tmp_path, rows):
    texts = {"photo": rows.text[:, None].clone()}
    with_own = replace(rows, texts=texts)
    fedvlm.run({"name": "tofa", "rounds": 2}, embedded=with_own, out=tmp_path / "run")
    lines = [line for line in Result(tmp_path / "run").rounds if line["training"] == "0-art"]
    assert [line["round"] for line in lines] == [0, 1]
    sizes = [line["clients"]["photo"]["bytes_up"] for line in lines]
    assert sizes[0] > sizes[1] > 0
    with pytest.raises(SettingsError, match="rounds = 2"):
        fedvlm.run("tofa", embedded=with_own, out=tmp_path / "one")
