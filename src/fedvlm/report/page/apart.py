"""Who was far from the rest, round by round: a square per client and round, filled where it was."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from fedvlm.report.page.svg import svg_text

OutlierHistory = dict[str, Any]
MAX_CLIENTS = 40  # clients in a drawing; those that were far most often come first
KEYS = ("norm", "alike", "cosine")  # what a round's line says of a client beside `far`


def outlier_history(lines: Sequence[Mapping[str, Any]]) -> list[OutlierHistory]:
    """By training: the rounds that were compared, and each client's numbers in them."""
    out: dict[str, OutlierHistory] = {}
    for line in lines:
        compared_clients = {id: client_line for id, client_line in line["clients"].items() if "far" in client_line}
        if not compared_clients:
            continue
        about = out.setdefault(line["training"], {"rounds": [], "clients": {}})
        for id, client_line in compared_clients.items():
            numbers = [round(float(client_line[key]), 2) if key in client_line else None for key in KEYS]
            rounds_of_client = about["clients"].setdefault(id, {})
            rounds_of_client[str(line["round"])] = [int(client_line["far"]), *numbers]
        about["rounds"].append(line["round"])
    return [{"training": name, **about} for name, about in out.items() if _any(about)]


def _any(about: OutlierHistory) -> bool:
    """A drawing in which nobody was ever far says nothing."""
    return any(numbers[0] for by_round in about["clients"].values() for numbers in by_round.values())


def drawn(about: OutlierHistory) -> Markup:
    """Clients down, rounds across."""
    rounds = about["rounds"]
    often = {id: sum(numbers[0] for numbers in by_round.values()) for id, by_round in about["clients"].items()}
    ids = sorted(often, key=lambda id: (-often[id], id))[:MAX_CLIENTS]
    cell, left_margin, top = min(16.0, max(3.0, 640 / len(rounds))), 150, 20
    width, height = left_margin + cell * len(rounds) + 60, top + 16 * len(ids) + 8
    out = Markup(
        f'<svg class="wide" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        'aria-label="who was far from the rest in which round">'
    )
    out += svg_text(left_margin, top - 6, f"round {rounds[0]} to {rounds[-1]}", "tick")
    for row, id in enumerate(ids):
        y = top + 16 * row
        out += svg_text(left_margin - 8, y + 11, id, "tick end")
        for place, number in enumerate(rounds):
            if (numbers := about["clients"][id].get(str(number))) is not None:
                x = left_margin + cell * place
                kind = "bubble" if numbers[0] else "band c7"
                out += Markup(f'<rect class="{kind}" x="{x:.1f}" y="{y}" ')
                out += Markup(f'width="{cell - 1:.1f}" height="14"><title>')
                out += escape(_tooltip(id, number, numbers)) + Markup("</title></rect>")
        out += svg_text(left_margin + cell * len(rounds) + 6, y + 11, f"{often[id]} far", "tick")
    return out + Markup("</svg>")


def _tooltip(id: str, number: int, numbers: Sequence[float | None]) -> str:
    words = ("times the median", "times those that point alike", "cosine to the others")
    parts = [f"{value:g} {word}" for value, word in zip(numbers[1:], words, strict=True) if value is not None]
    return f"{id}, round {number}{': far' if numbers[0] else ''}; {', '.join(parts)}"
