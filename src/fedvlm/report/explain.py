"""Explain prompts: similarity and transport plan over an image's patches, and maps of local prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.classifier.personalised import Personalised, client_classifier, reopen_encoder
from fedvlm.core import Matching, make
from fedvlm.data.clients import superclasses
from fedvlm.encoders.images import Pixels, decode
from fedvlm.errors import DataError, EncoderError, SettingsError, unknown_name
from fedvlm.maths.optimal_transport import transport_plan
from fedvlm.methods._prompts import class_features
from fedvlm.plugins import require
from fedvlm.record import Record
from fedvlm.report.runs import identities_of, run_names

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
        reason = f"{method.name}, which moves nothing between patches and prompts"
        raise SettingsError(f"{result.folder} is a run of {reason}; explain a run of fedotp")
    decoded = read_image(Path(image))
    classifier = client_classifier(result, client or next(iter(result.local(seed=seed))), seed)
    return explain_image(classifier, reopen_encoder(classifier.encoder), decoded, name, gammas)


def explain_image(
    classifier: Personalised, encoder: Any, decoded: Any, name: str | None = None, gammas: Sequence[float] | None = None
) -> Explanation:
    """Explain the prediction of one decoded image by a classifier that matches patches and prompts."""
    method, frozen = classifier.method, classifier.frozen
    assert isinstance(method, Matching)
    assert isinstance(encoder.preprocess, Pixels)  # no other encoder has a text tower
    pixels = encoder.preprocess(decoded)
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
    solve = partial(transport_plan, cosines, "unbalanced", entropy_reg=method.entropy_reg)
    transport_plans = {gamma: count * solve(gamma) for gamma in sorted(gamma_values)}
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
    """Read and decode an image; an error names the file."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"the image {path} cannot be read ({error.strerror}); name a file") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def patch_grid(patches: int, height: int, width: int) -> tuple[int, int]:
    """Return rows and columns of square patches that fill an image."""
    rows = max(1, round(sqrt(patches * height / width)))
    if patches % rows or abs(height / rows - width * rows / patches) > 1:
        raise EncoderError(f"{patches} patches do not tile {height} x {width} pixels; take square patches")
    return rows, patches // rows


@dataclass(frozen=True)
class PromptMap:
    """The local prompts of a run on a plane: near ones are alike, axes mean nothing."""

    title: str
    clients: tuple[str, ...]
    groups: tuple[str, ...]  # what is coloured alike: a client's domain, or itself
    places: Floats  # (clients, 2)


def local_prompts(result: Record, seed: int | None = None) -> dict[str, Tensor]:
    """Return the local prompts of the clients of a run's first training."""
    prompts = {id: prompt.get("local prompt", prompt.get("prompt")) for id, prompt in result.local(seed=seed).items()}
    return {id: prompt for id, prompt in prompts.items() if prompt is not None and prompt.ndim == 2}


def prompt_map(run: Record | str | Path, seed: int | None = None) -> PromptMap:
    """Map the local prompts of a run's first training by t-SNE."""
    result = run if isinstance(run, Record) else Record(Path(run))
    identity = result.manifest["identity"]
    local = local_prompts(result, seed)
    if not local:
        problem = f"{result.folder} is a run of {identity['method']['name']}, whose clients keep no prompt"
        raise SettingsError(f"{problem}; show a run of fedotp, dp-fpl, promptfolio, promptfl-fedper or coop")
    if len(local) < MIN_PROMPTS:
        remedy = f"show a run with {MIN_PROMPTS} clients or more, as clients.partition = 'dirichlet' makes them"
        raise SettingsError(f"{result.folder} has {len(local)} local prompts, too few for a map; {remedy}")
    title = f"local prompts of {identity['method']['name']} on {result.manifest['data']}"
    groups = tuple(_group(result, id) for id in local)
    return PromptMap(title, tuple(local), groups, plane_positions(list(local.values())))


def _group(result: Record, id: str) -> str:
    """What a client is coloured by: its superclass or its domain, if it shares them, or itself."""
    by = result.manifest["identity"]["clients"]["partition"]
    if by == "coarse":
        class_counts = zip(result.manifest["classes"], result.manifest["counts"][id], strict=True)
        return ", ".join(sorted(set(superclasses([name for name, rows in class_counts if rows]))))
    return id.rsplit("-", 1)[0] if by == "domain-dirichlet" else id


def plane_positions(prompts: Sequence[Tensor]) -> Floats:
    """Place prompts on a plane by exact t-SNE, (prompts, 2) of unit spread; the same prompts give the same map."""
    manifold = require("sklearn.manifold", "a map of prompts needs scikit-learn", "plot")
    x = np.stack([prompt.double().numpy().reshape(-1) for prompt in prompts])
    if not np.ptp(x, axis=0).any():
        return np.zeros((len(x), 2))
    perplexity = max(1.0, min(30.0, (len(x) - 1) / 3))
    init = "pca" if x.shape[1] > 1 else "random"
    tsne = manifold.TSNE(perplexity=perplexity, init=init, method="exact", random_state=0)
    places: Floats = tsne.fit_transform(x - x.mean(0))
    return places / max(float(places.std()), 1e-300)


def prompt_heatmaps(
    results: Sequence[Record], image: Path, class_name: str | None, client: str | None, seed: int | None
) -> tuple[NDArray[np.uint8], dict[str, Floats], str]:
    """Return an image, the cosine of each patch to a class's feature by prompt, and the class with the client.

    Without `class_name` it is the class nearest to the mean of the patches, for the first prompt.
    """
    decoded = read_image(image)
    shown: Any = None
    heatmaps: dict[str, Floats] = {}
    client_id = client or next(iter(results[0].local(seed=seed)))
    for result, title in zip(results, run_names(identities_of(results)), strict=True):
        classifier = client_classifier(result, client or next(iter(result.local(seed=seed))), seed)
        local = classifier.local.get("prompt", classifier.local.get("local prompt"))
        tensors = {"shared": classifier.shared.get("prompt"), "local": local}
        prompts = {kind: tensor for kind, tensor in tensors.items() if tensor is not None and tensor.ndim == 2}
        if not prompts:
            raise SettingsError(f"{result.folder} is a run of {title} without prompts; name one of fedotp or coop")
        encoder, frozen = reopen_encoder(classifier.encoder), classifier.frozen
        preprocess: Any = encoder.preprocess
        pixels = preprocess(decoded)
        embedded = encoder.embed([pixels], patches=True)
        patches = torch.nn.functional.normalize(torch.from_numpy(embedded.patches).float()[0], dim=-1)
        shown = preprocess.undo(pixels) if shown is None else shown
        shape = patch_grid(len(patches), *pixels.shape[1:])
        for kind, prompt in prompts.items():
            features = class_features(frozen, prompt)
            if class_name is None:
                class_name = frozen.classes[int((features @ patches.mean(0)).argmax())]
            if class_name not in frozen.classes:
                raise unknown_name("class", class_name, frozen.classes)
            cosines = (patches @ features[frozen.classes.index(class_name)]).double().numpy()
            heatmaps[f"{title}\n{kind} prompt"] = cosines.reshape(shape)
    return shown, heatmaps, f"{class_name}, client {client_id}"
