"""Pictures of what clients have: their rows, their prompts, and what prompts look at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.classifier.personalised import of_client, reopen
from fedvlm.errors import DataError, SettingsError, unknown
from fedvlm.methods._prompt import class_features
from fedvlm.record import Record
from fedvlm.report.explain import grid, prompt_map, read
from fedvlm.report.panels import COLOURS, titles
from fedvlm.report.pictures import INK, PALE, bare, below, canvas, draw_map, overlay, save

NAMED = 40  # classes or clients up to which an axis has their names


def partition(results: Sequence[Record], out: str | Path, kite: bool = False) -> Path:
    """A panel for each run: training rows of each class at each client.

    Dots as large as the rows and coloured by domain; or kites as wide as them.
    """
    counts = [_counts(one) for one in results]
    wide = [max(2.6, 0.3 * len(one) + 1.2) for one in counts]
    figure = canvas(sum(wide), max(3.6, 0.17 * max(one.shape[1] for one in counts) + 1.6))
    panels = figure.subplots(1, len(results), squeeze=False, width_ratios=wide)[0]
    domains = sorted({one for result in results for one in _domains(result)} - {""})
    for panel, result, table in zip(panels, results, counts, strict=True):
        _rows(panel, table, [_colour(one, domains) for one in _domains(result)], kite)
        clients = list(result.manifest["counts"])
        if len(clients) <= NAMED:
            panel.set_xticks(range(len(clients)), clients, rotation=90, fontsize=7)
        if table.shape[1] <= NAMED:
            panel.set_yticks(range(table.shape[1]), result.manifest["classes"], fontsize=7)
        panel.set(xlabel="client", ylim=(table.shape[1] - 0.4, -0.6), xlim=(-0.7, len(table) - 0.3))
        about = result.manifest["identity"]["clients"]
        panel.set_title(f"{result.manifest['data']}, {about['by']}", fontsize=10, color=INK)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("class")
    for number, name in enumerate(domains):
        panels[-1].scatter([], [], color=COLOURS[number % len(COLOURS)], label=name)
    if domains:
        figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return save(figure, out)


def _rows(panel: Any, table: Any, colours: Sequence[str], kite: bool) -> None:
    most = table.max()
    if not most:
        raise DataError("there is nothing to draw: no client has any training rows")
    for client, (row, colour) in enumerate(zip(table, colours, strict=True)):
        if kite:
            half = 0.46 * row / most
            places = range(len(row))
            panel.fill_betweenx(places, client - half, client + half, color=colour, lw=0.6)
        else:
            (there,) = np.nonzero(row)
            panel.scatter([client] * len(there), there, 90 * row[there] / most + 2, colour, lw=0)


def _counts(result: Record) -> Any:
    found = result.manifest.get("counts")
    if not found:
        raise DataError(f"{result.folder} has no rows per class and client; run it again")
    return np.array(list(found.values()), dtype=np.float64)


def _domains(result: Record) -> list[str]:
    """Of each client; empty where its rows come from several, or where a record does not say."""
    named = result.manifest.get("domains", {})
    return [named.get(id, "") for id in result.manifest["counts"]]


def _colour(domain: str, domains: Sequence[str]) -> str:
    return COLOURS[domains.index(domain) % len(COLOURS)] if domain else PALE


def tsne(results: Sequence[Record], out: str | Path, seed: int | None = None) -> Path:
    """The local prompts of one run on a plane, coloured by domain or superclass."""
    if len(results) != 1:
        raise SettingsError(f"a map is of one run, and {len(results)} are named; name one")
    return draw_map(prompt_map(results[0], seed), out)


def heat(
    results: Sequence[Record],
    out: str | Path,
    image: Path,
    name: str | None = None,
    client: str | None = None,
    seed: int | None = None,
) -> Path:
    """Where the prompts of each run look in an image: cosines of patches and a class's feature.

    Without `name` it is the class nearest to the mean of the patches, for the first prompt.
    """
    decoded, shown, rows = read(image), None, []
    for result, title in zip(results, titles(results), strict=True):
        whose = client or next(iter(result.local(seed=seed)))
        classifier = of_client(result, whose, seed)
        both = {"shared": classifier.shared.get("prompt"), "local": classifier.local.get("own")}
        both["local"] = classifier.local.get("prompt", both["local"])
        prompts = {word: one for word, one in both.items() if one is not None and one.ndim == 2}
        if not prompts:
            raise SettingsError(
                f"{result.folder} is a run of {title}, which has no prompt to look with; name runs "
                "of fedotp, promptfl or coop"
            )
        encoder, frozen = reopen(classifier.encoder), classifier.frozen
        preprocess: Any = encoder.preprocess
        pixels = preprocess(decoded)
        found = encoder.embed([pixels], patches=True)
        patches = torch.nn.functional.normalize(torch.from_numpy(found.patches).float()[0], dim=-1)
        shown = preprocess.undo(pixels) if shown is None else shown
        shape = grid(len(patches), *pixels.shape[1:])
        for word, prompt in prompts.items():
            features = class_features(frozen, prompt)
            if name is None:
                name = frozen.classes[int((features @ patches.mean(0)).argmax())]
            if name not in frozen.classes:
                raise unknown("class", name, frozen.classes)
            cosines = (patches @ features[frozen.classes.index(name)]).double().numpy()
            rows.append((f"{title}\n{word} prompt", cosines.reshape(shape)))
    return _heats(shown, rows, f"{name}, by client {client or whose}", out)


def _heats(image: Any, rows: Sequence[tuple[str, Any]], title: str, out: str | Path) -> Path:
    figure = canvas(2.3 * (len(rows) + 1), 3.3)
    panels = figure.subplots(1, len(rows) + 1, squeeze=False)[0]
    bare(panels[0]).imshow(image)
    panels[0].set_title("image", fontsize=9, color=INK)
    for panel, (word, values) in zip(panels[1:], rows, strict=True):
        drawn = overlay(bare(panel), image, values, float(values.min()), float(values.max()))
        panel.set_title(word, fontsize=9, color=INK)
        bar = below(figure, drawn, [panel])
        bar.ax.tick_params(labelsize=7, colors=INK)
        bar.ax.locator_params(nbins=3)
    figure.suptitle(f"cosine of each patch with {title}", fontsize=10, color=INK)
    return save(figure, out)
