"""A protocol of one's own: each client in turn is unseen; the worst of them is what counts.

Run it: python examples/new_protocol.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import fedvlm
from fedvlm.evaluate.protocols import (
    Done,
    Table,
    Training,
    Weights,
    Who,
    accuracy,
    register,
)


@register
@dataclass(frozen=True)
class WorstUnseen:
    name = "worst-unseen"
    what = "each client in turn is unseen; the worst and the mean of them"
    every_round = False  # metrics are measured at the end

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        others = {one: tuple(id for id in domains if id != one) for one in domains}
        return [Training(one, rest, (one,)) for one, rest in others.items()]

    def table(self, domains: Mapping[str, str], done: Done, generalises: bool) -> Table:
        found = [accuracy(scores, one.unseen) for one, scores in done.values()]
        there = [value for value in found if value is not None] if generalises else []
        worst, mean = (min(there), sum(there) / len(there)) if there else (None, None)
        return {"unseen, worst": worst, "unseen, mean": mean}

    def weights(self, who: Who, generalises: bool) -> dict[str, Weights]:
        cells = [(name, id) for name, (_, unseen) in who.items() for id in unseen]
        even = dict.fromkeys(cells, 1 / len(cells))
        return {"unseen, mean": even} if generalises else {}  # the worst is no mean of hits


def main() -> None:
    method = {"name": "fedavg", "rounds": 3}
    with TemporaryDirectory() as folder:
        out = f"{folder}/run"
        print(fedvlm.run(method, protocol="worst-unseen", out=out, smoke=True).table())


if __name__ == "__main__":
    main()
