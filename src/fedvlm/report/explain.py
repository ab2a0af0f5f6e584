"""What the prompts of a run look at: similarity and transport plan over an image's patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.classifier.personalised import client_classifier, reopen_encoder
from fedvlm.core import Matching, make
from fedvlm.data.clients import superclasses
from fedvlm.encoders.images import Pixels, decode
from fedvlm.errors import DataError, EncoderError, SettingsError, unknown_name
from fedvlm.maths.optimal_transport import transport_plan
from fedvlm.maths.tsne import tsne
from fedvlm.record import Record
from fedvlm.storage.files import write_file

GAMMAS = (0.2, 0.5, 0.8, 1.0)
MIN_PROMPTS = 4  # local prompts that make an image
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Explanation:
    """One image, one class, one client; the first of two is the global prompt's, then the local."""

    client: str
    name: str  # of the class
    probability: float  # that the client gives this class
    likeliest: str  # the class the client would answer
    image: NDArray[np.uint8]  # (height, width, 3) as the encoder sees it
    similarity: Floats  # (2, rows, columns) cosines of patches and the class's two features
    plans: dict[float, Floats]  # γ -> (2, rows, columns): the share of a patch that a prompt takes
    trained: float | None  # the γ of the run, None if its plan was no unbalanced one


def explain(
    run: Record | str | Path,
    image: str | Path,
    *,
    name: str | None = None,
    client: str | None = None,
    gammas: Sequence[float] | None = None,
    seed: int | None = None,
) -> Explanation:
    """`name` is a class, the client's own answer if left out; `client` is the first that trained.

    The run is one of FedOTP. A γ is the share of the image that both prompts take together; left
    out, there are a few, with the run's own among them.
    """
    result = run if isinstance(run, Record) else Record(Path(run))
    method = make(**result.manifest["identity"]["method"])
    if not isinstance(method, Matching):
        raise SettingsError(
            f"{result.folder} is a run of {method.name}, which moves nothing between patches and "
            "prompts; explain a run of fedotp"
        )
    pixels_of = read_image(Path(image))
    classifier = client_classifier(result, client or next(iter(result.local(seed=seed))), seed)
    encoder, frozen = reopen_encoder(classifier.encoder), classifier.frozen
    assert isinstance(encoder.preprocess, Pixels)  # no other encoder has a text tower
    pixels = encoder.preprocess(pixels_of)
    patches = torch.from_numpy(encoder.embed([pixels], patches=True).patches).float()
    probabilities = classifier.logits(patches)[0].softmax(0)
    if name is not None and name not in frozen.classes:
        raise unknown_name("class", name, frozen.classes)
    number = frozen.classes.index(name) if name is not None else int(probabilities.argmax())
    sent_and_local = (method.send(classifier.shared, classifier.client), classifier.local)
    cosines = method.similarity(frozen, *sent_and_local, patches)[0, number]  # (2, patches)
    count = cosines.shape[1]
    shape = (2, *patch_grid(count, *pixels.shape[1:]))
    trained = method.gamma if method.transport == "unbalanced" else None
    gamma_values = set(gammas or GAMMAS) | ({trained} if trained is not None and not gammas else set())
    transport_plans = {
        gamma: count * transport_plan(cosines, "unbalanced", gamma, method.entropy_reg)
        for gamma in sorted(gamma_values)
    }
    return Explanation(
        client=classifier.client,
        name=frozen.classes[number],
        probability=float(probabilities[number]),
        likeliest=frozen.classes[int(probabilities.argmax())],
        image=encoder.preprocess.undo(pixels),
        similarity=cosines.double().numpy().reshape(shape),
        plans={gamma: fractions.double().numpy().reshape(shape) for gamma, fractions in transport_plans.items()},
        trained=trained,
    )


def read_image(path: Path) -> Any:
    """A decoded image; an error names the file."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"the image {path} cannot be read ({error.strerror}); name a file") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def patch_grid(patches: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of square patches that fill an image."""
    rows = max(1, round(sqrt(patches * height / width)))
    if patches % rows or abs(height / rows - width * rows / patches) > 1:
        raise EncoderError(
            f"{patches} patches do not tile an image of {height} x {width} pixels; take an "
            "encoder whose patches are square"
        )
    return rows, patches // rows


@dataclass(frozen=True)
class PromptMap:
    """The local prompts of a run on a plane: near ones are alike, axes mean nothing."""

    title: str
    clients: tuple[str, ...]
    groups: tuple[str, ...]  # what is coloured alike: a client's domain, or itself
    places: Floats  # (clients, 2)


def local_prompts(result: Record, seed: int | None = None) -> dict[str, Tensor]:
    """What the clients of a run's first training have learnt for themselves, if it is a prompt."""
    prompts = {id: prompt.get("own", prompt.get("prompt")) for id, prompt in result.local(seed=seed).items()}
    return {id: prompt for id, prompt in prompts.items() if prompt is not None and prompt.ndim == 2}


def prompt_map(run: Record | str | Path, seed: int | None = None) -> PromptMap:
    """t-SNE of what the clients of a run's first training have learnt for themselves."""
    result = run if isinstance(run, Record) else Record(Path(run))
    identity = result.manifest["identity"]
    local = local_prompts(result, seed)
    if not local:
        raise SettingsError(
            f"{result.folder} is a run of {identity['method']['name']}, whose clients keep no "
            "prompt; show a run of fedotp, dp-fpl, promptfolio, promptfl-fedper or coop"
        )
    if len(local) < MIN_PROMPTS:
        raise SettingsError(
            f"{result.folder} has {len(local)} local prompts, too few for a map; show a run with "
            f"{MIN_PROMPTS} clients or more, as clients.partition = 'dirichlet' makes them"
        )
    return PromptMap(
        title=f"local prompts of {identity['method']['name']} on {result.manifest['data']}",
        clients=tuple(local),
        groups=tuple(_group(result, id) for id in local),
        places=tsne(np.stack([prompt.double().numpy() for prompt in local.values()])),
    )


def _group(result: Record, id: str) -> str:
    """What a client is coloured by: its superclass or its domain, if it shares them, or itself."""
    by = result.manifest["identity"]["clients"]["partition"]
    if by == "coarse":
        class_counts = zip(result.manifest["classes"], result.manifest["counts"][id], strict=True)
        return ", ".join(sorted(set(superclasses([name for name, rows in class_counts if rows]))))
    return id.rsplit("-", 1)[0] if by == "domain-dirichlet" else id


TEXT_COLOUR, MUTED_COLOUR = "#222222", "#888888"
MAX_LABELLED_CLIENTS = 40  # clients up to which each point of a map has its name beside it


def draw_explanation(explained: "Explanation", out: str | Path) -> Path:
    """Two rows, the global and the local prompt; columns are the image, similarity, each γ."""
    columns = 2 + len(explained.plans)
    figure = new_figure(2.1 * columns + 0.4, 5.2)
    axes = figure.subplots(2, columns, squeeze=False)
    hide_ticks(axes[0, 0]).imshow(explained.image)
    axes[0, 0].set_title("image", fontsize=10, color=TEXT_COLOUR)
    legend(hide_ticks(axes[1, 0]), explained)
    drawn_image: Any = None
    panels: list[tuple[str, Any]] = [("similarity", explained.similarity)]
    for gamma, fractions in explained.plans.items():
        mark = " (trained)" if explained.trained is not None and gamma == explained.trained else ""
        panels.append((f"plan, γ = {gamma:g}{mark}", fractions))
    for column, (title, values) in enumerate(panels, start=1):
        pair = axes[:, column]
        for axis, patch_values in zip(pair, values, strict=True):
            drawn_image = overlay_patches(
                hide_ticks(axis), explained.image, patch_values, float(values.min()), float(values.max())
            )
        pair[0].set_title(title, fontsize=10, color=TEXT_COLOUR)
        bar = colorbar_below(figure, drawn_image, list(pair))
        bar.ax.tick_params(labelsize=8, colors=TEXT_COLOUR)
        bar.ax.locator_params(nbins=4)
        label = "cosine" if column == 1 else "share of the patch"
        bar.set_label(label, fontsize=8, color=TEXT_COLOUR)
    level = colorbar_below(figure, drawn_image, list(axes[:, 0]))  # an empty one keeps the image beside the rest
    level.ax.set_axis_off()
    level.solids.set_visible(False)
    for axis, word in zip(axes[:, 1], ("global prompt", "local prompt"), strict=True):
        axis.set_ylabel(word, fontsize=10, color=TEXT_COLOUR)
    return save_figure(figure, out)


def colorbar_below(figure: Any, mappable: Any, axes: list[Any]) -> Any:
    return figure.colorbar(mappable, ax=axes, location="bottom", shrink=0.85, pad=0.03)


def overlay_patches(axis: Any, image: Any, values: Any, low: float, high: float) -> Any:
    """Patches coloured over the image in grey, with thin lines between them."""
    height, width = image.shape[:2]
    edges = (-0.5, width - 0.5, height - 0.5, -0.5)
    axis.imshow(image.mean(2), cmap="gray", vmin=0, vmax=255, extent=edges)
    if high - low < 1e-9:  # all the same: one colour, and a bar that does not pretend otherwise
        low, high = low - 0.5e-3, high + 0.5e-3
    heatmap = axis.imshow(values, cmap="viridis", vmin=low, vmax=high, alpha=0.68, extent=edges, zorder=2)
    rows, columns = values.shape
    for k in range(1, rows):
        axis.axhline(k * height / rows - 0.5, color="white", lw=0.4, alpha=0.5, zorder=3)
    for k in range(1, columns):
        axis.axvline(k * width / columns - 0.5, color="white", lw=0.4, alpha=0.5, zorder=3)
    axis.set_xlim(edges[:2])
    axis.set_ylim(edges[2:])
    return heatmap


def legend(axis: Any, explained: "Explanation") -> None:
    lines = [
        ("class", explained.name),
        ("client", explained.client),
        ("chance", f"{explained.probability:.1%}"),
        ("answer", explained.likeliest),
    ]
    for place, (word, value) in enumerate(lines):
        y = 0.9 - 0.24 * place
        axis.text(0.02, y, word, fontsize=8, color=MUTED_COLOUR, transform=axis.transAxes, va="center")
        text = value if len(value) <= 22 else value[:21] + "…"
        axis.text(0.02, y - 0.1, text, fontsize=10, color=TEXT_COLOUR, transform=axis.transAxes, va="center")
    for side in axis.spines.values():
        side.set_visible(False)


def draw_prompt_map(drawn: "PromptMap", out: str | Path) -> Path:
    """One point for each client, coloured by its domain where clients share one."""
    figure = new_figure(6.2, 5.4)
    axis = hide_ticks(figure.subplots())
    groups = sorted(set(drawn.groups))
    is_ungrouped = len(groups) == len(drawn.clients)
    from matplotlib import colormaps

    colours = colormaps["tab10" if len(groups) <= 10 else "turbo"]
    for number, group in enumerate(groups):
        in_group = np.array([client_group == group for client_group in drawn.groups])
        shade = colours(number if len(groups) <= 10 else number / max(1, len(groups) - 1))
        axis.scatter(*drawn.places[in_group].T, s=46, color=TEXT_COLOUR if is_ungrouped else shade, label=group)
    if len(drawn.clients) <= MAX_LABELLED_CLIENTS:
        middle = float(np.median(drawn.places[:, 0]))
        for id, group, (x, y) in zip(drawn.clients, drawn.groups, drawn.places, strict=True):
            right = x > middle  # names are written inwards, so that none leaves the frame
            axis.annotate(
                id if is_ungrouped else id.removeprefix(f"{group}-"),  # the colour tells the rest
                (x, y),
                xytext=(-5 if right else 5, 5),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize=8,
                color=TEXT_COLOUR,
            )
    if not is_ungrouped:
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=5)
    axis.margins(0.08)
    axis.set_title(f"t-SNE of the {drawn.title}", fontsize=11, color=TEXT_COLOUR)
    return save_figure(figure, out)


def new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError("pictures are drawn by matplotlib; install fedvlm[plot]") from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained", facecolor="white")


def hide_ticks(axis: Any) -> Any:
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_color(MUTED_COLOUR)
    return axis


def save_figure(figure: Any, out: str | Path) -> Path:
    path = Path(out)
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg"):
        raise SettingsError(f"a picture cannot be drawn to {path}; end it in .png or .svg")
    data = BytesIO()
    figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_file(path, data.getvalue())
    return path
