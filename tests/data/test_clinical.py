"""DICOM and images of 16 bits become plain 8-bit PNG, and no tag of a patient goes with them."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

import fedvlm
from fedvlm.classifier.predict import predict
from fedvlm.data import open_dataset
from fedvlm.data.sources import encode_png, to_eight_bit
from fedvlm.errors import DataError, SettingsError

NAME = "Doe^Jane"


def scan(frames: np.ndarray, **tags: object) -> bytes:
    """A DICOM file of 16-bit frames, with a patient's name in it."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    file = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    file.PatientName, file.PatientID = NAME, "PID-4711"
    file.Rows, file.Columns = frames.shape[1:]
    file.NumberOfFrames, file.SamplesPerPixel = len(frames), 1
    file.BitsAllocated, file.BitsStored, file.HighBit = 16, 16, 15
    file.PixelRepresentation, file.PhotometricInterpretation = 0, "MONOCHROME2"
    for key, value in tags.items():
        setattr(file, key, value)
    file.PixelData = frames.astype("<u2").tobytes()
    out = BytesIO()
    pydicom.dcmwrite(out, file)
    return out.getvalue()


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(data)))


RAMP = np.arange(16).reshape(1, 4, 4) * 100


def test_a_window_of_the_file_decides_what_is_black_and_white() -> None:
    tags = {"WindowCenter": [600.5, 1], "WindowWidth": [401, 1], "RescaleSlope": 1}
    developed = pixels(to_eight_bit("a.dcm", scan(RAMP, RescaleIntercept=0, **tags), None))
    expected = np.rint(255 * ((RAMP[0] - 400) / 400).clip(0, 1))
    assert (developed == expected).all()
    windowed = pixels(to_eight_bit("a.dcm", scan(RAMP, RescaleIntercept=-1000, **tags), (-1000, 500)))
    assert (windowed == np.rint(255 * (RAMP[0] / 1500).clip(0, 1))).all()


def test_the_first_frame_by_its_own_range_and_inverted_where_white_is_low() -> None:
    frames = np.concatenate([RAMP, 0 * RAMP + 9])
    plain = pixels(to_eight_bit("a.dcm", scan(frames), None))
    assert (plain == np.rint(255 * RAMP[0] / 1500)).all()
    turned = pixels(to_eight_bit("a.dcm", scan(frames, PhotometricInterpretation="MONOCHROME1"), None))
    assert (turned == 255 - plain).all()


def test_a_damaged_scan_is_refused_without_its_tags() -> None:
    data = scan(RAMP)[:-20]
    with pytest.raises(DataError, match="DICOM that cannot be read") as refused:
        to_eight_bit("a.dcm", data, None)
    assert "Doe" not in str(refused.value)


@pytest.mark.parametrize("form", ["png", "tiff"])
def test_sixteen_bits_are_scaled_by_their_own_range_or_a_window(form: str) -> None:
    out = BytesIO()
    Image.fromarray(RAMP[0].astype(np.uint16)).save(out, format=form)
    own_range = pixels(to_eight_bit(f"a.{form}", out.getvalue(), None))
    assert (own_range == np.rint(255 * RAMP[0] / 1500)).all()
    windowed = pixels(to_eight_bit(f"a.{form}", out.getvalue(), (0, 3000)))
    assert windowed.max() == 128


def test_eight_bits_stay_byte_for_byte() -> None:
    for mode in ("L", "RGB"):
        out = BytesIO()
        Image.new(mode, (5, 4)).save(out, format="png")
        assert to_eight_bit("a.png", out.getvalue(), (0, 9)) == out.getvalue()
    assert to_eight_bit("a.png", b"no image", None) == b"no image"


def test_large_and_coloured_pixels_survive_png() -> None:
    draw = np.random.default_rng(0)
    for shape in ((300, 400), (200, 150, 3), (1, 1)):
        expected = draw.integers(0, 256, shape, dtype=np.uint8)
        assert (pixels(encode_png(expected)) == expected).all()


def test_scans_run_and_no_patient_is_in_the_record(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(40):
        place = tmp_path / "data" / f"site-{number // 20}" / ("low", "high")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        frames = draw.integers(0, 400, (1, 16, 16)) + 600 * (number % 2)
        (place / f"{number}.dcm").write_bytes(scan(frames))
    source = {"window": [0, 1000]}
    result = fedvlm.run("alone", data=str(tmp_path / "data"), source=source, protocol="own-test", out=tmp_path / "r")
    assert set(result.tables[0].values()) >= {1.0}
    personalised = result.personalised("site-0")
    personalised.save_pretrained(tmp_path / "c")
    predictions = predict(tmp_path / "c", [tmp_path / "data"]).rows
    assert personalised.window == (0, 1000) and len(predictions) == 40
    assert all(entry.label == entry.file.split("/")[-2] for entry in predictions)
    for path in (entry for entry in tmp_path.glob("r/**/*") if entry.is_file()):
        assert b"Doe" not in path.read_bytes() and b"PID-4711" not in path.read_bytes()


def test_a_window_must_go_up(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"source.window must be .* got \[5, 1\]"):
        open_dataset("demo", window=[5, 1])
