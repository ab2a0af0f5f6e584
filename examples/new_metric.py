"""A metric of one's own: Cohen's kappa, the accuracy beyond what the class shares would give.

Run it: python examples/new_metric.py
"""

from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import fedvlm
from fedvlm.evaluate.metrics import register


def cohen(p: Tensor, y: Tensor) -> float:
    """Cohen's kappa: 1 is always right, 0 is as good as guessing by the shares of the classes.

    `p` (rows, classes) are probabilities, `y` (rows,) the true classes; NaN where there is none.
    """
    guess, classes = p.argmax(1), p.shape[1]
    frequencies = [torch.bincount(labels, minlength=classes).double() / len(y) for labels in (guess, y)]
    agreement, chance = (guess == y).double().mean(), (frequencies[0] * frequencies[1]).sum()
    return ((agreement - chance) / (1 - chance)).item()  # one class alone: 0 / 0, which is left out


register("cohen", cohen)


def main() -> None:
    with TemporaryDirectory() as folder:
        result = fedvlm.run("zero-shot", protocol="own-test", out=f"{folder}/run", smoke=True)
        print(result.table(columns=["accuracy", "cohen"]))


if __name__ == "__main__":
    main()
