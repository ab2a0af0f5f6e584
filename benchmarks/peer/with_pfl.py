"""The federation of benchmarks/peers.py by pfl-research's simulated backend, on PyTorch."""

from importlib.metadata import version
from itertools import count

import torch
from clock import Clock, rows
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

torch.set_num_threads(1)
inputs, clock = rows(), Clock()
clients = len(inputs.x)


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Parameter(torch.tensor(inputs.start))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ self.head.T, y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
        return {}


class Ticks(TrainingProcessCallback):
    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: object, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        clock.tick()
        return False, Metrics()


def dataset(turn: int) -> Dataset:
    x, y = inputs.of(turn % clients, turn // clients)
    return Dataset(raw_data=[torch.from_numpy(x), torch.from_numpy(y)])


turns = count()
data = FederatedDataset(dataset, lambda: next(turns))
head = Head()
model = PyTorchModel(head, torch.optim.SGD, torch.optim.SGD(head.parameters(), lr=1.0))
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=len(inputs.order),
        evaluation_frequency=len(inputs.order) + 1,
        train_cohort_size=clients,
        val_cohort_size=0,
    ),
    SimulatedBackend(training_data=data, val_data=data),
    model,
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=inputs.rate, local_batch_size=inputs.batch),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[Ticks()],
)
clock.close(head.head.detach().numpy(), {name: version(name) for name in ("pfl", "torch")})
