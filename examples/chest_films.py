"""Chest films at three hospitals: several findings per film, patients with several films, and subgroups.

Run it: python examples/chest_films.py [FOLDER TO KEEP FILMS AND RUNS] (tutorial: docs/tutorials/chest-films.md)
"""

import csv
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from PIL import Image, ImageDraw

import fedvlm

FINDINGS = {"effusion": (4, 48, 60, 60), "nodule": (16, 20, 24, 28), "pacemaker": (42, 12, 50, 18)}  # where each is
PATIENTS = 80  # of a hospital; a finding of fewer than 16 training patients there is suppressed


def draw_film(findings: dict[str, int], draw: Random) -> Image.Image:
    """Draw a grey thorax with a brighter box for each finding."""
    image, shift = Image.new("L", (64, 64), draw.randint(20, 60)), draw.randint(-6, 6)
    pen = ImageDraw.Draw(image)
    pen.ellipse((8 + shift, 8, 56 + shift, 56), fill=draw.randint(80, 130))
    for finding in (name for name, present in findings.items() if present):
        pen.rectangle([side + draw.randint(-3, 3) for side in FINDINGS[finding]], fill=draw.randint(140, 230))
    return image


def write_films(folder: Path) -> Path:
    """Write drawn films, a folder for each patient, and their manifest: a row per film."""
    draw, rows = Random(0), []
    for patient in [f"{hospital}/patient-{n}" for hospital in ("north", "south", "west") for n in range(PATIENTS)]:
        sex, findings = draw.choice("fm"), {finding: int(draw.random() < 0.4) for finding in FINDINGS}
        (folder / patient).mkdir(parents=True, exist_ok=True)
        for path in [f"{patient}/{film}.png" for film in range(draw.randint(1, 2))]:
            draw_film(findings, draw).save(folder / path)
            known = {key: "" if draw.random() < 0.05 else value for key, value in findings.items()}
            rows.append({"path": path, "client": patient.split("/")[0], "group": patient, "sex": sex, **known})
    with (folder / "films.csv").open("w", newline="") as file:
        csv.writer(file).writerows([rows[0], *(row.values() for row in rows)])
    return folder / "films.csv"


def main(folder: Path) -> None:
    # A patient counts once, by the mean over the films; the column client says which hospital a film is from.
    settings = {"data": str(write_films(folder / "films")), "encoder": "demo", "clients": {"partition": "own"}}
    settings |= {"protocol": "own-test", "subgroups": ["sex"], "group_metrics": "mean"}
    for method in ("alone", "auto"):
        result = fedvlm.run(method, out=folder / "runs" / method, **settings)
        print(result.table(columns=["findings"]))
    for row in result.subgroups("sex"):
        print(row["subgroup"], "suppressed" if row["suppressed"] else f"AUC {row['value']:.2f}")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if sys.argv[1:] else temporary))
