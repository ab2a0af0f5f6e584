import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from fedvlm.core import NEEDS, make
from fedvlm.encoders import ENCODERS, Kind, encoder_options, open_encoder
from fedvlm.encoders.images import Pixels
from fedvlm.errors import EncoderError, SettingsError
from fedvlm.runner.manifest import device_info
from fedvlm.runner.settings import Settings
from tests.helpers import tiny_models


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
        assert set(kind.offers) <= set(NEEDS)
        assert kind.summary


def test_the_demo_is_the_model_that_comes_with_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("fedvlm.encoders.huggingface.files", lambda package: tmp_path)
    with pytest.raises(EncoderError, match="reinstall fedvlm"):
        open_encoder("demo")
    tiny_models.clip(tmp_path / "demo_model")
    encoder = open_encoder("demo")
    assert encoder.name == "demo"
    assert "text tower" in encoder.offers


def test_preprocessing_in_another_process_does_not_load_torch(tmp_path):
    (tmp_path / "pixels").write_bytes(pickle.dumps(Pixels(8, (8, 8))))
    load = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    program = f"{load}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program, tmp_path / "pixels"], check=True)


class OutsideEncoder:
    """An encoder of another package that computes on a device."""

    def __init__(self, place, *, device="cpu"):
        self.device = device


def test_the_manifest_names_the_device_of_any_encoder_that_takes_one(monkeypatch):
    kinds = {"mine": Kind("mine:X", "mine", ("image",), __name__, "OutsideEncoder"), **ENCODERS}
    monkeypatch.setattr("fedvlm.encoders.ENCODERS", kinds)
    assert encoder_options("mine:a") == encoder_options("hf:a") == encoder_options("demo") == ["device"]
    settings = replace(Settings(make("zero-shot")), encoder="mine:a")
    assert device_info(settings, in_memory=False)["encoding"]["device"] == "cpu"
    assert "encoding" not in device_info(replace(settings, encoder="store:a"), in_memory=False)
