import pytest

from fedvlm.encoders import ENCODERS, open_encoder
from fedvlm.encoders.interface import OFFERS
from fedvlm.errors import SettingsError


@pytest.mark.parametrize("name", ["onx:a", "stored:a", "HF"])
def test_an_unknown_encoder_is_refused_with_the_nearest(name):
    with pytest.raises(SettingsError, match=r"did you mean '(onnx|store|hf)'"):
        open_encoder(name)


@pytest.mark.parametrize("name", ["hf:", "hf", "demo:x", "store:"])
def test_half_a_name_is_refused_with_its_form(name):
    with pytest.raises(SettingsError, match="write "):
        open_encoder(name)


def test_an_unknown_option_is_refused():
    with pytest.raises(SettingsError, match=r"no option of store:FILE_OR_DIR is called 'clases'"):
        open_encoder("store:x", clases=["a"])


def test_every_kind_says_what_it_offers():
    for kind in ENCODERS.values():
        assert "image" in kind.offers
        assert set(kind.offers) <= set(OFFERS)
        assert kind.what
