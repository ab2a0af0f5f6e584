"""auto beside other methods on all data sets at hand; tools.auto.table prints what came of it.

python -m tools.auto.measure --stores FOLDER --seeds 5 [--sets demo] [--methods auto,alone]
Rates of methods that train by gradients are chosen on validation rows, per set and seed, by a third
of the rounds each. Hits of every test row are kept in --work, so a second call measures only what
is missing.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from fedvlm.engines.client import predict
from fedvlm.engines.loop import finish_training, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan
from fedvlm.runner.prepare import Prepared, prepare
from fedvlm.runner.settings import build
from tools.auto.fits import Fits, remembered
from tools.auto.sets import LODO, Set, every

LARGE = 50.0  # a logit scale above it is CLIP's
RATES = {  # by the encoder's logit scale: the demo's, CLIP's
    "fedavg": ((1e-2, 3e-2, 1e-1), (5e-5, 5e-4, 5e-3)),
    "fedot": ((3e-3, 1e-2, 3e-2), (5e-5, 5e-4, 2e-3)),
    "faa-clip": ((1e-3, 3e-3, 1e-2), (5e-5, 5e-4, 5e-3)),
    "fedotp": ((3e-2, 1e-1, 3e-1), ()),  # stores have no patches
}
ROUNDS = {"fedavg": 30, "fedot": 30, "faa-clip": 12, "fedotp": 10}
METHODS = (
    *("zero-shot", "alone", "pooled", "tofa", "clip-gda"),
    *("fedavg", "fedot", "faa-clip", "fedotp", "probe", "auto"),
)


def variants(name: str, data_set: Set) -> Iterator[dict[str, Any]]:
    """The settings among which validation rows choose."""
    text = data_set.rows.text is not None
    if (name == "faa-clip" and not text) or (name == "fedotp" and data_set.rows.patches is None):
        return
    if name in RATES:
        overrides: dict[str, Any] = {"head": "text" if text else "random"}
        if name == "fedot":
            overrides["tau"] = data_set.rows.scale
        if name == "faa-clip":  # without an unseen client there is nothing to adapt to
            overrides = {"adaptation": data_set.protocol == LODO, "weight_decay": 2e-3}
        if name == "fedotp":
            overrides = {"ctx_init": "template", "local_epochs": 2}
        for rate in RATES[name][data_set.rows.scale > LARGE]:
            yield {"name": name, "lr": rate, "rounds": ROUNDS[name], **overrides}
    elif name in ("tofa", "clip-gda"):
        yield {"name": name, "text": text}
    elif name != "zero-shot" or text:
        yield {"name": name}


@dataclass(frozen=True)
class Measurement:
    correct: dict[str, list[str]]  # on test rows, by column
    validation: float  # mean accuracy
    bytes: int  # up and down, of the client with most
    exchanges: int  # in which anything travelled


def seen_by(prepared: Prepared) -> Measurement:
    correct: dict[str, list[str]] = {}
    good: list[float] = []
    size = exchanges = 0
    for training in prepared.trainings:
        world = prepared.world(training)
        engine = open_engine("batched" if world.method.name in RATES else "single", world, 1, world.method.rounds)
        taught = prepared.measured_training(training)
        plan = Plan(taught.train, taught.unseen)
        state, initial_local = initial_state(world)
        sizes: list[float] = []

        def count(state: Any, line: Any, sizes: list[float] = sizes) -> None:
            client_lines = line["clients"].values()
            sizes.append(max((c["bytes_up"] + c["bytes_down"] for c in client_lines), default=0))

        state = run_rounds(world, engine, plan, state, initial_local, count)
        outcome = finish_training(world, engine, plan, state, initial_local)
        size, exchanges = int(sum(sizes)), sum(n_bytes > 0 for n_bytes in sizes)
        for id in (*training.train, *training.unseen):
            if id in training.unseen and not prepared.generalises:
                continue
            member = world.members[id]
            local = outcome.local.get(id, initial_local)
            sent = world.method.send(outcome.shared, id)
            y = world.y[torch.from_numpy(member.test)]
            right = predict(world, sent, local, member.test).argmax(1) == y
            column = "unseen" if id in training.unseen else "own"
            correct.setdefault(column, []).append("".join(map(str, right.int().tolist())))
            if id in training.train:
                score = outcome.scores[id]
                good.append(score["validation_hits"] / max(score["validation_rows"], 1))
    return Measurement(correct, float(np.mean(good)), size, exchanges)


def prepared_of(data_set: Set, method: dict[str, Any], seed: int) -> Prepared:
    values = {"method": method, "clients": data_set.clients, "protocol": data_set.protocol}
    return prepare(build({**values, "seeds": [seed]}), data_set.rows, seed)


def measure(data_set: Set, name: str, seed: int, fits: Fits) -> dict[str, Any]:
    """What a method reaches; `seconds` are of its run, `tuning` those of choosing a rate."""
    start, saved = process_time(), fits.saved
    candidates = list(variants(name, data_set))
    if not candidates:
        return {}
    if len(candidates) > 1:
        short = [{**candidate, "rounds": candidate["rounds"] // 3} for candidate in candidates]
        accuracies = [seen_by(prepared_of(data_set, candidate, seed)).validation for candidate in short]
        candidates = [candidates[int(np.argmax(accuracies))]]
    middle = process_time()
    measurement = asdict(seen_by(prepared_of(data_set, candidates[0], seed)))
    seconds = process_time() - middle + fits.saved - saved
    spent = {"tuning": round(middle - start, 1), "seconds": round(seconds, 2)}
    return {**measurement, **spent, "settings": candidates[0]}


def file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=Path, default=Path("stores"))
    parser.add_argument("--work", type=Path, default=Path("runs/auto"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", default="", help="part of a name; all by default")
    parser.add_argument("--methods", default=",".join(METHODS))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, opened in every(args.stores, args.work):
        if args.sets not in name:
            continue
        data_set: Set | None = None
        for seed in range(args.seeds):
            with remembered() as fits:
                for method in args.methods.split(","):
                    path = args.work / f"{file_name(name)}-{method}-{seed}.json"
                    if not path.exists():
                        data_set = data_set or opened()
                        path.write_text(json.dumps(measure(data_set, method, seed, fits)))
                    print(f"{name}, {method}, seed {seed}", flush=True)


if __name__ == "__main__":
    main()
