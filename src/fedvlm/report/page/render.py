"""The model as one HTML file."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedvlm.evaluate import scores
from fedvlm.record import Record
from fedvlm.report.page import apart, charts, panels
from fedvlm.report.page.gather import gather
from fedvlm.report.page.read import Model, as_text
from fedvlm.report.page.svg import colour
from fedvlm.report.tables import cell
from fedvlm.storage.files import write
from fedvlm.storage.sealed import SEAL
from fedvlm.storage.toml import flat


def write_page(
    records: Sequence[Record],
    out: Path,
    title: str = "",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    command: str = "",
) -> Path:
    """One page of all these runs."""
    return write_model(gather(records, title, paper, command), out)


def write_model(model: Model, out: Path) -> Path:
    write(out, page(model).encode())
    return out


def page(model: Model) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedvlm.report.page", "templates")
    env = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals.update(colour=colour)
    env.filters.update(percent=percent, heat=heat)
    return env.get_template("report.html").render(
        **shell(),
        model=model,
        data=embedded(model),
        rows=rows(model),
        charts=charts,
        panels=panels,
        apart=apart,
        odd=odd(model),
    )


def shell(script: str = "", more_style: str = "", more: str = "") -> dict[str, Any]:
    """What every page of ours has: style, script, and a policy that lets nothing else in.

    A page may have another script, and a rule more.
    """
    style = _static("style.css") + more_style
    script = script or _static("script.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"img-src data:; base-uri 'none'; form-action 'none'{'; ' * bool(more)}{more}"
    )
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


def _static(name: str) -> str:
    text = (files("fedvlm.report.page") / "static" / name).read_text("utf-8")
    assert "</" not in text, f"{name} would end its own element"
    return text


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def embedded(model: Model) -> Markup:
    """JSON that no name in it can break out of, with a checksum of all that it says."""
    plain = as_text({**model, SEAL: sha256(as_text(model).encode()).hexdigest()})
    for letter in "<>&":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(plain)


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def heat(value: float | None) -> str:
    """One of eleven shades."""
    return "" if value is None else f"h{max(0, min(10, round(10 * value)))}"


def rows(model: Model) -> list[dict[str, Any]]:
    """The table's rows: per column the words, the number to sort by, and what it is to the best."""
    out = []
    for place, run in enumerate(model["runs"]):
        spread = scores.spread(run["tables"])
        cells = []
        for column in model["columns"]:
            mean, deviation = spread.get(column, (None, None))
            verdict = model["verdicts"].get(column)
            one: dict[str, Any] = {"text": cell(mean, deviation, "text"), "sort": mean, "mark": ""}
            if verdict and place == verdict["best"]:
                one["mark"] = "best"
            elif verdict and (gap := verdict["differences"].get(str(place))):
                one["mark"] = "level" if place in verdict["level"] else ""
                one["gap"] = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * part for part in gap))
            cells.append(one)
        out.append({"place": place, "run": run, "cells": cells})
    return out


def odd(model: Model) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ from each other."""
    every = [
        {key: one if isinstance(one, str) else json.dumps(one) for key, one in flat(told).items()}
        for told in (run["identity"] for run in model["runs"])
    ]
    keys = dict.fromkeys(key for one in every for key in one)
    said = {key: [one.get(key, "-") for one in every] for key in keys}
    return [(key, each) for key, each in said.items() if len(set(each)) > 1]
