"""Class names become sentences and one text embedding per class."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedvlm.data.table import readable_name
from fedvlm.encoders.text import fill_template
from fedvlm.errors import SettingsError
from tests.helpers.counting import (
    Counting,
    numbered,
    run,
)


def test_class_names_are_cleaned_in_sentences() -> None:
    assert readable_name("Alarm_Clock") == "alarm clock"
    assert readable_name(" Air__ Plane ") == "air plane"
    assert readable_name("camelCase") == "camelcase"
    assert fill_template(["TV {}", "dog"], "a {}, {}.") == ["a tv {}, tv {}.", "a dog, dog."]
    with pytest.raises(SettingsError, match="'a dog' has no place"):
        fill_template(["dog"], "a dog")


def test_several_templates_give_the_mean_of_their_unit_vectors(tmp_path: Path) -> None:
    templates = ("a photo of a {}", "a sketch of a {}")
    encoder = Counting()
    text = run(replace(numbered(4), templates=templates), encoder, tmp_path).embedded.text
    texts = [[t.format(c) for t in templates] for c in ("alarm clock", "dog")]
    assert sorted(encoder.sentences) == sorted(texts[0] + texts[1])
    expected = torch.stack([encoder.embed_text(group).mean(0) for group in texts])
    assert text is not None
    assert torch.allclose(text, torch.nn.functional.normalize(expected, dim=1), atol=1e-6)


def test_encoder_without_text_gives_none(tmp_path: Path) -> None:
    encoder = Counting(offers=frozenset({"image"}))
    assert run(numbered(4), encoder, tmp_path).embedded.text is None
    assert encoder.sentences == []
