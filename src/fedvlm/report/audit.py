"""An audit for a person: what is in an upload, and what it says of each client."""

from typing import Any

from fedvlm.record import AUDIT, Record
from fedvlm.report.tables import render
from fedvlm.runner.audit import Line
from fedvlm.storage.sealed import read_json, write_json


def keep(result: Record, lines: list[Line]) -> None:
    """In the run's folder, in the place of an audit that was kept before."""
    write_json(result.folder / AUDIT, {"lines": lines})


def kept(result: Record) -> list[Line]:
    """The audit that was kept, if one was."""
    path = result.folder / AUDIT
    return list(read_json(path)["lines"]) if path.exists() else []


def table(lines: list[Line], form: str = "text") -> str:
    """The lines for a person: what is in an upload, then client by client what it says."""
    if not lines:
        return "nothing is uploaded\n"
    fields = {(line["exchange"], key): one for line in lines for key, one in line["fields"].items()}
    first = [
        [which, key, f"{one['dtype']} {tuple(one['shape'])}", f"{one['bytes']}"]
        for (which, key), one in fields.items()
    ]
    names = ["client", "exchange", "bytes", "classes", "smallest class"]
    areas = ["AUC upload", "AUC shared", "AUC personal"]

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    body = [
        [
            *(cell(line[key]) for key in (*names, *areas)),
            cell("inf" if line["epsilon"] is None else line["epsilon"]),
        ]
        for line in lines
    ]
    return "\n".join(
        [
            render(["exchange", "field", "what", "bytes"], first, form, words=True),
            render([*names, *areas, "ε"], body, form),
        ]
    )
