"""FedOTP (Li, Huang, Wang, Shi, 2024)."""

from sheet import Cell, Document, Sheet, exactly

ROWS = {
    "Zero-Shot CLIP": "zero-shot",
    "CoOp": "coop",
    "PromptFL": "promptfl",
    "PromptFL+FT": "promptfl-ft",
    "PromptFL+FedProx": "promptfl-fedprox",
    "PromptFL+FedPer": "promptfl-fedper",
    "PromptFL+FedAMP": "promptfl-fedamp",
    "pFedPrompt": "pfedprompt",
    "FedOTP (Ours)": "fedotp",
    "FedOTP (Similarity Averaging)": "fedotp",
    "FedOTP (Classical OT)": "fedotp",
    "FedOTP (Unbalanced OT)": "fedotp",
}
UNBALANCED = {"method.transport": "unbalanced", "method.gamma": 0.8}
SETTINGS = {
    "FedOTP (Ours)": UNBALANCED,
    "FedOTP (Unbalanced OT)": UNBALANCED,
    "FedOTP (Similarity Averaging)": {"method.transport": "averaging"},
    "FedOTP (Classical OT)": {"method.transport": "classical"},
}
FIVE = ("food101", "dtd", "caltech101", "flowers102", "oxford-pets")
OFFICE = ("amazon", "caltech", "dslr", "webcam")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
SHORT = ("CoOp", "PromptFL", "PromptFL+FedProx")  # rows of the smaller tables
GAMMAS = (1, 0.9, 0.8, 0.7, 0.6, 0.5)


def read(text: Document) -> Sheet:
    sheet = Sheet("fedotp")
    sheet.cells += [*_five(text), *_domains(text), *_many_clients(text), *_transports(text)]
    sheet.cells += [*_sizes(text), *_shifts(text), *_gammas(text), *_alphas(text)]
    _judge(sheet)
    return sheet


def _row(text: Document, line: int) -> str:
    """The method of a line, without the number of its reference."""
    name = text.row(line)[0].split(" [")[0]
    if name not in ROWS:
        raise ValueError(f"line {line} names {name!r}")
    return name


def _line(text: Document, item: str, line: int, places: list[tuple[str, str, dict[str, object]]]) -> list[Cell]:
    """The numbers of a line, one for each place: data, column, settings of the run."""
    row = _row(text, line)
    out = []
    numbers = exactly(len(places), text.numbers(line), line)
    for (data, column, how), (value, deviation) in zip(places, numbers, strict=True):
        settings = {**SETTINGS.get(row, {}), **how}
        out.append(Cell(item, row, data, ROWS[row], settings, column, value, line, deviation))
    return out


def _five(text: Document) -> list[Cell]:
    lines = (177, 178, *range(180, 187))
    places = [(data, "own", {}) for data in FIVE]
    return [entry for line in lines for entry in _line(text, "T1", line, places)]


def _domains(text: Document) -> list[Cell]:
    how = {"clients.partition": "domain-dirichlet", "clients.count": 5, "clients.alpha": 0.1}
    places = [("domainnet-10", f"mean {domain}", how) for domain in DOMAINNET]
    places.append(("domainnet-10", "own", how))
    lines = (214, 215, 217, 218, 219)
    return [entry for line in lines for entry in _line(text, "T2", line, places)]


def _many_clients(text: Document) -> list[Cell]:
    how = {"clients.partition": "dirichlet", "clients.count": 100, "clients.alpha": 0.3}
    # the public code draws it in two levels
    coarse = {**how, "clients.partition": "coarse-dirichlet"}
    places = [("cifar10", "own", how), ("cifar100", "own", coarse)]
    return [entry for line in (229, 230, 232, 233, 234) for entry in _line(text, "T3", line, places)]


def _transports(text: Document) -> list[Cell]:
    places = [(data, "own", {"clients.shots": shots}) for data in FIVE for shots in (2, 8)]
    return [entry for line in (252, 253, 254) for entry in _line(text, "T4", line, places)]


def _sizes(text: Document) -> list[Cell]:
    sets = ("caltech101", "flowers102", "oxford-pets", "food101", "dtd", "cifar10", "cifar100")
    out = []
    for line, data in enumerate((*sets, "domainnet-10", "office-caltech-10"), 498):
        columns = ("classes", "training rows", "test rows", "domains")
        numbers = exactly(4, text.numbers(line), line)
        for column, (value, _) in zip(columns, numbers, strict=True):
            out.append(Cell("A1", "data", data, "", {}, column, value, line, round=""))
    return out


def _shifts(text: Document) -> list[Cell]:
    plain = {"clients.partition": "domain"}
    places = [("office-caltech-10", column, plain) for column in (*OFFICE, "own")]
    places += [("domainnet-10", column, plain) for column in (*DOMAINNET, "own")]
    out = [entry for line in (532, 533, 535, 536, 537) for entry in _line(text, "A2", line, places)]
    how = {"clients.partition": "domain-dirichlet", "clients.count": 3, "clients.alpha": 0.1}
    columns = [*(f"mean {domain}" for domain in OFFICE), "own"]
    places = [("office-caltech-10", column, how) for column in columns]
    lines = (549, 550, 552, 553, 554)
    return out + [entry for line in lines for entry in _line(text, "A3", line, places)]


def _gammas(text: Document) -> list[Cell]:
    out = []
    for number, line in enumerate(range(564, 584)):
        data, shots = FIVE[1 + number // 5], 2 ** (number % 5)
        text.expect(line, f"{shots} shot")
        numbers = exactly(6, text.numbers(line), line)
        for gamma, (value, deviation) in zip(GAMMAS, numbers, strict=True):
            how = {**UNBALANCED, "method.gamma": float(gamma), "clients.shots": shots}
            row = f"γ = {gamma}"
            out.append(Cell("A4", row, data, "fedotp", how, "own", value, line, deviation))
    return out


def _alphas(text: Document) -> list[Cell]:
    how = {"clients.partition": "coarse-dirichlet", "clients.count": 100}
    alphas = (0.1, 0.3, 0.5, 1.0, 5.0, 10.0)
    places = [("cifar100", "own", {**how, "clients.alpha": alpha}) for alpha in alphas]
    lines = (605, 606, *range(608, 613))
    return [entry for line in lines for entry in _line(text, "A5", line, places)]


def _judge(sheet: Sheet) -> None:
    cells = sheet.cells
    sheet.void(
        "the public code gives every class a random name",
        (entry for entry in sheet.of("T2", "A2", "A3")),
    )
    sheet.void(
        "in the public code the proximal term has no gradient",
        (entry for entry in cells if entry.method == "promptfl-fedprox"),
    )
    copied = ("pfedprompt", "promptfl-ft", "promptfl-fedper", "promptfl-fedamp")
    sheet.void("from pFedPrompt's paper", (entry for entry in sheet.of("T1") if entry.method in copied), "copied")
    for own_cell in [entry for entry in sheet.of("T1", "T4") if entry.settings.get("method.gamma")]:
        shots = own_cell.settings.get("clients.shots", 4)
        tried = [
            entry
            for entry in sheet.of("A4")
            if entry.data == own_cell.data and entry.settings["clients.shots"] == shots
        ]
        if not tried:
            continue  # table A4 has no Food101
        best = max(tried, key=lambda entry: float(entry.value))
        if (best.value, best.deviation) != (own_cell.value, own_cell.deviation):
            raise ValueError(f"line {own_cell.line}: {own_cell.value} is not the best of {best.line}")
        gamma = best.settings["method.gamma"]
        sheet.void(f"the best of six γ on the test rows of table A4 ({gamma:g})", [own_cell])
    for item, count in (("T2", 6), ("A2", 4), ("A2", 6), ("A3", 4)):
        for mean_cell in [entry for entry in sheet.of(item) if entry.column == "own"]:
            part_cells = [
                entry for entry in sheet.of(item) if (entry.line, entry.data) == (mean_cell.line, mean_cell.data)
            ]
            if len(part_cells) == count + 1:
                sheet.check_mean(mean_cell, part_cells[:-1])
