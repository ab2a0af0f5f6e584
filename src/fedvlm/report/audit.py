"""An audit for a person: what is in an upload, and what it says of each client."""

from typing import Any

from fedvlm.record import AUDIT_FILE, Record
from fedvlm.report.tables import render_table
from fedvlm.runner.audit import Line
from fedvlm.storage.sealed import read_json, write_json


def write_audit(result: Record, lines: list[Line]) -> None:
    """In the run's folder, in the place of an audit that was kept before."""
    write_json(result.folder / AUDIT_FILE, {"lines": lines})


def read_audit(result: Record) -> list[Line]:
    """The audit that was kept, if one was."""
    path = result.folder / AUDIT_FILE
    return list(read_json(path)["lines"]) if path.exists() else []


def audit_table(lines: list[Line], form: str = "text") -> str:
    """The lines for a person: what is in an upload, then client by client what it says."""
    if not lines:
        return "nothing is uploaded\n"
    fields = {(line["exchange"], key): field for line in lines for key, field in line["fields"].items()}
    first = [
        [exchange, key, f"{field['dtype']} {tuple(field['shape'])}", f"{field['bytes']}"]
        for (exchange, key), field in fields.items()
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
            render_table(["exchange", "field", "what", "bytes"], first, form, align_left=True),
            render_table([*names, *areas, "ε"], body, form),
        ]
    )
