"""FedOT (Kong, Yeom, Jeon, Kim, 2025), the later version, without table 1."""

from dataclasses import replace

from fedot import RANDOM, TEXT
from sheet import Cell, Document, Sheet, exactly


def second(text: Document) -> Sheet:
    sheet = Sheet("fedot", "v2")
    sheet.cells += [*_prose(text), *_conflict(text), *_compared(text)]
    _judge_second(sheet)
    return sheet


def _prose(text: Document) -> list[Cell]:
    """Numbers of table 1 and figure 5 that the text repeats; the document lacks both."""
    text.check_numbers(82, "86.10", "88.58", "78.53", "94.55", "97.34", "96.85", "96.64", "96.28", "84.54")
    text.check_numbers(122, "71.18", "44.00", "73.54", "65.30")
    shared_block, default_blocks = {"method.blocks": 1, **TEXT}, {}
    table = (
        ("mean of five", "FedOT(+B)", "fedot", {}, "GPC", ("78.53", "88.58", "86.10")),
        ("mean of five", "FedOT(All Local)", "fedot-all-local", default_blocks, "P", ("84.54",)),
        ("pacs", "FedOT(All Global)", "fedot-all-global", default_blocks, "GPC", ("94.55", "96.85", "96.28")),
        ("pacs", "FedOT", "fedot", shared_block, "PC", ("97.34", "96.64")),
    )
    out = [
        Cell("T1", row, data, method, settings, column, value, 82)
        for data, row, method, settings, columns, values in table
        for column, value in zip(columns, values, strict=True)
    ]
    for row, method, settings, n, value in (
        ("CLIP Zero-Shot", "zero-shot", {}, 75, "44.00"),
        ("FedOT", "fedot", shared_block, 75, "71.18"),
        ("PromptFL", "promptfl", {}, 40, "73.54"),
        ("PromptFL", "promptfl", {}, 75, "65.30"),
    ):
        out.append(Cell("F5", row, "femnist", method, settings, f"unseen, n={n}", value, 122))
    return out


SETS = {"FEMNIST": "femnist", "VLCS": "vlcs", "TerraIncognita": "terra-incognita"}
SETS |= {"PACS": "pacs", "OfficeHome": "office-home", "Office-Home": "office-home"}


def _conflict(text: Document) -> list[Cell]:
    out = []
    shared_block = {"method.blocks": 1, **TEXT}
    kinds = (
        ("FedOT", "fedot", shared_block),
        ("FedLT", "fedlt", TEXT),
        ("FedAdapter", "fedadapter", TEXT),
    )
    for line in range(88, 93):
        name, *rest = text.row(line)
        for (row, method, settings), pair in zip(kinds, rest, strict=True):
            value, deviation = pair.split()
            data = SETS[name]
            out.append(Cell("T2", row, data, method, settings, "cosine", value, line, deviation))
    for line in range(96, 101):
        name = text.row(line)[0]
        four = [value for value, _ in exactly(4, text.numbers(line), line)]
        for at, (row, method, settings) in enumerate(kinds[:2]):
            entry = Cell("T3", row, SETS[name], method, settings, "G", four[2 * at], line)
            kappa = replace(entry, column="kappa", value=four[2 * at + 1], round="last")
            out += [entry, kappa]
    return out


def _compared(text: Document) -> list[Cell]:
    out = []
    for line in range(113, 118):
        data = SETS[text.row(line)[0]]
        for at, (value, _) in enumerate(exactly(6, text.numbers(line), line)):
            row, head = (("TextEnc", TEXT), ("RandInit", RANDOM))[at // 3]
            settings = {"method.blocks": 1, **head}
            out.append(Cell("T4", row, data, "fedot", settings, "GPC"[at % 3], value, line))
    return out


def _judge_second(sheet: Sheet) -> None:
    cells = sheet.cells
    sheet.void(
        "which writers make up the four users is not said",
        (entry for entry in cells if entry.data == "femnist" and entry.item != "F5"),
    )
    shifted = ("vlcs", "terra-incognita")
    sheet.void(
        "the first version, or another table of this one, prints other numbers",
        (entry for entry in cells if entry.item in ("T3", "T4") and entry.data in shifted),
    )
    home = [entry for entry in sheet.of("T4") if entry.data == "office-home" and entry.column != "G"]
    sheet.void("the first version prints 85.13 and 87.66 for P of the same settings", home)
    sheet.void(
        "the first version prints another accuracy with the same condition number",
        (entry for entry in sheet.of("T3") if entry.method == "fedlt"),
    )
    for c in [entry for entry in sheet.of("T4") if entry.column == "C"]:
        gp = [entry for entry in sheet.of("T4") if (entry.data, entry.row) == (c.data, c.row)][:2]
        sheet.check_mean(c, gp, (1, 3))
