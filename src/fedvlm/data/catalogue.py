"""The catalogue of data sets: one entry says where to get a data set, how it is laid out and what must be in it."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.readers import GROUP, call_reader, detect_kind, kinds
from fedvlm.data.sources import SourceSubset
from fedvlm.data.table import Dataset, to_nfc
from fedvlm.errors import DataError, SettingsError, join_names
from fedvlm.plugins import load_outside

PICTURE = ("a picture of a {}",)  # FedCLIP, FAA-CLIP, FedOT
PHOTO = ("a photo of a {}.",)  # CoOp, FedOTP, TOFA: with the full stop


@dataclass(frozen=True)
class Entry:
    """A data set: where to get it, its layout, what must be in it, and how papers use it."""

    name: str
    home: str  # where to get it, in words
    layout: str = "domain/class"  # of its folder or .zip; or "leaf"
    classes: tuple[str, ...] = ()  # in the order of the labels; empty: sorted as found
    domains: Mapping[str, int] = field(default_factory=dict)  # with their number of images; 0: not well known
    rows: int = 0  # images in all, if well known; by default the sum over the domains
    templates: tuple[str, ...] = PICTURE
    hub: str = ""  # id on the Hugging Face Hub
    columns: Mapping[str, str] = field(default_factory=dict)  # image, label, ... of the copy on the Hub
    split_file: str = ""  # of CoOp, in the folder
    aliases: Mapping[str, str] = field(default_factory=dict)  # other spellings of classes and domains
    without: tuple[str, ...] = ()  # classes on disk that the papers leave out
    subset: bool = False  # all classes on disk except the listed ones are left out
    place: str = ""  # default root
    protocol: str = ""  # what the papers do with it
    comment: str = ""

    @property
    def total(self) -> int:
        return self.rows or (sum(self.domains.values()) if all(self.domains.values()) else 0)

    @property
    def shape(self) -> str:
        """Describe the files that must be on disk."""
        first = next(iter(self.domains), "DOMAIN").replace("/", " ")
        words = {"domain": first, "class": "CLASS", "split": "Training", "client": "CLIENT"}
        path = "/".join(words.get(word, "*") for word in self.layout.split("|")[0].split("/"))
        shapes = [f"a folder or .zip with {path}/IMAGE"] if path else []
        if self.split_file:
            shapes = [f"a folder with {self.split_file} and its images"]
        if self.layout == "leaf":
            shapes = ["the folder of LEAF's .json files"]
        if self.hub:
            shapes.append(f"hub:{self.hub}, or a folder that save_to_disk made of it")
        return ", or ".join(shapes)


_ENTRIES: dict[str, Entry] = {}


def add(entry: Entry) -> Entry:
    """Add a data set to the catalogue, so that it can be opened by its name."""
    if _ENTRIES.setdefault(entry.name, entry) != entry:
        raise SettingsError(f"the name {entry.name!r} is taken by another data set of the catalogue; choose another")
    return entry


def catalogue() -> dict[str, Entry]:
    """Return all entries by name: those of the papers, and those of outside packages."""
    load_outside(GROUP)
    return dict(sorted(_ENTRIES.items()))


@cache
def class_names(name: str) -> tuple[str, ...]:
    """Read a long list of class names, in the order of the labels."""
    lists = json.loads((Path(__file__).parent / "classes.json").read_text(encoding="utf-8"))
    return tuple(lists[name])


def open_entry(entry: Entry, root: str | Path | None = None, check: bool = True) -> Dataset:
    """Open a data set of the catalogue from `root`, a path or hub:ID; classes come in the entry's order.

    `check` compares the number of images with the known one; classes are always checked.
    """
    place = str(root) if root else entry.place
    if not place:
        raise DataError(f"{entry.name} is not shipped: get it from {entry.home}; then set root to {entry.shape}")
    kind_and_place = detect_kind(place)
    if kind_and_place is None:
        raise DataError(
            f"{place} is not there, so {entry.name} cannot be opened; set root to {entry.shape} "
            f"(available from {entry.home})"
        )
    data = _arrange(entry, place, _read(entry, *kind_and_place))
    counts = Counter(data.domains.tolist())
    if entry.domains and set(counts) != set(entry.domains):
        raise DataError(
            f"the domains of {place} are {join_names(sorted(counts))}, those of {entry.name} are "
            f"{join_names(list(entry.domains))}; set root to {entry.shape}"
        )
    if check:
        _check_counts(entry, place, counts)
    return data


def _read(entry: Entry, kind: str, place: str) -> Dataset:
    options: dict[str, Any] = {}
    split = Path(place) / entry.split_file
    if entry.split_file and kind in ("folder", "leaf") and split.is_file():
        kind, place = "coop", str(split)
    elif kind == "folder" and entry.layout != "leaf":
        options["layout"] = entry.layout
    elif kind == "hub":
        options = dict(entry.columns)
    return call_reader(entry.name, kinds()[kind], place, options)


def _plain(name: str) -> str:
    """Drop case, blanks, underscores and hyphens, in which copies differ."""
    return "".join(letter for letter in to_nfc(name).casefold() if letter.isalnum())


def _arrange(entry: Entry, place: str, data: Dataset) -> Dataset:
    """Spell and order classes and domains as the entry does; drop what the papers leave out."""
    aliases = {_plain(alias): _plain(name) for alias, name in entry.aliases.items()}

    def plain(name: str) -> str:
        return aliases.get(_plain(name), _plain(name))

    excluded = {_plain(name) for name in entry.without}
    ordered = entry.classes or tuple(name for name in data.classes if _plain(name) not in excluded)
    number = {_plain(name): index for index, name in enumerate(ordered)}
    class_keys = [plain(name) for name in data.classes]
    extra = [
        name
        for name, key in zip(data.classes, class_keys, strict=True)
        if key not in number and _plain(name) not in excluded and not entry.subset
    ]
    missing = [name for name in ordered if _plain(name) not in class_keys]
    if extra or missing:
        problems = [f"it lacks {join_names(missing)}"] if missing else []
        problems += [f"it also has {join_names(extra)}"] if extra else []
        raise DataError(
            f"the classes of {place} are not those of {entry.name} ({len(ordered)} classes): "
            f"{' and '.join(problems)}; get it from {entry.home}"
        )
    labels = np.array([number.get(key, -1) for key in class_keys], dtype=np.int64)[data.labels]
    selected = np.flatnonzero(labels >= 0)
    spelled = {_plain(name): name for name in entry.domains}
    domains = [spelled.get(plain(name), name) for name in data.domains[selected].tolist()]
    return replace(
        data,
        name=entry.name,
        classes=tuple(name.replace("_", " ") for name in ordered),
        source=SourceSubset(data.source, selected) if len(selected) < len(labels) else data.source,
        labels=labels[selected],
        domains=np.array(domains, dtype=np.str_),
        clients=data.clients[selected],
        splits=data.splits[selected],
        groups=None if data.groups is None else data.groups[selected],
        templates=entry.templates,
    )


def _check_counts(entry: Entry, place: str, counts: Counter[str]) -> None:
    problems = [
        f"{domain} has {counts[domain]:,} of {expected:,}"
        for domain, expected in entry.domains.items()
        if expected and counts[domain] != expected
    ]
    if entry.total and counts.total() != entry.total:
        problems.append(f"{counts.total():,} of {entry.total:,} in all")
    if problems:
        raise DataError(
            f"{place} has another number of images than {entry.name}: {'; '.join(problems)}; "
            f"get it again from {entry.home}, or open it with check = false"
        )


# The data sets of FedOT, FAA-CLIP, FedOTP and TOFA, and the shipped demo.
LODO = "FedOT: a client per domain, 60/20/20, each domain held out in turn and scored on its 20 %"
PATHOLOGICAL_16_SHOT = "FedOTP, TOFA: pathological, 10 clients without a common class, 16 shots"
DIRICHLET_100_CLIENTS = "FedOTP, TOFA: Dirichlet over 100 clients, alpha 0.3, 10 % of them per round"
COOP = "the page of the data set, with the split file from the data instructions of CoOp"
DOMAINNET = {
    "clipart": 48129,
    "infograph": 51605,
    "painting": 72266,
    "quickdraw": 172500,
    "real": 172947,
    "sketch": 69128,
}

ENTRIES = (
    Entry(
        "demo",
        "the package: install it again",
        place=str(Path(__file__).parent / "demo" / "emoji.zip"),
        classes=class_names("demo"),
        domains=dict.fromkeys(("fluent-flat", "high-contrast", "noto", "twemoji"), 424),
        protocol="a client per drawing style",
        comment="emoji of several vendors' styles as domains",
    ),
    Entry(
        "pacs",
        "the project page of the PACS domain generalisation benchmark, or the Hub",
        classes=class_names("pacs"),
        domains={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        hub="flwrlabs/pacs",
        aliases={"art": "art_painting"},
        protocol=LODO,
    ),
    Entry(
        "office-home",
        "the project page of Office-Home (Hemanth Venkateswara), or the Hub",
        classes=class_names("office-home"),
        domains={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        hub="flwrlabs/office-home",
        protocol=f"{LODO}; FAA-CLIP's Multi-OF: domain-dirichlet, 5 clients each of Art, Clipart "
        "and Product, Real World as target",
    ),
    Entry(
        "vlcs",
        "the download script of DomainBed",
        classes=class_names("vlcs"),
        domains={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
        aliases={"caltech": "Caltech101", "sun": "SUN09", "pascal": "VOC2007", "voc": "VOC2007"},
        protocol=LODO,
    ),
    Entry(
        "terra-incognita",
        "the download script of DomainBed, from the Caltech Camera Traps",
        classes=class_names("terra-incognita"),
        domains={f"location_{number}": 0 for number in (38, 43, 46, 100)},
        protocol=LODO,
        comment="copies differ in their rows (24,330 and 24,788 are both quoted), so they are not counted",
    ),
    Entry(
        "femnist",
        "LEAF (its preprocessing of FEMNIST), or the Hub",
        layout="leaf",
        classes=class_names("femnist"),
        subset=True,
        templates=("a picture of the number: {}",),
        hub="flwrlabs/femnist",
        columns={"label": "character", "client": "writer_id"},
        protocol="FedOT: digits only, four clients, 60/20/20; cross-device with 1 to 75 clients",
        comment="writers are clients; how FedOT made its four clients of about 1,000 digits out of "
        "writers is not said. leaf:DIR opens all 62 characters",
    ),
    Entry(
        "office-31",
        "the domain adaptation page of the Office data set (Saenko and others)",
        layout="domain/*/class|domain/class",
        classes=class_names("office-31"),
        domains={"amazon": 2817, "dslr": 498, "webcam": 795},
        protocol="see modern-office-31",
        comment="the original archive has a folder images between domain and class",
    ),
    Entry(
        "modern-office-31",
        "the repository of ModernOffice31 (Ringwald and Stiefelhagen, Adaptiope)",
        classes=class_names("office-31"),
        domains={"amazon": 2817, "dslr": 498, "synthetic": 3100, "webcam": 795},
        protocol="FAA-CLIP: a client per domain, 80/20, one domain as target",
    ),
    Entry(
        "office-caltech-10",
        "the data links of FedBN, or the page of Office-Caltech (Gong and others)",
        classes=class_names("office-caltech-10"),
        domains={"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
        aliases={"backpack": "back_pack", "laptop": "laptop_computer"},
        templates=PHOTO,
        protocol="FedOTP, TOFA: a client per domain; with label shift, domain-dirichlet, 3 clients each, alpha 0.1",
        comment="the .pkl split lists of FedBN are not read; the papers' code scrambles the names",
    ),
    Entry(
        "domainnet",
        "the page of DomainNet at Boston University (cleaned version), or the Hub",
        classes=class_names("domainnet"),
        domains=DOMAINNET,
        templates=PHOTO,
        hub="wltjr1007/DomainNet",
        protocol="see domainnet-10",
        comment="classes sorted as folders are, capitals first",
    ),
    Entry(
        "domainnet-10",
        "the page of DomainNet at Boston University (cleaned version), or the Hub",
        classes=class_names("domainnet-10"),
        domains=dict.fromkeys(DOMAINNET, 0),
        subset=True,
        templates=PHOTO,
        hub="wltjr1007/DomainNet",
        protocol="FedOTP, TOFA: a client per domain; with label shift, domain-dirichlet, 5 clients each, alpha 0.1",
        comment="ten of the 345 classes; the papers' fixed row lists (.pkl) are not read",
    ),
    Entry(
        "cifar10",
        "the CIFAR page of the University of Toronto, or the Hub",
        layout="split/class",
        classes=class_names("cifar10"),
        rows=60000,
        templates=PHOTO,
        hub="uoft-cs/cifar10",
        columns={"image": "img", "label": "label"},
        protocol=DIRICHLET_100_CLIENTS,
    ),
    Entry(
        "cifar100",
        "the CIFAR page of the University of Toronto, or the Hub",
        layout="split/class",
        classes=class_names("cifar100"),
        rows=60000,
        templates=PHOTO,
        hub="uoft-cs/cifar100",
        columns={"image": "img", "label": "fine_label"},
        aliases={"cra": "crab"},  # as the Hub's copy spells it
        protocol=f"{DIRICHLET_100_CLIENTS}; FedOTP's own split is a Dirichlet of two levels, coarse and fine",
    ),
    Entry(
        "food101",
        COOP,
        layout="class",
        classes=class_names("food101"),
        rows=101000,
        templates=PHOTO,
        hub="ethz/food101",
        split_file="split_zhou_Food101.json",
        protocol=PATHOLOGICAL_16_SHOT,
        comment="the Hub's copy calls the test half of the data validation",
    ),
    Entry(
        "dtd",
        COOP,
        layout="class",
        classes=class_names("dtd"),
        rows=5640,
        templates=PHOTO,
        hub="koorye/Describable-Textures-Dataset",
        split_file="split_zhou_DescribableTextures.json",
        protocol=PATHOLOGICAL_16_SHOT,
    ),
    Entry(
        "caltech101",
        COOP,
        layout="class",
        classes=class_names("caltech101"),
        rows=8242,
        templates=PHOTO,
        hub="koorye/Caltech-101",
        split_file="split_zhou_Caltech101.json",
        aliases={
            "airplanes": "airplane",
            "Faces": "face",
            "Leopards": "leopard",
            "Motorbikes": "motorbike",
        },
        without=("BACKGROUND_Google", "Faces_easy"),
        protocol=PATHOLOGICAL_16_SHOT,
        comment="100 classes: CoOp drops BACKGROUND_Google and Faces_easy and renames four",
    ),
    Entry(
        "flowers102",
        COOP,
        layout="class",
        classes=class_names("flowers102"),
        rows=8189,
        templates=PHOTO,
        hub="koorye/Oxford-Flowers",
        split_file="split_zhou_OxfordFlowers.json",
        aliases={"barberton daisy": "barbeton daisy"},
        protocol=PATHOLOGICAL_16_SHOT,
        comment="the original images are in one folder, so the split file is needed",
    ),
    Entry(
        "oxford-pets",
        COOP,
        layout="class",
        classes=class_names("oxford-pets"),
        rows=7349,
        templates=PHOTO,
        hub="koorye/Oxford-Pets",
        split_file="split_zhou_OxfordPets.json",
        protocol=PATHOLOGICAL_16_SHOT,
        comment="the original images are in one folder, so the split file is needed",
    ),
    Entry(
        "brain-tumour",
        "Kaggle (Brain Tumor Classification, MRI; Bhuvaji), or the Hub",
        layout="split/class",
        classes=class_names("brain-tumour"),
        rows=3264,
        hub="sartajbhuvaji/Brain-Tumor-Classification",
        protocol="FAA-CLIP: the training half over three clients at random, 80/10/10, the testing half as target",
        comment="64 images are in both halves; dividing the data drops them from the later part",
    ),
    Entry(
        "skin-cancer",
        "Kaggle (nine classes of skin cancer), HAM10000 and ISIC 2019, a folder each, or the Hub",
        layout="domain/class",
        classes=class_names("skin-cancer"),
        hub="marmal88/skin_cancer",
        columns={"label": "dx"},
        aliases={
            "akiec": "actinic_keratosis",
            "actinic_keratoses": "actinic_keratosis",
            "bcc": "basal_cell_carcinoma",
            "bkl": "pigmented_benign_keratosis",
            "benign_keratosis-like_lesions": "pigmented_benign_keratosis",
            "df": "dermatofibroma",
            "mel": "melanoma",
            "melanocytic_Nevi": "nevus",
            "nv": "nevus",
            "vasc": "vascular_lesion",
            "vascular_lesions": "vascular_lesion",
        },
        subset=True,
        protocol="FAA-CLIP: three sources as clients, 80/20, a fifth of ISIC 2019 as target",
        comment="split by lesion: HAM10000 has several images of one lesion, which no digest finds. "
        "The Hub's copy is HAM10000 alone; its diagnosis names were not verified",
    ),
    Entry(
        "hyper-kvasir",
        "the HyperKvasir page of Simula (labelled images), or the Hub",
        layout="*/*/class|class",
        classes=class_names("hyper-kvasir"),
        rows=10662,
        hub="sahilur/hyper-kvasir-labeled-images",
        protocol="FAA-CLIP: four parts at random, three as clients, 70/30, one as target",
    ),
)
for _entry in ENTRIES:
    add(_entry)
