"""Art for the embedded demo: fetch emoji and icon sets, render them, write the image set.

Four emoji styles become the four domains of the demo. Other styles and icon sets become the
pretraining pairs of the tiny CLIP, so that its encoder never sees a drawing of a demo domain.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import resvg_py
from PIL import Image

SIZE = 48  # pixels; the encoder's input size, so that nothing is resampled at run time

# Versions are pinned because the art, and with it every number in the model card, follows them.
DOMAINS = {
    "noto": "noto@1.2.9",
    "twemoji": "twemoji@1.2.5",
    "fluent-flat": "fluent-emoji-flat@1.2.6",
    "high-contrast": "fluent-emoji-high-contrast@1.2.6",
}
EMOJI_STYLES = (
    "noto-v1@1.2.5",
    "fxemoji@1.2.2",
    "emojione@1.2.3",
    "emojione-monotone@1.2.1",
    "streamline-emojis@1.2.4",
)
# Icon sets name what they draw in plain words. Those in OPEN_SETS are kept whole because their
# names are nouns; of the others only icons that carry the name of an emoji are kept, which
# leaves out the arrows and buttons of user interfaces.
ICON_SETS = (
    "mdi@1.2.3",
    "tabler@1.2.41",
    "ph@1.2.2",
    "icon-park@1.2.4",
    "lucide@1.2.137",
    "lucide-lab@1.2.3",
    "temaki@1.2.6",
    "fa6-solid@1.2.4",
    "flat-color-icons@1.2.3",
    "streamline-kameleon-color@1.2.2",
    "streamline-stickies-color@1.2.2",
    "streamline-ultimate-color@1.2.2",
)
OPEN_SETS = ("game-icons@1.2.4",)
EMOJI_DATA, EMOJI_WORDS = "emojibase-data@17.0.0", "emojilib@4.0.3"

# Demo class -> Unicode subgroups (CLDR order) that make it up.
CLASSES: dict[str, tuple[str, ...]] = {
    "mammal": ("animal-mammal",),
    "bird": ("animal-bird",),
    "sea animal": ("animal-marine",),
    "insect": ("animal-bug",),
    "fruit": ("food-fruit",),
    "vegetable": ("food-vegetable",),
    "meal": ("food-prepared", "food-asian"),
    "drink": ("drink",),
    "plant": ("plant-flower", "plant-other"),
    "vehicle": ("transport-ground", "transport-water", "transport-air"),
    "building": ("place-building", "place-religious"),
    "clothing": ("clothing",),
    "face": (
        "face-smiling",
        "face-affection",
        "face-tongue",
        "face-hand",
        "face-neutral-skeptical",
        "face-sleepy",
        "face-unwell",
        "face-concerned",
    ),
    "hand": (
        "hand-fingers-open",
        "hand-fingers-partial",
        "hand-single-finger",
        "hand-fingers-closed",
        "hands",
    ),
    "person": ("person", "person-gesture", "person-role", "person-activity", "person-sport"),
    "tool": ("tool",),
}
CAP = 36  # concepts per class; larger subgroups are thinned evenly in Unicode order
# Members of a subgroup that are not an instance of the plain class word.
NOT_OF_CLASS_TEXT = (
    "paw prints|feather|nest with eggs|empty nest|spider web|microbe|spiral shell|"
    "fingerprint|salt|butter|cooking|fork and knife|ice|wing|"
    "pouring liquid|oil drum|bus stop|station|motorway|railway track|"
    "fuel pump|wheel|police car light|horizontal traffic light|vertical traffic light|stop sign|"
    "construction|anchor|ring buoy|seat|airplane departure|airplane arrival|parachute|"
    "manual wheelchair|motorized wheelchair|roller skate|satellite|building construction|brick|"
    "rock|wood|wedding|houses|folding hand fan|hair pick|prayer beads|lipstick|ring|gem stone|"
    "shopping bags|bomb|white cane|link|broken chain|chains|balance scale|shield|dagger|"
    "crossed swords|bow and arrow|boomerang|horse racing|leaf fluttering in wind|fallen leaf|"
    "head shaking horizontally|head shaking vertically|face in clouds"
)
NOT_OF_CLASS = set(NOT_OF_CLASS_TEXT.split("|"))
STYLE_TEXT = (
    "outline outlined filled fill bold thin light duotone solid alt line broken twotone duo off "
    "variant simple rounded sharp 1 2 3 4 5 6 7 8 9 11 one two three four five six"
)
STYLE_WORDS = set(STYLE_TEXT.split())


@dataclass
class Concept:
    """One thing that is drawn, the words said of it, and its demo class if it has one."""

    name: str
    keywords: list[str] = field(default_factory=list)
    group: str = ""  # plain words for the Unicode subgroup
    label: str = ""  # demo class; a property of the word, so known outside the demo set too
    in_demo: bool = False
    code: str = ""


def squash(text: str) -> str:
    """Reduce a name to bare letters and digits, the form in which icon names are compared."""
    return re.sub(r"[^a-z0-9]", "", text.lower().replace("’s", "s").replace("&", "and"))


def plain(text: str) -> str:
    """Lower-case words separated by single spaces: the only text the tokenizer meets."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower().replace("’", "").replace("'", "")))


class Packages:
    """Packages of npm, downloaded once and read straight from their archives."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    def read(self, spec: str, member: str) -> Any:
        name, version = spec.rsplit("@", 1)
        archive = self.cache / f"{name.lstrip('@').replace('/', '-')}-{version}.tgz"
        if not archive.exists():
            subprocess.run(["npm", "pack", spec, "--silent"], cwd=self.cache, check=True)
        with tarfile.open(archive) as tar:
            stream = tar.extractfile(f"package/{member}")
            assert stream is not None
            return json.load(stream)

    def icons(self, style: str) -> dict[str, str]:
        """Icon name -> SVG text, aliases left out (they repeat a drawing under another name)."""
        data = self.read(f"@iconify-json/{style}", "icons.json")
        svgs = {}
        for name, icon in data["icons"].items():
            if icon.get("hidden"):
                continue
            width = icon.get("width", data.get("width", 16))
            height = icon.get("height", data.get("height", 16))
            box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
            svgs[name] = (
                '<svg xmlns="http://www.w3.org/2000/svg" '
                'xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'width="{width}" height="{height}" viewBox="{box}">{icon["body"]}</svg>'
            )
        return svgs


def render(svg: str) -> np.ndarray:
    """SVG -> (SIZE, SIZE, 3) uint8 on white, centred. Drawn twice as large for smooth edges."""
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=2 * SIZE, skip_system_fonts=True))
    drawing = Image.open(io.BytesIO(png)).convert("RGBA")
    drawing.thumbnail((2 * SIZE, 2 * SIZE))
    canvas = Image.new("RGBA", (2 * SIZE, 2 * SIZE), "white")
    corner = ((2 * SIZE - drawing.width) // 2, (2 * SIZE - drawing.height) // 2)
    canvas.alpha_composite(drawing, corner)
    return np.asarray(canvas.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX))


def load_concepts(packages: Packages) -> tuple[list[Concept], dict[str, int]]:
    """All emoji without skin tones and flags, and a table from squashed alias to concept."""
    data = packages.read(EMOJI_DATA, "en/data.json")
    subgroups = packages.read(EMOJI_DATA, "meta/groups.json")["subgroups"]
    codebooks = [
        packages.read(EMOJI_DATA, f"en/shortcodes/{book}.json")
        for book in ("github", "joypixels", "iamcal", "emojibase")
    ]
    words = packages.read(EMOJI_WORDS, "dist/emoji-en-US.json")
    formal = packages.read(EMOJI_DATA, "meta/unicode-names.json")
    class_of = {subgroup: label for label, members in CLASSES.items() for subgroup in members}
    concepts: list[Concept] = []
    aliases: dict[str, int] = {}
    for emoji in data:
        subgroup = subgroups.get(str(emoji.get("subgroup")), "")
        if not subgroup or "flag" in subgroup or subgroup in ("skin-tone", "hair-style"):
            continue
        label = "" if emoji["label"] in NOT_OF_CLASS else class_of.get(subgroup, "")
        tags = [*emoji.get("tags", []), *words.get(emoji["emoji"], [])]
        concept = Concept(
            name=plain(emoji["label"]),
            keywords=sorted({plain(tag.replace("_", " ")) for tag in tags} - {""}),
            group=plain(subgroup.replace("-", " ")),
            label=label,
            code=emoji["hexcode"].lower().replace("-fe0f", ""),
        )
        codes = [book.get(emoji["hexcode"], []) for book in codebooks]
        names = [code for entry in codes for code in ([entry] if isinstance(entry, str) else entry)]
        for alias in (emoji["label"], *names, formal.get(emoji["hexcode"], "")):
            aliases.setdefault(squash(alias), len(concepts))
        concepts.append(concept)
    return concepts, aliases


def choose_demo(packages: Packages, concepts: list[Concept]) -> dict[str, dict[str, str]]:
    """Mark the demo concepts (drawn in all four styles, capped) and return code -> SVG each."""
    drawings: dict[str, dict[str, str]] = {}
    for domain, style in DOMAINS.items():
        icons = packages.icons(style)
        codes = packages.read(f"@iconify-json/{style}", "chars.json")
        drawings[domain] = {
            code.replace("-fe0f", ""): icons[name] for code, name in codes.items() if name in icons
        }
    for label in CLASSES:
        members = [
            concept
            for concept in concepts
            if concept.label == label
            and all(concept.code in domain for domain in drawings.values())
            # "man cook" and "woman cook" are near-copies of "cook"
            and not re.match(r"(man|woman|men|women) \w|person \w+ hair", concept.name)
            and "facing right" not in concept.name
        ]
        keep = np.linspace(0, len(members) - 1, min(CAP, len(members))).round().astype(int)
        for index in keep:
            members[index].in_demo = True
    return drawings


def write_demo(
    out: Path, concepts: list[Concept], drawings: dict[str, dict[str, str]]
) -> dict[str, np.ndarray]:
    """Write emoji.zip (sorted, no clock time: the same bytes each time) and keywords.json."""
    demo = [concept for concept in concepts if concept.in_demo]
    rendered: dict[str, np.ndarray] = {}
    for domain, svgs in drawings.items():
        for concept in demo:
            member = f"{domain}/{concept.label}/{concept.name.replace(' ', '-')}.png"
            rendered[member] = render(svgs[concept.code])
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out / "emoji.zip.part", "w", zipfile.ZIP_STORED) as archive:
        for member in sorted(rendered):
            picture = Image.fromarray(rendered[member])
            if picture.getcolors(256) is None:  # more than a palette holds: nearest 128 colours
                picture = picture.quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            else:
                picture = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
            stream = io.BytesIO()
            picture.save(stream, "PNG", optimize=True)
            info = zipfile.ZipInfo(member, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            archive.writestr(info, stream.getvalue())
            rendered[member] = np.asarray(picture.convert("RGB"))
    (out / "emoji.zip.part").replace(out / "emoji.zip")
    return rendered


def write_keywords(packages: Packages, out: Path, concepts: list[Concept]) -> None:
    """Describe each class by its members: CLDR name and up to four CLDR keywords of each."""
    tags = {
        emoji["hexcode"].lower().replace("-fe0f", ""): [
            tag.lower() for tag in emoji["tags"] if tag.isascii()
        ]
        for emoji in packages.read(EMOJI_DATA, "en/data.json")
        if "tags" in emoji
    }
    described: dict[str, list[str]] = {label: [] for label in CLASSES}
    for concept in concepts:
        if concept.in_demo:
            said = set(concept.name.split()) | {concept.label, ""}
            extra = [tag for tag in tags.get(concept.code, []) if tag not in said][:4]
            article = "an" if concept.label[0] in "aeiou" else "a"
            text = f"{article} {concept.label}: {concept.name}"
            described[concept.label].append(f"{text}, {', '.join(extra)}" if extra else text)
    text = json.dumps(described, indent=1)
    (out / "keywords.json").write_text(text + "\n", encoding="utf-8")


def training_pairs(
    packages: Packages, concepts: list[Concept], aliases: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Render every pretraining drawing; returns the images and the concept index of each.

    Appends to `concepts` those that only an open icon set draws.
    """
    images, owners = [], []
    for style in (*EMOJI_STYLES, *ICON_SETS, *OPEN_SETS):
        for name, svg in packages.icons(style).items():
            words = [word for word in name.split("-") if word not in STYLE_WORDS] or [name]
            owner = aliases.get(squash(name), aliases.get(squash(" ".join(words))))
            if owner is None and style in OPEN_SETS and "abstract" not in name:
                owner = aliases[squash(" ".join(words))] = len(concepts)
                concepts.append(Concept(name=plain(" ".join(words)), keywords=sorted(set(words))))
            if owner is None:
                continue
            image = render(svg)
            if image.std() > 2:  # a few icons are empty without fonts
                images.append(image)
                owners.append(owner)
    return np.stack(images), np.asarray(owners)
