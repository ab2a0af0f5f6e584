"""Check the hand-written pages: length of sentences, paragraphs and the whole, and words of our own.

usage: python -m tools.prose     (`make docs` calls it)
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 36_000  # of all pages by hand, without the README
MAX_PARAGRAPH_WORDS = 90
MAX_SENTENCE_WORDS = 40  # the goal is 25
MAX_README_LINES = 150
# Pages that a program writes, besides those in folders called `generated`.
GENERATED = (
    "docs/how-to/recording.md",
    "docs/papers/appendix.md",
    "docs/papers/benchmarks.md",
    "docs/reference/contract.md",
    "docs/reference/licences.md",
    "docs/security/tests-passed.md",
)
# What not to write, and what the field writes instead.
PRIVATE = {
    r"(training|validation|test|own|client's|site's|public|pooled|calibration|held) rows": "samples",
    r"slopes?": "gradient",
    r"heats|line up|legs of": "rungs, candidates",
    r"share of hits|hits": "accuracy, correct",
    r"(?<!standard )deviations?": "standard deviation",
    r"as a share|shares? of the": "fraction",
    r"bars": "baselines",
    r"(?<!key )exchanges?": "round",
    r"heat(?! ?maps?)": "temperature",
    r"parcels?": "message",
    r"sealed": "checksummed",
    r"shelf|shelves": "store",
    r"crowds?": "cohort",
    r"withheld": "suppressed",
    r"kin": "family",
    r"doors?|desks?": "port, access control",
    r"what (was|is) said|is told|are told": "say who reports what",
}
WORD = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", re.IGNORECASE)


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the text of each hand-written page by its path; tables between marks are generated."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    named = {str(path.relative_to(root)): path for path in paths if "generated" not in path.relative_to(root).parts}
    texts = {
        name: re.sub(r"(?ms)^<!-- (table|uploads)\b.*?^<!-- \1 ends? -->$", "", path.read_text(encoding="utf-8"))
        for name, path in named.items()
        if name not in GENERATED
    }
    if (index := root / "docs/papers/tables/index.toml").exists():  # the appendix is generated from it
        sections = tomllib.loads(index.read_text(encoding="utf-8"))["section"]
        texts["docs/papers/tables/index.toml"] = "\n\n".join(text for s in sections for text in (s["title"], s["note"]))
    return texts


def paragraphs(text: str) -> Iterator[str]:
    """Yield prose, items of lists and cells of tables; code and headings are left out."""
    text = re.sub(r"(?ms)^([ ]*)(```+|:::+).*?^\1\2\s*$", "\n", text)
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not re.match(r"\s*(\||#|<!--)", line)]
        yield from filter(str.strip, re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)))
        for row in re.findall(r"(?m)^\s*\|(.*)\|\s*$", block):
            yield from (cell for cell in re.split(r"(?<!\\)\|", row) if cell.strip(" -:"))


def plain(text: str) -> str:
    """Replace code by one word and links by their text."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "CODE", text))
    return " ".join(text.replace("*", "").split())


def words(text: str) -> int:
    """Count the words, not signs such as those of a table."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def sentences(paragraph: str) -> list[str]:
    """Split plain text at the ends of sentences."""
    return re.split(r"(?<=[.!?])[)\"]?\s+(?=[A-Z(\"])", plain(paragraph))


def findings(text: str) -> list[str]:
    """Return what is wrong with a page, one line each."""
    found = []
    for paragraph in paragraphs(text):
        start = " ".join(paragraph.split()[:8])
        if words(plain(paragraph)) > MAX_PARAGRAPH_WORDS:
            found.append(f"paragraph of {words(plain(paragraph))} words: {start} ...")
        for sentence in sentences(paragraph):
            if words(sentence) > MAX_SENTENCE_WORDS and not re.fullmatch("(CODE[, ]*)+", sentence):  # a list of names
                found.append(f"sentence of {words(sentence)} words: {' '.join(sentence.split()[:8])} ...")
        for match in WORD.finditer(plain(paragraph)):
            better = next(word for key, word in PRIVATE.items() if re.fullmatch(key, match[0], re.IGNORECASE))
            found.append(f"{match[0]!r}: write {better}; in: {start} ...")
    return found


def total_words(texts: dict[str, str]) -> int:
    return sum(words(text) for name, text in texts.items() if name.startswith("docs/"))


def check(texts: dict[str, str]) -> list[str]:
    """Return everything that is wrong with the pages together."""
    found = [f"{name}: {line}" for name in texts for line in findings(texts[name])]
    if total_words(texts) > MAX_WORDS:
        found.append(f"docs: {total_words(texts)} words by hand, at most {MAX_WORDS}")
    lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    return found + ([f"README.md: {lines} lines, at most {MAX_README_LINES}"] if lines > MAX_README_LINES else [])


def main() -> None:
    texts = pages()
    found = check(texts)
    lengths = [words(line) for text in texts.values() for part in paragraphs(text) for line in sentences(part)]
    prose = [length for length in lengths if length > 4]  # cells of tables are often not sentences
    print(f"{total_words(texts)} words by hand (at most {MAX_WORDS}); {sum(prose) / len(prose):.1f} words a sentence")
    print(f"{sum(length > 25 for length in prose)} of {len(prose)} sentences have more than 25 words")
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
