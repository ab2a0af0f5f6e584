"""Writes experiments/papers/*.csv from the texts of the papers: python tools/papers/transcribe.py FOLDER.

FOLDER holds the five documents as text, found by their words; none is part of this repository.
With --check nothing is written, and the exit code says whether the files are what FOLDER gives.
"""

import sys
from collections import Counter
from pathlib import Path

import faa_clip
import fedot
import fedot_later
import fedotp
import tofa
from sheet import Document, Sheet

OUT = Path(__file__).parents[2] / "experiments" / "papers"
# Words that only this document has in a line of its own, and what reads it.
DOCUMENTS = {
    "Table 10: The comprehensive accuracy of Office-Home, VLCS, and TerraIncognita.": fedot.first,
    "Cross-Device Scalability Analysis": fedot_later.second,
    "TABLE IX: Testing accuracy (%) in OfficeHome dataset": faa_clip.read,
    "Figure A5. T-SNE projection of local prompts from FedOTP": fedotp.read,
    "Figure 1: Overall Framework of TOFA": tofa.read,
}


def sheets(folder: Path) -> list[Sheet]:
    texts = [(path, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.txt"))]
    out = []
    for words, read in DOCUMENTS.items():
        paths = [path for path, text in texts if words in text]
        if len(paths) != 1:
            sys.exit(f"{folder} has {len(paths)} documents with {words!r}; it takes one")
        out.append(read(Document(paths[0])))
    return out


def main() -> None:
    check = "--check" in sys.argv
    (folder,) = [argument for argument in sys.argv[1:] if argument != "--check"]
    stale = []
    for sheet in sheets(Path(folder)):
        path, text = OUT / f"{sheet.stem}.csv", sheet.text()
        items = Counter(cell.item for cell in sheet.cells)
        status = Counter(cell.status for cell in sheet.cells)
        deviations = sum(bool(cell.deviation) for cell in sheet.cells)
        print(f"{sheet.stem}: {len(sheet.cells)} numbers, {deviations} deviations, {dict(status)}")
        print(f"  {dict(items)}; {len(sheet.slips)} means that their cells do not give")
        for slip in sheet.slips:
            print(f"  {slip}")
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"not what the documents give: {', '.join(stale)}")


if __name__ == "__main__":
    main()
