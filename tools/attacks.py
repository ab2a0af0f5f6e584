"""Attack the uploads of methods as a server would, and write one table row for each method and size.

python -m tools.attacks --store FILE.npz [--methods auto,fedavg] [--samples 30,100,1000] [--classes a,b]
Four clients have so many training samples each; the first is attacked, or in a sum helps the server. Columns:
  span, span of sum    AUC of telling members by second moments (honest server, plain mode and verified sum)
  recovered            fraction of samples that a server which deviates recovers in plain mode
  with one member      the same from the verified sum, by a server and a member within the bounds of `check_state`
"""

import argparse
from dataclasses import replace
from pathlib import Path

from fedvlm.channel.verified import SAMPLES_PER_DIMENSION
from fedvlm.engines.client import Task
from fedvlm.engines.loop import initial_state
from fedvlm.engines.sequential import Sequential
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.reconstruction import recovered_from_sum, recovered_from_upload, span_auc
from fedvlm.runner.settings import build

METHODS = "auto,probe,ridge,tofa,gh-ofl,fedavg,fedprox,fedot,fedrep,ditto"
SEED = 400  # of no table


def attack(method: str, store: Path, n_samples: int, classes: list[str]) -> list[float | None]:
    """Return the columns of one row."""
    source = {"classes": classes} if classes else {}
    table = {"protocol": "own-test", "encoder": f"store:{store}", "method": method, "source": source}
    settings = build({**table, "clients": {"partition": "iid", "count": 4}})
    rows, _ = load(settings, lambda *progress: None)
    prepared = prepare(settings, rows, SEED)
    (training,) = prepared.trainings
    world = prepared.world(training)
    members = {id: replace(member, train=member.train[:n_samples]) for id, member in world.members.items()}
    if min(len(member.train) for member in members.values()) < n_samples:
        return [None] * 4
    world, ids = replace(world, members=members), sorted(training.train)
    state, local = initial_state(world)
    tasks = [Task(id, world.method.send(state.shared, id), local, True) for id in ids]
    replies = Sequential(world).round(0, tasks).replies
    uploads = [replies[id].upload or {} for id in ids]
    leaves_gram = 4 * n_samples >= SAMPLES_PER_DIMENSION * (world.frozen.dim + 1)
    return [
        span_auc(world, ids[:1], uploads[:1]),
        span_auc(world, ids, uploads) if leaves_gram else None,  # else the diagonal alone leaves
        recovered_from_upload(world, ids[0]),
        recovered_from_sum(world, ids),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--samples", default="30,100,1000")
    parser.add_argument("--classes", default="")
    options = parser.parse_args()
    classes = options.classes.split(",") if options.classes else []
    print("| method | samples | span | span of sum | recovered | with one member |\n|---|---|---|---|---|---|")
    for method in options.methods.split(","):
        for n_samples in map(int, options.samples.split(",")):
            cells = attack(method, options.store, n_samples, classes)
            words = ("not measured" if cell is None else f"{cell:.2f}" for cell in cells)
            print(f"| {method} | {n_samples} | {' | '.join(words)} |", flush=True)


if __name__ == "__main__":
    main()
