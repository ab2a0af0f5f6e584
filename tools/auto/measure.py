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


def variants(name: str, one: Set) -> Iterator[dict[str, Any]]:
    """The settings among which validation rows choose."""
    text = one.rows.text is not None
    if (name == "faa-clip" and not text) or (name == "fedotp" and one.rows.patches is None):
        return
    if name in RATES:
        more: dict[str, Any] = {"head": "text" if text else "random"}
        if name == "fedot":
            more["tau"] = one.rows.scale
        if name == "faa-clip":  # without an unseen client there is nothing to adapt to
            more = {"adaptation": one.protocol == LODO, "weight_decay": 2e-3}
        if name == "fedotp":
            more = {"ctx_init": "template", "local_epochs": 2}
        for rate in RATES[name][one.rows.scale > LARGE]:
            yield {"name": name, "lr": rate, "rounds": ROUNDS[name], **more}
    elif name in ("tofa", "clip-gda"):
        yield {"name": name, "text": text}
    elif name != "zero-shot" or text:
        yield {"name": name}


@dataclass(frozen=True)
class Seen:
    hits: dict[str, list[str]]  # on test rows, by column
    validation: float  # mean accuracy
    bytes: int  # up and down, of the client with most
    exchanges: int  # in which anything travelled


def seen_by(prepared: Prepared) -> Seen:
    hits: dict[str, list[str]] = {}
    good: list[float] = []
    size = exchanges = 0
    for training in prepared.trainings:
        world = prepared.world(training)
        engine = open_engine("batched" if world.method.name in RATES else "single", world, 1, world.method.rounds)
        taught = prepared.measured_training(training)
        plan = Plan(taught.train, taught.unseen)
        state, fresh = initial_state(world)
        sizes: list[float] = []

        def count(state: Any, line: Any, sizes: list[float] = sizes) -> None:
            each = line["clients"].values()
            sizes.append(max((c["bytes_up"] + c["bytes_down"] for c in each), default=0))

        state = run_rounds(world, engine, plan, state, fresh, count)
        outcome = finish_training(world, engine, plan, state, fresh)
        size, exchanges = int(sum(sizes)), sum(one > 0 for one in sizes)
        for id in (*training.train, *training.unseen):
            if id in training.unseen and not prepared.generalises:
                continue
            member = world.members[id]
            local = outcome.local.get(id, fresh)
            sent = world.method.send(outcome.shared, id)
            y = world.y[torch.from_numpy(member.test)]
            right = predict(world, sent, local, member.test).argmax(1) == y
            column = "unseen" if id in training.unseen else "own"
            hits.setdefault(column, []).append("".join(map(str, right.int().tolist())))
            if id in training.train:
                score = outcome.scores[id]
                good.append(score["validation_hits"] / max(score["validation_rows"], 1))
    return Seen(hits, float(np.mean(good)), size, exchanges)


def prepared_of(one: Set, method: dict[str, Any], seed: int) -> Prepared:
    values = {"method": method, "clients": one.clients, "protocol": one.protocol}
    return prepare(build({**values, "seeds": [seed]}), one.rows, seed)


def measure(one: Set, name: str, seed: int, fits: Fits) -> dict[str, Any]:
    """What a method reaches; `seconds` are of its run, `tuning` those of choosing a rate."""
    begin, saved = process_time(), fits.saved
    many = list(variants(name, one))
    if not many:
        return {}
    if len(many) > 1:
        short = [{**each, "rounds": each["rounds"] // 3} for each in many]
        found = [seen_by(prepared_of(one, each, seed)).validation for each in short]
        many = [many[int(np.argmax(found))]]
    middle = process_time()
    seen = asdict(seen_by(prepared_of(one, many[0], seed)))
    seconds = process_time() - middle + fits.saved - saved
    spent = {"tuning": round(middle - begin, 1), "seconds": round(seconds, 2)}
    return {**seen, **spent, "settings": many[0]}


def file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--stores", type=Path, default=Path("stores"))
    ask.add_argument("--work", type=Path, default=Path("runs/auto"))
    ask.add_argument("--seeds", type=int, default=5)
    ask.add_argument("--sets", default="", help="part of a name; all by default")
    ask.add_argument("--methods", default=",".join(METHODS))
    args = ask.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, opened in every(args.stores, args.work):
        if args.sets not in name:
            continue
        one: Set | None = None
        for seed in range(args.seeds):
            with remembered() as fits:
                for method in args.methods.split(","):
                    path = args.work / f"{file_name(name)}-{method}-{seed}.json"
                    if not path.exists():
                        one = one or opened()
                        path.write_text(json.dumps(measure(one, method, seed, fits)))
                    print(f"{name}, {method}, seed {seed}", flush=True)


if __name__ == "__main__":
    main()
