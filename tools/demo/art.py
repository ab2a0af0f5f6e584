"""Render the drawings and write the image set.

Four emoji styles become the four domains of the demo. Other styles and icon sets become the
pretraining pairs of the tiny CLIP, so that its encoder never sees a drawing of a demo domain.
"""

import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import resvg_py
from numpy.typing import NDArray
from PIL import Image

from .concepts import Concept, Packages, plain, squash
from .sets import (
    CAP,
    CLASSES,
    DOMAINS,
    EMOJI_DATA,
    EMOJI_STYLES,
    ICON_SETS,
    OPEN_SETS,
    SIZE,
    STYLE_WORDS,
    VALIDATION,
)


def render(svg: str) -> NDArray[np.uint8]:
    """SVG -> (SIZE, SIZE, 3) uint8 on white, centred. Drawn twice as large for smooth edges."""
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=2 * SIZE, skip_system_fonts=True))
    drawing = Image.open(io.BytesIO(png)).convert("RGBA")
    drawing.thumbnail((2 * SIZE, 2 * SIZE))
    canvas = Image.new("RGBA", (2 * SIZE, 2 * SIZE), "white")
    corner = ((2 * SIZE - drawing.width) // 2, (2 * SIZE - drawing.height) // 2)
    canvas.alpha_composite(drawing, corner)
    return np.asarray(canvas.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX))


def drawings_of(packages: Packages, style: str) -> dict[str, str]:
    """Code of an emoji -> its SVG in this style."""
    icons = packages.icons(style)
    codes = packages.read(f"@iconify-json/{style}", "chars.json")
    return {code.replace("-fe0f", ""): icons[name] for code, name in codes.items() if name in icons}


def choose_demo(packages: Packages, concepts: list[Concept]) -> dict[str, dict[str, str]]:
    """Mark the demo concepts (drawn in all four styles, capped) and return code -> SVG each."""
    drawings = {domain: drawings_of(packages, style) for domain, style in DOMAINS.items()}
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


def write_demo(out: Path, concepts: list[Concept], drawings: dict[str, dict[str, str]]) -> None:
    """Write emoji.zip (sorted, no clock time: the same bytes each time)."""
    members = {
        f"{domain}/{concept.label}/{concept.name.replace(' ', '-')}.png": svgs[concept.code]
        for domain, svgs in drawings.items()
        for concept in concepts
        if concept.in_demo
    }
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out / "emoji.zip.part", "w", zipfile.ZIP_STORED) as archive:
        for member in sorted(members):
            picture = Image.fromarray(render(members[member]))
            if picture.getcolors(256) is None:  # more than a palette holds: nearest 128 colours
                picture = picture.quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            else:
                picture = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
            stream = io.BytesIO()
            picture.save(stream, "PNG", optimize=True)
            info = zipfile.ZipInfo(member, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            archive.writestr(info, stream.getvalue())
    (out / "emoji.zip.part").replace(out / "emoji.zip")


def write_keywords(packages: Packages, out: Path, concepts: list[Concept]) -> None:
    """Describe each class by its members: CLDR name and up to four CLDR keywords of each."""
    tags = {
        emoji["hexcode"].lower().replace("-fe0f", ""): [tag.lower() for tag in emoji["tags"] if tag.isascii()]
        for emoji in packages.read(EMOJI_DATA, "en/data.json")
        if "tags" in emoji
    }
    described: dict[str, list[str]] = {label: [] for label in CLASSES}
    for concept in concepts:
        if concept.in_demo:
            phrases = set(concept.name.split()) | {concept.label, ""}
            extra = [tag for tag in tags.get(concept.code, []) if tag not in phrases][:4]
            article = "an" if concept.label[0] in "aeiou" else "a"
            text = f"{article} {concept.label}: {concept.name}"
            described[concept.label].append(f"{text}, {', '.join(extra)}" if extra else text)
    text = json.dumps(described, indent=1)
    (out / "keywords.json").write_text(text + "\n", encoding="utf-8")


def validation_drawings(packages: Packages, concepts: list[Concept]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The demo's concepts in the style that settings are chosen on: images and labels."""
    drawings = drawings_of(packages, VALIDATION)
    chosen = [concept for concept in concepts if concept.in_demo and concept.code in drawings]
    images = [render(drawings[concept.code]) for concept in chosen]
    return np.stack(images), np.array([list(CLASSES).index(concept.label) for concept in chosen])


def training_pairs(
    packages: Packages, concepts: list[Concept], aliases: dict[str, int]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
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
