"""The small model that comes with the package, so that a first run needs no download."""

from importlib.resources import files
from pathlib import Path

from fedvlm.devices import Device
from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.errors import EncoderError


def demo_directory() -> Path:
    directory = Path(str(files("fedvlm.encoders") / "demo_model"))
    if not (directory / "config.json").is_file():
        raise EncoderError(f"the demo model is not in {directory}; reinstall fedvlm or name another encoder")
    return directory


def demo(*, device: Device = "cpu") -> HuggingFace:
    return HuggingFace(demo_directory(), name="demo", device=device)
