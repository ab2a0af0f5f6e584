"""How many training embeddings of a site a server recovers that deviates from the protocol, by mode.

python -m tools.reconstruction --store pets23_vitb32.npz [--sizes 30,100,1000]
The attacker sends heads that are steep along one direction: the gradient at such a head is a sum over slabs of samples,
its bias column counts them, and a slab with one sample is that sample. An embedding counts as recovered if a guess that
the attacker takes for a sample has a cosine above 0.95 with it.

plain: the real site under `plain = true`; the server sends what it likes.
verified: the real sites under init's policy; the server tries a plain request (tests try crafted states and settings).
with a member: the sum over two honest sites of this size, at heads as steep as the bounds of a verified sum allow, in
as many gradients as a plan has; that the member can lead the state to exactly these heads is assumed in its favour.
Methods without a bias (fedavg) use the mean embedding in its place, and the length of a slab's sum as its count.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedvlm.core import make
from fedvlm.deploy.identity.keys import Signer
from fedvlm.deploy.kits import create_kits, read_server, read_site, write_site
from fedvlm.deploy.messages import training_key, training_spec
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.client import to_arrays
from fedvlm.engines.flower.messages import Message
from fedvlm.evaluate.protocols import Training
from fedvlm.maths.logistic_regression import Head, loss_and_gradient
from fedvlm.methods.auto import MAX_HEAD_NORM
from fedvlm.runner.settings import build

Matrix = NDArray[np.float64]
MIN_COSINE = 0.95
MAX_REQUESTS = 490  # of 500 that init's policy allows per training
STEEP = 1e6
NAMES = ("a", "b", "c")


def read_store(path: Path) -> tuple[Any, Any, Any, list[str]]:
    data = np.load(path, allow_pickle=False)
    x = np.concatenate([data[f"{part}_x"] for part in ("train", "val", "test")]).astype(np.float32)
    y = np.concatenate([data[f"{part}_y"] for part in ("train", "val", "test")]).astype(np.int64)
    text = data["text"].astype(np.float32)
    unit = [values / np.linalg.norm(values, axis=1, keepdims=True) for values in (x, text)]
    return unit[0], y, unit[1], [str(name).replace("_", " ") for name in data["classes"]]


def recovered(samples: Matrix, guesses: list[Matrix]) -> float:
    """Return the fraction of samples that a guess stands for."""
    if not guesses:
        return 0.0
    stacked = np.asarray(guesses)
    stacked = stacked / np.maximum(np.linalg.norm(stacked, axis=1, keepdims=True), 1e-30)
    return float((np.abs(samples @ stacked.T).max(1) > MIN_COSINE).mean())


def slab_head(direction: Matrix, bias: Matrix, thresholds: list[float], classes: int, steepness: float) -> Matrix:
    """Return (classes, dim + 1): class k wins between thresholds k - 1 and k of direction over bias."""
    k, sums = np.arange(len(thresholds) + 1), np.concatenate([[0], np.cumsum(thresholds)])
    head = np.tile(-1e3 * steepness * bias, (classes, 1))
    head[k] = steepness * (k[:, None] * direction - sums[:, None] * bias)
    return head


def attack(
    gradient: Any, classes: int, guess: Matrix, n_samples: int, steepness: float, requests: int, slabs: int = 0
) -> list[Matrix]:
    """Return what the attacker takes for samples, by slabs that it divides until they hold one.

    `guess` (dim + 1,) has a positive product with every sample: the coordinate of the bias, or the mean text. `slabs`
    are cut at once, as many as classes if it is 0; fewer can be steeper.
    """
    slabs, tolerance = slabs or classes, 0.3 if slabs else 0.03
    first, second = (np.zeros((classes, len(guess))) for _ in range(2))
    first[0] = second[1] = 1e4 * guess
    class_sums = -gradient(first)
    class_sums[0] = -gradient(second)[0]
    has_bias = bool(guess[-1])
    bias = guess if has_bias else class_sums.sum(0) / np.linalg.norm(class_sums.sum(0))
    direction = np.random.default_rng(0).standard_normal(len(guess))
    direction[-1] = 0
    direction -= (direction @ bias) * bias
    direction /= np.linalg.norm(direction)
    found, work, used = [], [(-1.0, 1.0, n_samples)], 2
    while work and used < requests:
        work.sort(key=lambda slab: -slab[2])
        chosen, free = [], slabs - 1
        while work and free >= 3:
            low, high, count = work.pop(0)
            parts = min(free - 1, max(2, min(3 * count, slabs - 2)))
            if high - low > 1e-7:
                chosen.append((low, high))
                free -= parts + 1
                thresholds_of = np.linspace(low, high, parts + 1).tolist()
                chosen[-1] = (low, high, thresholds_of)
        thresholds = sorted({value for _, _, values in chosen for value in values})[: slabs - 1]
        if not thresholds:
            break
        sums = gradient(slab_head(direction, bias, thresholds, classes, steepness)) + class_sums
        used += 1
        for j in range(1, len(thresholds)):
            low, high = thresholds[j - 1], thresholds[j]
            if any(a - 1e-12 <= low and high <= b + 1e-12 for a, b, _ in chosen):
                size = float(sums[j, -1] if has_bias else np.linalg.norm(sums[j]))
                count = round(size)
                if count == 1 and abs(size - 1) < tolerance:
                    found.append(sums[j])
                elif size > 0.3:
                    work.append((low, high, count))
    return found


class Federation:
    """Three real sites in this process, and a server that signs what it likes."""

    def __init__(self, folder: Path, store: tuple[Any, Any, Any, list[str]], size: int, plain: bool) -> None:
        x, y, self.text, self.classes = store
        create_kits(folder / "kits", list(NAMES), "127.0.0.1", 8443, deadline=60.0, wait=0.0, plain=plain)
        self.kit = read_server(folder / "kits" / "server")
        self.sign, self.n, self.plain = Signer(self.kit.folder / "signing.key"), 0, plain
        order, self.sites = np.random.default_rng(0).permutation(len(y)), {}
        for place, name in enumerate(NAMES):
            rows, path = order[place * size : (place + 1) * size], folder / f"{name}.npz"
            content = np.array([f"{name}{row}" for row in rows])
            facts = {"classes": np.array(self.classes), "text": self.text, "scale": np.array(100.0), "content": content}
            np.savez(path, x=x[rows], y=y[rows], encoder=np.array("toy@0"), **facts)
            kit = folder / "kits" / f"site-{name}"
            write_site(replace(read_site(kit), encoder=f"store:{path}"))
            self.sites[name] = Site(read_site(kit))

    def open(self, method: dict[str, Any], channel: dict[str, Any]) -> str:
        """Open a training at the first site; return its refusal, if any."""
        settings = build(
            {"method": method, "protocol": "own-test", "source": {"classes": self.classes}, "channel": channel}
        )
        run = {"identity": settings.identity(), "purpose": "", "contact": "", "trainings": 1, "rounds": 500}
        spec = {**training_spec(settings, Training("all", NAMES, ()), 0), "run": json.loads(json.dumps(run))}
        self.key = training_key(spec)
        return self.ask({"kind": "open", "round": 0, "spec": spec}, {})[1]

    def ask(self, words: dict[str, Any], arrays: dict[str, torch.Tensor]) -> tuple[Any, str]:
        self.n += 1
        header = {"training": self.key, "nonce": str(self.n), **words}
        reply, _ = self.sites["a"].answer(self.sign(Message(header, to_arrays(arrays))), Message({}))
        return reply.arrays, str(reply.header.get("error", {}).get("code", ""))

    def samples(self) -> tuple[Matrix, NDArray[np.int64]]:
        world = self.sites["a"].site_trainings[self.key].world
        rows = torch.from_numpy(world.members["a"].train)
        return world.x[rows].double().numpy(), world.y[rows].numpy()


def plain_gradient(federation: Federation, method: str, n_samples: int) -> Any:
    """Return a function that gets the gradient of the site at a head of the server's choice."""

    def request(arrays: dict[str, torch.Tensor]) -> Any:
        words = {"kind": "round", "round": federation.n, "client": "a", "trains": True, "version": 0, "held": []}
        upload, refusal = federation.ask(words, arrays)
        if refusal:
            raise PermissionError(refusal)
        return upload

    def gradient(head: Matrix) -> Matrix:
        values = torch.tensor(head, dtype=torch.float32)
        if method == "auto":
            upload = request({"weight": values[:, :-1], "bias": values[:, -1], "points": values[None]})
            return np.asarray(upload["gradient"][0], np.float64)
        upload = request({"head": values[:, :-1]})
        change = values[:, :-1].double().numpy() - upload["head"].astype(np.float64)
        return np.concatenate([change * n_samples / (1000.0 * 100.0), np.zeros((len(head), 1))], axis=1)

    return gradient


def server_alone(federation: Federation, method: dict[str, Any], channel: dict[str, Any]) -> tuple[float, str]:
    """Run the attack against the real site; return what was recovered, or why nothing was."""
    if refusal := federation.open(method, channel):
        return 0.0, f"refused: {refusal}"
    samples, _ = federation.samples()
    gradient = plain_gradient(federation, method["name"], len(samples))
    try:
        guess = bias_of(method["name"], federation.text)
        found = attack(gradient, len(federation.classes), guess, len(samples), STEEP, MAX_REQUESTS)
    except PermissionError as refusal:
        return 0.0, f"refused: {refusal}"
    return recovered(samples, [guess[: samples.shape[1]] for guess in found]), f"{len(found)} guesses"


def bias_of(method: str, text: Any) -> Matrix:
    """Return what a server uses as a bias: the coordinate of auto's, or the mean text."""
    if method == "auto":
        return np.eye(text.shape[1] + 1)[-1]
    mean = np.append(text.sum(0).astype(np.float64), 0.0)
    return np.asarray(mean / np.linalg.norm(mean))


def with_member(
    store: tuple[Any, Any, Any, list[str]], method: str, size: int, steepness: float, gradients: int
) -> float:
    """Return what is recovered of two sites from their sum, at heads within the bounds."""
    x, y, text, classes = store
    rows = np.random.default_rng(0).permutation(len(y))[: 2 * int(0.6 * size)]
    samples, labels = torch.from_numpy(x[rows]).double(), torch.from_numpy(y[rows])

    def gradient(head: Matrix) -> Matrix:
        values = torch.tensor(head)
        out = loss_and_gradient(Head(values[:, :-1], values[:, -1]), samples, labels)[1].numpy()
        return np.asarray(out * (1.0 if method == "auto" else np.append(np.ones(x.shape[1]), 0.0)))

    best = 0.0
    for slabs in (4, 6, 10, len(classes)):  # the steepest class of a slab head has slabs - 1 times the slope
        slope = steepness / (slabs - 1)
        found = attack(gradient, len(classes), bias_of(method, text), len(rows), slope, gradients, slabs)
        best = max(best, recovered(samples.numpy(), [guess[: x.shape[1]] for guess in found]))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--sizes", default="30,100,1000")
    options = parser.parse_args()
    store, scale = read_store(options.store), 100.0
    cases = {  # method, plain channel, verified channel, steepness and gradients within the bounds
        "auto": ({"name": "auto", "rounds": 500}, {}, MAX_HEAD_NORM, 5 * (make("auto").rounds - 2) + 2),
        "fedavg": (
            {"name": "fedavg", "lr": 1000.0, "weight_decay": 0.0, "batch_size": 10**6, "rounds": 500},
            {"clip": 1.0},
            scale * 1.0,
            52,
        ),
    }
    print("| method | samples at a site | plain | verified, server alone | verified, server and one member |")
    print("|---|---|---|---|---|")
    for name, (method, channel, steepness, gradients) in cases.items():
        for size in map(int, options.sizes.split(",")):
            cells = []
            for plain in (True, False):
                with tempfile.TemporaryDirectory() as folder:
                    federation = Federation(Path(folder), store, size, plain)
                    fraction, reason = server_alone(federation, method, {} if plain else {"verified": True, **channel})
                    cells.append(f"{fraction:.2f}" + ("" if plain else f" ({reason})"))
            member = with_member(store, name, size, steepness, gradients)
            print(f"| {name} | {size} | {cells[0]} | {cells[1]} | {member:.3f} |", flush=True)


if __name__ == "__main__":
    main()
