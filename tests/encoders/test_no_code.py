"""Folders of models bring weights and words, never code."""

import builtins
import json

import pytest

from fedvlm.data.descriptions import load_writer
from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.errors import EncoderError, SettingsError
from tests.helpers import tiny_models

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel
Path({mark!r}).touch()
class Config(PretrainedConfig):
    model_type = "{kind}"
class Model(PreTrainedModel):
    config_class = Config
"""


def trap(folder, kind):
    """A model's folder that names code of its own for everything."""
    mark = folder / "code-ran"
    (folder / "trap.py").write_text(CODE.format(mark=str(mark), kind=kind))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    autos = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "Model"}
    config["auto_map"] = {key: f"trap.{value}" for key, value in autos.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return mark


@pytest.fixture
def willing(monkeypatch):
    """Somebody who says yes to whatever is asked."""
    monkeypatch.setattr(builtins, "input", lambda *words: "y")


@pytest.mark.usefixtures("willing")
def test_code_in_the_folder_of_an_encoder_is_never_run(tmp_path):
    mark = trap(tiny_models.clip(tmp_path), "trapped-vision")
    with pytest.raises(EncoderError, match="trust_remote_code|contains custom code"):
        HuggingFace(tmp_path)
    assert not mark.exists()


@pytest.mark.usefixtures("willing")
def test_code_in_the_folder_of_a_writer_is_never_run(tmp_path):
    mark = trap(tiny_models.clip(tmp_path), "trapped-text")
    with pytest.raises(SettingsError, match="no text-generation model"):
        load_writer(tmp_path)
    assert not mark.exists()
