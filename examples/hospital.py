"""Three folders to classifiers: two hospitals train, a third joins later, all answer with sets.

Run it: python examples/hospital.py (the tutorial is docs/tutorials/hospitals.md)
"""

import subprocess
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from PIL import Image, ImageDraw

import fedvlm

FINDINGS = {"circle": 40, "square": 4, "triangle": 3}  # corners of what is to be found
PAPERS = {"first/north": "white", "first/south": "beige", "west": "lightblue"}


def draw_images(folder: Path, paper: str, draw: Random) -> None:
    """Draw images in place of a hospital's archive: a folder per finding."""
    for finding, sides in FINDINGS.items():
        (folder / finding).mkdir(parents=True)
        for number in range(40):  # enough for 16 training images of each finding, below which statistics are suppressed
            image = Image.new("RGB", (64, 64), paper)
            circle = draw.randint(20, 44), draw.randint(20, 44), draw.randint(8, 18)
            ink = draw.choice(["red", "green", "navy", "black"])
            ImageDraw.Draw(image).regular_polygon(circle, sides, draw.randint(-20, 20), ink)
            image.save(folder / finding / f"{number}.png")


def command(*words: str | Path) -> None:
    """Run a command as a hospital would."""
    subprocess.run([Path(sys.executable).with_name("fedvlm"), *words], check=True)


def main() -> None:
    draw = Random(0)
    with TemporaryDirectory() as place:
        root = Path(place)
        for hospital, paper in PAPERS.items():
            draw_images(root / hospital, paper, draw)

        # North and South share class statistics once; images and embeddings stay where they are.
        first = {"data": str(root / "first"), "encoder": "demo", "protocol": "own-test"}
        result = fedvlm.run("tofa", out=root / "run", **first)
        print(result.table(), flush=True)
        result.personalised("north").save_pretrained(root / "north")

        # West comes later: it takes the server's record and its own images, and sends nothing.
        command("join", root / "run", root / "west", "--client", "west", "--output", root / "late")

        # A set holds the true class at least four times in five; of one class, it is an answer.
        for name, image in {"north": "first/north/circle", "late": "west/square"}.items():
            command("predict", root / name, root / image / "0.png", "--coverage", "0.8")


if __name__ == "__main__":
    main()
