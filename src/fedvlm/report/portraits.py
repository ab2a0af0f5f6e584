"""Pictures of what clients have: their rows, their prompts, and what prompts look at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.classifier.personalised import client_classifier, reopen_encoder
from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.methods._prompts import class_features
from fedvlm.record import Record
from fedvlm.report.explain import patch_grid, prompt_map, read_image
from fedvlm.report.panels import COLOURS, run_names
from fedvlm.report.pictures import (
    MUTED_COLOUR,
    TEXT_COLOUR,
    colorbar_below,
    draw_prompt_map,
    hide_ticks,
    new_figure,
    overlay_patches,
    save_figure,
)

MAX_TICK_LABELS = 40  # classes or clients up to which an axis has their names


def draw_partitions(results: Sequence[Record], out: str | Path, kite: bool = False) -> Path:
    """A panel for each run: training rows of each class at each client.

    Dots as large as the rows and coloured by domain; or kites as wide as them.
    """
    counts = [_counts(run_counts) for run_counts in results]
    wide = [max(2.6, 0.3 * len(run_counts) + 1.2) for run_counts in counts]
    figure = new_figure(sum(wide), max(3.6, 0.17 * max(run_counts.shape[1] for run_counts in counts) + 1.6))
    panels = figure.subplots(1, len(results), squeeze=False, width_ratios=wide)[0]
    domains = sorted({run_counts for result in results for run_counts in _domains(result)} - {""})
    for panel, result, table in zip(panels, results, counts, strict=True):
        _draw_counts(panel, table, [_domain_colour(run_counts, domains) for run_counts in _domains(result)], kite)
        clients = list(result.manifest["counts"])
        if len(clients) <= MAX_TICK_LABELS:
            panel.set_xticks(range(len(clients)), clients, rotation=90, fontsize=7)
        if table.shape[1] <= MAX_TICK_LABELS:
            panel.set_yticks(range(table.shape[1]), result.manifest["classes"], fontsize=7)
        panel.set(xlabel="client", ylim=(table.shape[1] - 0.4, -0.6), xlim=(-0.7, len(table) - 0.3))
        about = result.manifest["identity"]["clients"]
        panel.set_title(f"{result.manifest['data']}, {about['partition']}", fontsize=10, color=TEXT_COLOUR)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("class")
    for number, name in enumerate(domains):
        panels[-1].scatter([], [], color=COLOURS[number % len(COLOURS)], label=name)
    if domains:
        figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return save_figure(figure, out)


def _draw_counts(panel: Any, table: Any, colours: Sequence[str], kite: bool) -> None:
    max_count = table.max()
    if not max_count:
        raise DataError("there is nothing to draw: no client has any training rows")
    for client, (row, colour) in enumerate(zip(table, colours, strict=True)):
        if kite:
            half_width = 0.46 * row / max_count
            places = range(len(row))
            panel.fill_betweenx(places, client - half_width, client + half_width, color=colour, lw=0.6)
        else:
            (class_ids,) = np.nonzero(row)
            panel.scatter([client] * len(class_ids), class_ids, 90 * row[class_ids] / max_count + 2, colour, lw=0)


def _counts(result: Record) -> Any:
    counts = result.manifest.get("counts")
    if not counts:
        raise DataError(f"{result.folder} has no rows per class and client; run it again")
    return np.array(list(counts.values()), dtype=np.float64)


def _domains(result: Record) -> list[str]:
    """Of each client; empty where its rows come from several, or where a record does not say."""
    named = result.manifest.get("domains", {})
    return [named.get(id, "") for id in result.manifest["counts"]]


def _domain_colour(domain: str, domains: Sequence[str]) -> str:
    return COLOURS[domains.index(domain) % len(COLOURS)] if domain else MUTED_COLOUR


def draw_tsne(results: Sequence[Record], out: str | Path, seed: int | None = None) -> Path:
    """The local prompts of one run on a plane, coloured by domain or superclass."""
    if len(results) != 1:
        raise SettingsError(f"a map is of one run, and {len(results)} are named; name one")
    return draw_prompt_map(prompt_map(results[0], seed), out)


def prompt_heatmaps(
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
    decoded, shown_image, rows = read_image(image), None, []
    for result, title in zip(results, run_names(results), strict=True):
        client_id = client or next(iter(result.local(seed=seed)))
        classifier = client_classifier(result, client_id, seed)
        prompt_tensors = {"shared": classifier.shared.get("prompt"), "local": classifier.local.get("own")}
        prompt_tensors["local"] = classifier.local.get("prompt", prompt_tensors["local"])
        prompts = {word: tensor for word, tensor in prompt_tensors.items() if tensor is not None and tensor.ndim == 2}
        if not prompts:
            raise SettingsError(
                f"{result.folder} is a run of {title}, which has no prompt to look with; name runs "
                "of fedotp, promptfl or coop"
            )
        encoder, frozen = reopen_encoder(classifier.encoder), classifier.frozen
        preprocess: Any = encoder.preprocess
        pixels = preprocess(decoded)
        embedded = encoder.embed([pixels], patches=True)
        patches = torch.nn.functional.normalize(torch.from_numpy(embedded.patches).float()[0], dim=-1)
        shown_image = preprocess.undo(pixels) if shown_image is None else shown_image
        shape = patch_grid(len(patches), *pixels.shape[1:])
        for word, prompt in prompts.items():
            features = class_features(frozen, prompt)
            if name is None:
                name = frozen.classes[int((features @ patches.mean(0)).argmax())]
            if name not in frozen.classes:
                raise unknown_name("class", name, frozen.classes)
            cosines = (patches @ features[frozen.classes.index(name)]).double().numpy()
            rows.append((f"{title}\n{word} prompt", cosines.reshape(shape)))
    return _draw_heatmaps(shown_image, rows, f"{name}, by client {client or client_id}", out)


def _draw_heatmaps(image: Any, rows: Sequence[tuple[str, Any]], title: str, out: str | Path) -> Path:
    figure = new_figure(2.3 * (len(rows) + 1), 3.3)
    panels = figure.subplots(1, len(rows) + 1, squeeze=False)[0]
    hide_ticks(panels[0]).imshow(image)
    panels[0].set_title("image", fontsize=9, color=TEXT_COLOUR)
    for panel, (word, values) in zip(panels[1:], rows, strict=True):
        drawn = overlay_patches(hide_ticks(panel), image, values, float(values.min()), float(values.max()))
        panel.set_title(word, fontsize=9, color=TEXT_COLOUR)
        bar = colorbar_below(figure, drawn, [panel])
        bar.ax.tick_params(labelsize=7, colors=TEXT_COLOUR)
        bar.ax.locator_params(nbins=3)
    figure.suptitle(f"cosine of each patch with {title}", fontsize=10, color=TEXT_COLOUR)
    return save_figure(figure, out)
