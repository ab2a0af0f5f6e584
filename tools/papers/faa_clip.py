"""FAA-CLIP (Wu, Chaddad, Desrosiers, Daqqaq, Kateb, 2025)."""

from dataclasses import replace

from sheet import Cell, Document, Sheet, exactly

HOME = {"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World"}
MODERN = {"A": "amazon", "D": "dslr", "S": "synthetic", "W": "webcam"}
ROWS = {
    "FedCLIP": "fedclip",
    "FedProx": "fedprox-tower",
    "FedAVG": "fedavg-tower",
    "MOON": "moon-tower",
    "LoRA": "lora",
    "PromptFL": "promptfl",
    "Ours": "faa-clip",
}
FULL = {"method.adaptation": True, "method.local_norm": False, "method.shared_discriminator": False}
FULL_MASK = {"method.mask": "full", **FULL}
SETTINGS = {"lora": {"method.rank": 3}, "faa-clip": FULL_MASK}
SOURCES = ("client-0", "client-1", "client-2")  # C_1 to C_3 of the medical sets


def cell(item: str, row: str, data: str, column: str, value: str, line: int, **extra: object) -> Cell:
    method = ROWS[row]
    settings = {**SETTINGS.get(method, {}), **extra}
    return Cell(item, row, data, method, settings, column, value, line, round="oracle")


def read(text: Document) -> Sheet:
    sheet = Sheet("faa-clip")
    sheet.cells += [*_rows(text), *_minutes(text)]
    sheet.cells += _targets(text, "TIII", "office-home", HOME, ("ACPR", "CPRA", "APRC", "ACRP"), 206)
    sheet.cells += _targets(text, "TIV", "modern-office-31", MODERN, ("ADSW", "DSWA", "SWAD", "WADS"), 250)
    sheet.cells += [*_balanced(text), *_multi(text), *_ablations(text), *_layers(text)]
    sheet.cells += [*_one_domain(text), *_prose(text)]
    _judge(sheet)
    return sheet


def _rows(text: Document) -> list[Cell]:
    """Rows of each client."""
    out = []
    sets = (
        ("office-home", HOME.values()),
        ("modern-office-31", MODERN.values()),
        ("skin-cancer", (*SOURCES, "target")),
        ("brain-tumour", (*SOURCES, "target")),
        ("hyper-kvasir", (*SOURCES, "target")),
    )
    for line, (data, names) in enumerate(sets, 147):
        for name, printed in zip(names, text.row(line)[1:5], strict=True):
            value = printed.split("(")[1].rstrip(")")
            out.append(Cell("TI", "rows", data, "", {}, f"rows {name}", value, line, round=""))
    return out


def _minutes(text: Document) -> list[Cell]:
    out = []
    sets = ("office-home", "modern-office-31", "brain-tumour", "skin-cancer")
    for line in range(171, 178):
        row = _name(text, line)
        numbers = text.numbers(line)
        for data, (value, _) in zip(sets, exactly(4, numbers, line), strict=True):
            entry = cell("TII", row, data, "minutes per round", value, line)
            out.append(replace(entry, round=""))
    return out


def _name(text: Document, line: int) -> str:
    """The method a line is about; the first cells may hold a sideways title in pieces."""
    names = [word for cell in text.row(line) for word in ROWS if cell.startswith(word)]
    if len(names) != 1:
        raise ValueError(f"line {line} names {names}")
    return names[0]


def _targets(
    text: Document, item: str, data: str, names: dict[str, str], orders: tuple[str, ...], start: int
) -> list[Cell]:
    """A block of seven methods for each unseen domain, which comes last, before the mean."""
    out = []
    for block, order in enumerate(orders):
        target = names[order[-1]]
        columns = [f"accuracy {names[letter]}" for letter in order[:-1]]
        for line in range(start + 8 * block, start + 8 * block + 7):
            numbers = exactly(5, text.numbers(line), line)
            for column, (value, _) in zip([*columns, "target accuracy", "average"], numbers, strict=True):
                out.append(cell(item, _name(text, line), data, column, value, line, target=[target]))
    return out


def _balanced(text: Document) -> list[Cell]:
    out = []
    for line in range(286, 300):
        data = "skin-cancer" if line < 293 else "hyper-kvasir"
        numbers = exactly(10, text.numbers(line), line)
        for at, (value, _) in enumerate(numbers):
            name = ("balanced", "F1")[at % 2]
            place = (*SOURCES, "target", "average")[at // 2]
            column = f"{name} {place}" if at < 6 else f"{place} {name}"
            out.append(cell("TV", _name(text, line), data, column, value, line))
    return out


def _multi(text: Document) -> list[Cell]:
    out = []
    clients = [f"accuracy {HOME[letter]}-{at}" for letter in "ACP" for at in range(5)]
    how = {"clients.partition": "domain-dirichlet", "clients.count": 5, "target": ["Real World"]}
    for line in range(323, 330):
        numbers = exactly(17, text.numbers(line), line)
        columns = [*clients, "target accuracy", "average"]
        for column, (value, _) in zip(columns, numbers, strict=True):
            out.append(cell("TVI", _name(text, line), "office-home", column, value, line, **how))
    return out


def _ablations(text: Document) -> list[Cell]:
    out = []
    rows = (
        ("Ours", FULL_MASK),
        ("w/ deeper FAM", {**FULL_MASK, "method.mask": "deeper"}),
        ("w/o shared BN", {**FULL_MASK, "method.local_norm": True}),
        ("w/ shared D", {**FULL_MASK, "method.shared_discriminator": True}),
    )
    home = {"target": ["Real World"]}
    for line, data, names, how in (
        (338, "office-home", ("Art", "Clipart", "Product"), home),
        (340, "brain-tumour", SOURCES, {}),
    ):
        columns = [*(f"accuracy {name}" for name in names), "target accuracy", "average"]
        # The four rows of a block are printed in one line, the four numbers of a column in a cell.
        packed = [entry.split() for entry in text.row(line)[1:]]
        for column, values in zip(columns, packed, strict=True):
            for (row, settings), value in zip(rows, values, strict=True):
                all_settings = {**settings, **how}
                out.append(Cell("TVII", row, data, "faa-clip", all_settings, column, value, line, round="oracle"))
    columns = [*(f"accuracy {name}" for name in SOURCES), "target accuracy", "average"]
    for column, (value, _) in zip(columns, exactly(5, text.numbers(342), 342), strict=True):
        entry = cell("TVII", "Ours", "skin-cancer", column, value, 342)
        out.append(replace(entry, row="w/o DA", settings={**FULL_MASK, "method.adaptation": False}))
    return out


def _layers(text: Document) -> list[Cell]:
    """The mask without some of its five layers."""
    out = []
    masks = ("linear", "linear, norm", "no second", "no norm", "full")
    for line, mask in zip(range(355, 360), masks, strict=True):
        numbers = exactly(12, text.numbers(line), line)
        for at, (value, _) in enumerate(numbers):
            data = ("office-home", "brain-tumour", "skin-cancer")[at // 4]
            names = ("Art", "Clipart", "Product") if data == "office-home" else SOURCES
            column = "target accuracy" if at % 4 == 3 else f"accuracy {names[at % 4]}"
            how = {"target": ["Real World"]} if data == "office-home" else {}
            entry = cell("TVIII", "Ours", data, column, value, line, **{"method.mask": mask}, **how)
            out.append(replace(entry, row=f"fea {masks.index(mask) + 1}"))
    return out


def _one_domain(text: Document) -> list[Cell]:
    out = []
    for start, by, target in (
        (389, "dirichlet", ["Clipart"]),
        (397, "pathological", ["Art", "Clipart", "Product"]),
    ):
        how = {"clients.partition": by, "clients.count": 5, "clients.domains": ["Real World"]}
        for line in range(start, start + 7):
            numbers = exactly(7, text.numbers(line), line)
            clients = [f"accuracy client-{at}" for at in range(5)]
            for column, (value, _) in zip([*clients, "target accuracy", "average"], numbers, strict=True):
                row = _name(text, line)
                out.append(cell("TIX", row, "office-home", column, value, line, target=target, **how))
    return out


def _prose(text: Document) -> list[Cell]:
    """Numbers of figures that the text repeats."""
    text.check_numbers(307, "88.18")
    text.check_numbers(309, "71.18", "77.37")
    text.check_numbers(344, "3.12", "4.13", "1.16", "0.59")
    real = {"target": ["Real World"]}
    return [
        cell("F4", "Ours", "brain-tumour", "average", "88.18", 307),
        cell("F4", "PromptFL", "skin-cancer", "average", "71.18", 309),
        cell("F4", "Ours", "skin-cancer", "average", "77.37", 309),
        *(
            cell("F8", row, "office-home", column, value, 344, **real)
            for row, column, value in (
                ("Ours", "ECE Art", "3.12"),
                ("FedCLIP", "ECE Art", "4.13"),
                ("Ours", "target ECE", "1.16"),
                ("FedCLIP", "target ECE", "0.59"),
            )
        ),
    ]


def _judge(sheet: Sheet) -> None:
    third = sheet.of("TIII")
    sheet.void("the same as FedAVG in every cell", (entry for entry in third if entry.row == "FedProx"))
    sheet.void(
        "from FedCLIP's paper, with other splits",
        (entry for entry in third if entry.row in ("FedAVG", "FedCLIP")),
        "copied",
    )
    at: dict[tuple[object, ...], list[Cell]] = {}
    for entry in sheet.of("TIII", "TIV", "TV", "TVI", "TVII", "TIX"):
        metric = next((name for name in ("balanced", "F1") if name in entry.column), "")
        key = (entry.item, entry.data, entry.row, str(entry.settings), metric)
        at.setdefault(key, []).append(entry)
    for group in at.values():
        *parts, total = group
        if not total.column.startswith("average"):
            raise ValueError(f"line {total.line}: the mean is not last")
        sheet.check_mean(total, parts)
    sheet.void(
        "three domains as one set, of which ours is the mean over domains",
        (
            entry
            for entry in sheet.of("TIX")
            if entry.settings["clients.partition"] == "pathological" and entry.column in ("target accuracy", "average")
        ),
    )
