"""TOFA, training-free one-shot adaptation of vision-language models, 2025."""

from fedotp import DOMAINNET, OFFICE
from sheet import Cell, Document, Sheet, exactly

ROWS = {
    "CoOp": "coop",
    "PromptFolio": "promptfolio",
    "DP-PFL": "dp-fpl",
    "PromptFL": "promptfl",
    "pFedPromp": "pfedprompt",
    "Zero-Shot CLIP": "zero-shot",
    "CLIP-GDA": "clip-gda",
    "FedLPA+PromptFL": "fedlpa",
    "FENS+PromptFL": "fens",
    "FedBEns+PromptFL": "fedbens",
    "TOFA (Ours)": "tofa",
    "FedAvg": "fedavg-tower",  # of what network is not said
    "Oneshot+PromptFL": "",  # the best of three
}
FULL_METHOD = {"method.visual": True, "method.text": True, "method.fusion": True, "method.alpha": 1.0}
EXACT = ("tofa", "zero-shot", "clip-gda")  # nothing is trained, so that there is one round at most


def read(text: Document) -> Sheet:
    sheet = Sheet("tofa")
    five = ("oxford-pets", "flowers102", "food101", "caltech101", "dtd")
    places = [(data, "own", {"clients.shots": 16}) for data in five]
    sheet.cells += [entry for line in range(197, 208) for entry in _line(text, "T1", line, places)]
    how = {"clients.partition": "dirichlet", "clients.count": 100, "clients.alpha": 0.3}
    places = [(data, "own", how) for data in ("cifar10", "cifar100")]
    sheet.cells += [entry for line in range(224, 229) for entry in _line(text, "T2", line, places)]
    places = [("domainnet-10", column, {}) for column in (*DOMAINNET, "own")]
    places += [("office-caltech-10", column, {}) for column in (*OFFICE, "own")]
    sheet.cells += [entry for line in range(236, 245) for entry in _line(text, "T3", line, places)]
    _judge(sheet)
    return sheet


def _line(text: Document, item: str, line: int, places: list[tuple[str, str, dict[str, object]]]) -> list[Cell]:
    row = text.row(line)[0]
    method = ROWS[row]
    out = []
    numbers = exactly(len(places), text.numbers(line), line)
    for (data, column, how), (value, _) in zip(places, numbers, strict=True):
        settings = {**(FULL_METHOD if method == "tofa" else {}), **how}
        chosen = "last" if method in EXACT else "not said"
        out.append(Cell(item, row, data, method, settings, column, value, line, round=chosen))
    return out


def _judge(sheet: Sheet) -> None:
    first = sheet.of("T1")
    sheet.void(
        "FedOTP's table 1 with RN50, one digit of it changed for Flowers102",
        (entry for entry in first if entry.method == "pfedprompt"),
    )
    sheet.void(
        "a row of cells of FedOTP's table 1 with RN50, two of them of other data sets",
        (entry for entry in first if entry.method == "promptfl"),
    )
    sheet.void(
        "FedOTP's table 1 prints it for RN50",
        (entry for entry in first if entry.method == "coop" and entry.data == "food101"),
    )
    copied = ("zero-shot", "coop", "promptfl")
    sheet.void("FedOTP's table 3", (entry for entry in sheet.of("T2") if entry.method in copied), "copied")
    sheet.void("of what network is not said", (entry for entry in sheet.cells if entry.row == "FedAvg"))
    third = sheet.of("T3")
    sheet.void("FedOTP's own row, but for two cells", (entry for entry in third if entry.method == "dp-fpl"))
    sheet.void("FedOTP's row, but for one cell", (entry for entry in third if entry.method == "zero-shot"))
    sheet.void(
        "its zero-shot row is FedOTP's, whose public code gives every class a random name",
        sheet.of("T3"),
    )
    for data, count in (("domainnet-10", 6), ("office-caltech-10", 4)):
        for row in dict.fromkeys(entry.row for entry in sheet.of("T3")):
            *parts, mean_cell = [entry for entry in sheet.of("T3") if (entry.row, entry.data) == (row, data)]
            if len(parts) != count:
                raise ValueError(f"{row} has {len(parts)} cells and not {count}")
            sheet.check_mean(mean_cell, parts)
