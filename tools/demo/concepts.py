"""The things that are drawn and the words said of them, read from packages of npm."""

import json
import re
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .sets import CLASSES, EMOJI_DATA, EMOJI_WORDS, NOT_OF_CLASS


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
