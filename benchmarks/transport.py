"""What a transport plan costs beside the plain ways of computing it.

Run with `python benchmarks/transport.py`. All run in turns in one process on one thread; figures
are medians. "diagonal" scales by dense diagonal matrices, as public code does; "matmul" is the same
scaling by products of matrices and vectors. Both stop, as the paper says, when the mean change over
the whole batch is below 1e-3, or after 100 iterations; "matmul, exact" goes on until no column of a
plan is off by more than 1e-6.
"""

from collections.abc import Callable
from statistics import median
from time import process_time

import torch
from figures import report
from torch import Tensor

from fedvlm.maths import optimal_transport

IMAGES, PATCHES, CLASSES, PROMPTS = 32, 196, 102, 2


def cosines() -> Tensor:
    """(images, classes, prompts, patches) as CLIP has them: 0.2 ± 0.03."""
    draw = torch.Generator().manual_seed(0)
    return 0.2 + 0.03 * torch.randn(IMAGES, CLASSES, PROMPTS, PATCHES, generator=draw)


def scaling(similarity: Tensor, gamma: float, strength: float, diagonal: bool, exact: bool = False) -> Tensor:
    kernel = torch.exp((similarity.mT - 1) / strength).flatten(0, 1)  # (problems, patches, prompts)
    rows = torch.full((len(kernel), PATCHES, 1), 1 / PATCHES)
    columns = torch.full((len(kernel), PROMPTS, 1), gamma / PROMPTS)
    if diagonal:
        by_row = torch.diag_embed(1 / rows[..., 0]) @ kernel
        by_column = torch.diag_embed(1 / columns[..., 0]) @ kernel.mT
    else:
        by_row, by_column = kernel / rows, kernel.mT / columns
    u, v = torch.ones_like(rows), torch.ones_like(columns)
    for _ in range(1000 if exact else 100):
        u = (1 / (by_row @ v)).clamp(max=1)
        before, v = v, 1 / (by_column @ u)
        done = (v / before - 1).abs().max() < 1e-6 if exact else (v - before).abs().mean() < 1e-3
        if done:
            break
    plan = torch.diag_embed(u[..., 0]) @ kernel @ torch.diag_embed(v[..., 0]) if diagonal else u * kernel * v.mT
    return plan.mT.unflatten(0, similarity.shape[:2])


def milliseconds(run: Callable[[], Tensor]) -> float:
    start = process_time()
    run()
    return 1e3 * (process_time() - start)


def compare(gamma: float, strength: float, repeats: int = 7) -> None:
    similarity = cosines()
    exact = optimal_transport.transport_plan(similarity.double(), "unbalanced", gamma, strength)
    runs: dict[str, Callable[[], Tensor]] = {
        "diagonal": lambda: scaling(similarity, gamma, strength, True),
        "matmul": lambda: scaling(similarity, gamma, strength, False),
        "matmul, exact": lambda: scaling(similarity, gamma, strength, False, True),
        "ours": lambda: optimal_transport.transport_plan(similarity, "unbalanced", gamma, strength),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(milliseconds(run))
    cost = {name: median(some) for name, some in times.items()}
    off = {name: ((run() - exact).abs().max() / exact.max()).item() for name, run in runs.items()}
    text = "  ".join(f"{name} {cost[name]:6.1f} ms (off by {off[name]:.0e})" for name in runs)
    ratios = ", ".join(f"{cost[name] / cost['ours']:.1f} of {name}" for name in runs if name != "ours")
    report(
        f"gamma {gamma} lambda {strength}: {text}  ratio {ratios}",
        f"γ = {gamma}, λ = {strength}",
        **{f"{name} ms": value for name, value in cost.items()},
        **{f"{name}: ours": value / cost["ours"] for name, value in cost.items() if name != "ours"},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{IMAGES} images, {PATCHES} patches, {CLASSES} classes, {PROMPTS} prompts")
    for gamma, strength in ((0.8, 0.1), (1.0, 0.1), (0.8, 0.01)):
        compare(gamma, strength)
