"""A data set of one's own: a folder per hospital, a folder per finding, opened by its name.

Run it: python examples/new_dataset.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from fedvlm.data import Clients, Entry, add, list_samples, make_partition, open_dataset

SLIDES = add(
    Entry(
        name="slides",
        home="the archive of the three hospitals",
        layout="domain/class",
        classes=("healthy_tissue", "tumour"),  # in the order of the labels
        domains={"north": 20, "south": 20, "west": 20},  # how many images each must have
        templates=("a microscope image of {}",),
    )
)


def make_pictures(root: Path) -> None:
    """Stands in for the real archive: 60 small images, all different."""
    for site, domain in enumerate(SLIDES.domains):
        for label, name in enumerate(SLIDES.classes):
            for row in range(10):
                file = root / domain / name / f"{row}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (16, 16), (80 * site, 200 * label, 20 * row)).save(file)


def main() -> None:
    with TemporaryDirectory() as folder:
        make_pictures(Path(folder))
        data = open_dataset("slides", root=folder)  # classes, domains and counts are checked
        print(f"{data.name}: {len(data.labels)} images of {', '.join(data.classes)}")
        partition = make_partition(list_samples(data), Clients(partition="domain"), seed=0)
        for member in partition.clients.values():
            train, test = len(member.train), len(member.test)
            print(f"{member.id}: {train} rows to train, {test} to test")


if __name__ == "__main__":
    main()
