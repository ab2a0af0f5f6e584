"""Three folders to classifiers: two hospitals train, a third joins later, all answer with sets.

Run it: python examples/hospital.py (the tutorial is docs/tutorials/hospitals.md)
"""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from PIL import Image, ImageDraw

import fedvlm
from fedvlm.classifier.join import rows_for
from fedvlm.classifier.predict import predict

FINDINGS = {"circle": 40, "square": 4, "triangle": 3}  # corners of what is to be found
PAPERS = {"first/north": "white", "first/south": "beige", "west": "lightblue"}


def draw_images(folder: Path, paper: str, draw: Random) -> None:
    """Stands in for a hospital's archive: a folder per finding."""
    for finding, sides in FINDINGS.items():
        (folder / finding).mkdir(parents=True)
        for number in range(30):
            image = Image.new("RGB", (64, 64), paper)
            where = draw.randint(20, 44), draw.randint(20, 44), draw.randint(8, 18)
            ink = draw.choice(["red", "green", "navy", "black"])
            ImageDraw.Draw(image).regular_polygon(where, sides, draw.randint(-20, 20), ink)
            image.save(folder / finding / f"{number}.png")


def main() -> None:
    draw = Random(0)
    with TemporaryDirectory() as place:
        root = Path(place)
        for hospital, paper in PAPERS.items():
            draw_images(root / hospital, paper, draw)

        # North and South share class statistics once; images and embeddings stay where they are.
        first = {"data": str(root / "first"), "encoder": "demo", "protocol": "own-test"}
        result = fedvlm.run("tofa", out=root / "run", **first)
        print(result.table())
        result.personalised("north").save_pretrained(root / "north")

        # West comes later: it takes the server's record and its own images, and sends nothing.
        rows, _ = rows_for(result, str(root / "west"), {}, "", {}, lambda *_: None)
        late = fedvlm.join(result, rows, "west")
        late.classifier.save_pretrained(root / "late")
        print(f"west: {late.accuracy:.0%} of {late.held} rows, {late.unseen:.0%} without its own")

        # A set holds the true class at least four times in five; of one class, it is an answer.
        for name, images in {"north": "first/north/circle", "late": "west/square"}.items():
            for one in predict(root / name, [root / images], coverage=0.8).rows[:3]:
                print(f"{name}, {Path(one.file).name}: {' or '.join(one.within)}")


if __name__ == "__main__":
    main()
