"""How long honest heads of auto and ridge are, from which the limits of `check_state` in a verified sum are chosen.

python -m tools.verified_bounds --stores FOLDER [--seeds 5]
A limit is twice the largest norm of a class's weights that an honest run visits, on seeds that no table uses. The
length of an honest head depends on the training samples alone; accuracy on validation samples shows that runs whose
heads reach the limit are no better.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from fedvlm.engines.loop import finish_training, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan
from fedvlm.evaluate.metrics import mean_accuracy
from fedvlm.methods.auto import SERVER
from fedvlm.methods.ridge import RIDGES, SCALES, path_of
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

SIX = ["dog", "elephant", "giraffe", "horse", "house", "person"]
SETS = {
    "demo": ("", {}),
    "pets": ("pets23_vitb32.npz", {}),
    "caltech": ("caltech101_vitb32.npz", {}),
    "flowers": ("flowers102_vitb32.npz", {}),
    "pacs": ("pacs_vitb16.npz", {"classes": SIX}),
    "pets-": ("pets23_vitb32.npz", {}),  # without text
    "pacs-": ("pacs_vitb16.npz", {"classes": SIX}),
}
CLIENTS = {
    "iid": {"partition": "dirichlet", "count": 5, "alpha": 100.0},
    "skewed": {"partition": "dirichlet", "count": 5, "alpha": 0.3},
}
FIRST_SEED = 300  # of no table


def longest(method: str, shared: dict[str, torch.Tensor]) -> float:
    """Return the largest norm of a class's weights of a head that clients would evaluate next."""
    if method == "ridge":
        if "basis" not in shared:
            return 0.0
        path = path_of({key: value.double() for key, value in shared.items()})
        return max(SCALES) * max(float(path.head(ridge).weight.norm(dim=1).max()) for ridge in RIDGES)
    points = shared.get(f"{SERVER}points")
    return 0.0 if points is None else float((points - shared[f"{SERVER}anchor"]).norm(dim=-1).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", default=",".join(SETS))
    options = parser.parse_args()
    for name in options.sets.split(","):
        file, source = SETS[name]
        encoder = {"encoder": f"store:{options.stores / file}"} if file else {}
        for kind, clients in CLIENTS.items():
            for method in ("auto", "ridge"):
                table = {"protocol": "own-test", "source": source, "clients": clients, "method": method, **encoder}
                norms, accuracies = [], []
                for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
                    settings = build(table)
                    rows, _ = load(settings, lambda *progress: None)
                    rows = replace(rows, text=None) if name.endswith("-") else rows
                    prepared = prepare(settings, rows, seed)
                    (training,) = prepared.trainings
                    ids, world = training.train, prepared.world(training)
                    plan = Plan(ids, ())
                    engine = open_engine("batched", world, 1, settings.method.rounds)
                    state, local = initial_state(world)
                    visited: list[float] = []
                    keep = visited.append
                    state = run_rounds(
                        world,
                        engine,
                        plan,
                        state,
                        local,
                        lambda new, line, keep=keep, method=method: keep(longest(method, new.shared)),
                    )
                    outcome = finish_training(world, engine, plan, state, local)
                    norms.append(max(visited))
                    accuracies.append(mean_accuracy(outcome.scores, ids, "validation") or 0.0)
                mean = sum(accuracies) / len(accuracies)
                print(
                    f"{name:9} {kind:7} {method:6} longest {max(norms):9.1f}  validation accuracy {mean:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
