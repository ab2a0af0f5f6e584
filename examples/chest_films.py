"""Chest films at three hospitals: several findings per film, patients with several films, and subgroups.

Run it: python examples/chest_films.py (the tutorial is docs/tutorials/chest-films.md)
"""

import csv
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

import fedvlm

FINDINGS = ("effusion", "nodule", "pacemaker")
HOSPITALS = ("north", "south", "west")
PATIENTS = 80  # of each hospital: a finding needs 16 training patients at a hospital, or it is suppressed there


def draw_film(findings: dict[str, int], draw: Random) -> Image.Image:
    """Draw a grey thorax: an effusion is white at the bottom, a nodule a small disc, a pacemaker a bright box."""
    image = Image.new("L", (64, 64), draw.randint(20, 60))
    pen, shift = ImageDraw.Draw(image), draw.randint(-6, 6)
    for left in (8 + shift, 36 + shift):  # lungs
        pen.ellipse((left, 8, left + 20, 56), fill=draw.randint(80, 130))
    if findings["effusion"]:
        pen.rectangle((4, draw.randint(46, 54), 60, 60), fill=draw.randint(130, 200))
    if findings["nodule"]:
        x, y, size = draw.randint(10, 44), draw.randint(14, 44), draw.randint(5, 9)
        pen.ellipse((x, y, x + size, y + size), fill=draw.randint(150, 210))
    if findings["pacemaker"]:
        x, y = draw.randint(38, 48), draw.randint(8, 20)
        pen.rectangle((x, y, x + 8, y + 6), fill=draw.randint(170, 255))
    return image


def write_films(folder: Path) -> Path:
    """Write drawn films, a folder for each patient, and their manifest: a row per film."""
    draw, rows = Random(0), []
    for hospital in HOSPITALS:
        for number in range(PATIENTS):
            patient, sex = f"{hospital}/patient-{number}", draw.choice("fm")
            findings = {finding: int(draw.random() < 0.4) for finding in FINDINGS}
            (folder / patient).mkdir(parents=True, exist_ok=True)
            for film in range(draw.randint(1, 2)):
                path = f"{patient}/{film}.png"
                draw_film(findings, draw).save(folder / path)
                known = {key: "" if draw.random() < 0.05 else value for key, value in findings.items()}
                rows.append({"path": path, "client": hospital, "group": patient, "sex": sex, **known})
    with (folder / "films.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    return folder / "films.csv"


def main() -> None:
    settings = {
        "data": str(write_films(Path("films"))),
        "encoder": "demo",
        "clients": {"partition": "own"},  # the column client
        "protocol": "own-test",
        "subgroups": ["sex"],
        "group_metrics": "mean",  # a patient counts once, by the mean over the films
    }
    results = [fedvlm.run(method, out=f"runs/{method}", **settings) for method in ("alone", "auto")]
    for result in results:
        print(result.table(columns=["findings"]))
    for row in results[-1].subgroups("sex"):
        print(row["subgroup"], "suppressed" if row["suppressed"] else f"AUC {row['value']:.2f}")


if __name__ == "__main__":
    main()
