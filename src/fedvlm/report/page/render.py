"""The model as one HTML file."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedvlm.evaluate import metrics
from fedvlm.record import Record
from fedvlm.report.page import apart, charts, panels
from fedvlm.report.page.gather import build_model
from fedvlm.report.page.read import Model, model_json
from fedvlm.report.page.svg import line_class
from fedvlm.report.tables import format_cell
from fedvlm.storage.files import write_file
from fedvlm.storage.sealed import CHECKSUM_KEY
from fedvlm.storage.toml import flatten


def write_page(
    records: Sequence[Record],
    out: Path,
    title: str = "",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    command: str = "",
) -> Path:
    """One page of all these runs."""
    return write_model(build_model(records, title, paper, command), out)


def write_model(model: Model, out: Path) -> Path:
    write_file(out, render_page(model).encode())
    return out


def render_page(model: Model) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedvlm.report.page", "templates")
    env = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals.update(colour=line_class)
    env.filters.update(percent=format_percent, heat=shade_class)
    return env.get_template("report.html").render(
        **page_shell(),
        model=model,
        data=embed_model(model),
        rows=main_table_rows(model),
        charts=charts,
        panels=panels,
        apart=apart,
        odd=differing_settings(model),
    )


def page_shell(script: str = "", more_style: str = "", extra_policy: str = "") -> dict[str, Any]:
    """What every page of ours has: style, script, and a policy that lets nothing else in.

    A page may have another script, and a rule more.
    """
    style = _read_static("style.css") + more_style
    script = script or _read_static("script.js")
    policy = (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; "
        f"img-src data:; base-uri 'none'; form-action 'none'{'; ' * bool(extra_policy)}{extra_policy}"
    )
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


def _read_static(name: str) -> str:
    text = (files("fedvlm.report.page") / "static" / name).read_text("utf-8")
    assert "</" not in text, f"{name} would end its own element"
    return text


def _csp_hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def embed_model(model: Model) -> Markup:
    """JSON that no name in it can break out of, with a checksum of all that it says."""
    plain = model_json({**model, CHECKSUM_KEY: sha256(model_json(model).encode()).hexdigest()})
    for letter in "<>&":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(plain)


def format_percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def shade_class(value: float | None) -> str:
    """One of eleven shades."""
    return "" if value is None else f"h{max(0, min(10, round(10 * value)))}"


def main_table_rows(model: Model) -> list[dict[str, Any]]:
    """The table's rows: per column the words, the number to sort by, and what it is to the best."""
    out = []
    for place, run in enumerate(model["runs"]):
        spread = metrics.mean_and_std(run["tables"])
        cells = []
        for column in model["columns"]:
            mean, deviation = spread.get(column, (None, None))
            verdict = model["verdicts"].get(column)
            table_cell: dict[str, Any] = {"text": format_cell(mean, deviation, "text"), "sort": mean, "mark": ""}
            if verdict and place == verdict["best"]:
                table_cell["mark"] = "best"
            elif verdict and (gap := verdict["differences"].get(str(place))):
                table_cell["mark"] = "level" if place in verdict["level"] else ""
                table_cell["gap"] = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * part for part in gap))
            cells.append(table_cell)
        out.append({"place": place, "run": run, "cells": cells})
    return out


def differing_settings(model: Model) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ from each other."""
    identities = [
        {
            key: setting if isinstance(setting, str) else json.dumps(setting)
            for key, setting in flatten(identity).items()
        }
        for identity in (run["identity"] for run in model["runs"])
    ]
    keys = dict.fromkeys(key for setting in identities for key in setting)
    texts_by_key = {key: [setting.get(key, "-") for setting in identities] for key in keys}
    return [(key, texts) for key, texts in texts_by_key.items() if len(set(texts)) > 1]
