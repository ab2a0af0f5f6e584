"""What an encoder's patches know of its texts, before any prompt is trained.

python -m tools.prompts.diagnose demo [hf:FOLDER ...]     one column for each encoder
Per cent, mean over the demo's four styles, of rows that no test part of seeds 0, 1 and 2 holds.
"""

import sys
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.data.table import EmbeddedTable
from fedvlm.maths.optimal_transport import transport_plan
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build
from tools.auto.sets import silent

GAMMAS, STRENGTHS = (0.5, 0.8, 1.0), (0.1, 0.01)


def opened(encoder: str, **more: object) -> EmbeddedTable:
    return load(build({"method": "fedotp", "encoder": encoder, **more}), silent)[0]


def untested(rows: EmbeddedTable) -> Tensor:
    free = np.ones(len(rows.labels), bool)
    for seed in (0, 1, 2):
        settings = build({"method": "fedavg", "protocol": "own-test", "seeds": [seed]})
        prepared = prepare(settings, rows, seed)
        for member in prepared.world(prepared.trainings[0]).members.values():
            free[member.test] = False
    return torch.from_numpy(free)


def transported(patches: Tensor, text: Tensor, gamma: float, strength: float) -> Tensor:
    """FedOTP's logits, but for their scale, with the template's text in place of both prompts."""
    cosines = torch.einsum("rpd,cd->rcp", patches, text)[:, :, None].expand(-1, -1, 2, -1)
    return (transport_plan(cosines, "unbalanced", gamma, strength) * cosines).sum((-2, -1))


def measured(encoder: str) -> dict[str, str]:
    rows = opened(encoder)
    stopped = opened(encoder, source={"templates": "a picture of a {}."}).text
    assert rows.text is not None
    assert stopped is not None
    assert rows.patches is not None
    free, y = untested(rows), torch.from_numpy(rows.labels)
    patches = normalize(torch.as_tensor(rows.patches[:]).float(), dim=-1)
    mean = patches.mean(1)
    straight = mean @ torch.linalg.lstsq(mean[free], rows.x[free]).solution

    def right(logits: Tensor) -> float:
        hits = (logits.argmax(1) == y).numpy()
        styles = [hits[free.numpy() & (rows.domains == one)] for one in np.unique(rows.domains)]
        return 100 * float(np.mean([one.mean() for one in styles]))

    plans = [right(transported(patches, rows.text, *both)) for both in product(GAMMAS, STRENGTHS)]
    return {
        "pooled embedding": f"{right(rows.x @ rows.text.T):.1f}",
        "pooled embedding, text with a full stop": f"{right(rows.x @ stopped.T):.1f}",
        "mean of the patches": f"{right(mean @ rows.text.T):.1f}",
        "mean of the patches, text with a full stop": f"{right(mean @ stopped.T):.1f}",
        "FedOTP's plan, γ 0.5 to 1, λ 0.1 and 0.01": f"{min(plans):.1f} to {max(plans):.1f}",
        "mean of the patches, mapped to the pooled": f"{right(straight @ rows.text.T):.1f}",
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {name: measured(name) for name in sys.argv[1:] or ["demo"]}
    print("| zero-shot, % | " + " | ".join(found) + " |")
    print("|---|" + "---:|" * len(found))
    for view in next(iter(found.values())):
        print(f"| {view} | " + " | ".join(one[view] for one in found.values()) + " |")


if __name__ == "__main__":
    main()
