"""A method of one's own: FedAvg whose clients each keep a bias per class, for unequal labels.

Run it: python examples/new_method.py
"""

from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import fedvlm
from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, Traits
from fedvlm.testing import check_method


@fedvlm.register
@dataclass(frozen=True)
class FedBias:
    lr: float = 1e-2  # of the head and the bias
    batch_size: int = 32
    local_epochs: int = 1
    rounds: int = 30

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        assert frozen.text is not None  # promised by `needs`
        shared = {"head": frozen.text}  # averaged by the server
        local = {"bias": torch.zeros(len(frozen.classes))}  # never leaves its client
        return shared, local

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return frozen.scale * (x @ sent["head"].mT + local["bias"])

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        return parts.masked_cross_entropy(self.predict(frozen, shared, local, batch.x), batch.y, batch.real)

    name = "fedbias"
    traits = Traits(needs=frozenset({"image", "text"}))
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation


def main() -> None:
    check_method(FedBias())  # the same checks as our own methods pass, on every engine
    clients = {"partition": "dirichlet", "count": 6, "alpha": 0.3}  # each its own mix of classes
    plain = {"name": "fedavg", "lr": 1e-2, "rounds": 30}
    with TemporaryDirectory() as folder:
        for number, method in enumerate(["zero-shot", plain, FedBias()]):
            out = f"{folder}/{number}"
            result = fedvlm.run(method, clients=clients, protocol="own-test", out=out, smoke=True)
            print(result.table())


if __name__ == "__main__":
    main()
