"""Small trees of images for the tests."""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

from PIL import Image


def image(*parts: object) -> bytes:
    """A small PNG that differs for different parts."""
    number = hash_number("/".join(map(str, parts)))
    image = Image.new("RGB", (4, 4), (number % 251, number // 251 % 251, number // 63001 % 251))
    stream = BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def hash_number(words: str) -> int:
    number = 0
    for letter in words:
        number = (number * 131 + ord(letter)) % 15_813_251
    return number


def plant(root: Path, paths: Iterable[str]) -> Path:
    """Writes an image at each path below the root."""
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image(path))
    return root


def grid(domains: Iterable[str], classes: Iterable[str], rows: int = 2) -> list[str]:
    names = list(classes)
    return [f"{d}/{c}/{row}.png" for d in domains for c in names for row in range(rows)]


def make_zip(path: Path, names: Iterable[str]) -> Path:
    with ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, image(name))
    return path
