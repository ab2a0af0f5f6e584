"""Who was far from the rest, round by round: a square per client and round, filled where it was."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from fedvlm.report.page.svg import text

Seen = dict[str, Any]
MOST = 40  # clients in a drawing; those that were far most often come first
KEYS = ("norm", "alike", "cosine")  # what a round's line says of a client beside `far`


def seen(lines: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """By training: the rounds that were compared, and each client's numbers in them."""
    out: dict[str, Seen] = {}
    for line in lines:
        found = {id: one for id, one in line["clients"].items() if "far" in one}
        if not found:
            continue
        about = out.setdefault(line["training"], {"rounds": [], "clients": {}})
        for id, one in found.items():
            numbers = [round(float(one[key]), 2) if key in one else None for key in KEYS]
            each = about["clients"].setdefault(id, {})
            each[str(line["round"])] = [int(one["far"]), *numbers]
        about["rounds"].append(line["round"])
    return [{"training": name, **about} for name, about in out.items() if _any(about)]


def _any(about: Seen) -> bool:
    """A drawing in which nobody was ever far says nothing."""
    return any(one[0] for each in about["clients"].values() for one in each.values())


def drawn(about: Seen) -> Markup:
    """Clients down, rounds across."""
    rounds = about["rounds"]
    often = {id: sum(one[0] for one in each.values()) for id, each in about["clients"].items()}
    ids = sorted(often, key=lambda id: (-often[id], id))[:MOST]
    cell, left, top = min(16.0, max(3.0, 640 / len(rounds))), 150, 20
    width, height = left + cell * len(rounds) + 60, top + 16 * len(ids) + 8
    out = Markup(
        f'<svg class="wide" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        'aria-label="who was far from the rest in which round">'
    )
    out += text(left, top - 6, f"round {rounds[0]} to {rounds[-1]}", "tick")
    for row, id in enumerate(ids):
        y = top + 16 * row
        out += text(left - 8, y + 11, id, "tick end")
        for place, number in enumerate(rounds):
            if (one := about["clients"][id].get(str(number))) is not None:
                x = left + cell * place
                kind = "bubble" if one[0] else "band c7"
                out += Markup(f'<rect class="{kind}" x="{x:.1f}" y="{y}" ')
                out += Markup(f'width="{cell - 1:.1f}" height="14"><title>')
                out += escape(_said(id, number, one)) + Markup("</title></rect>")
        out += text(left + cell * len(rounds) + 6, y + 11, f"{often[id]} far", "tick")
    return out + Markup("</svg>")


def _said(id: str, number: int, one: Sequence[float | None]) -> str:
    words = ("times the median", "times those that point alike", "cosine to the others")
    told = [
        f"{value:g} {word}" for value, word in zip(one[1:], words, strict=True) if value is not None
    ]
    return f"{id}, round {number}{': far' if one[0] else ''}; {', '.join(told)}"
