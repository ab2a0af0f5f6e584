"""The federation of benchmarks/peers.py by FedJAX's own federated averaging."""

from importlib.metadata import version

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from clock import Clock, rows
from fedjax.algorithms import fed_avg

jax.tree_map = jax.tree_util.tree_map  # newer releases of jax have not the name that FedJAX calls
inputs, clock = rows(), Clock()


class Ordered:
    """A client's rows in minibatches of a given order, where FedJAX would shuffle by itself."""

    def __init__(self, client: int, number: int) -> None:
        self.client, self.number = client, number

    def __len__(self) -> int:
        return inputs.x.shape[1]

    def shuffle_repeat_batch(self, hparams: object) -> list[dict[str, np.ndarray]]:
        x, y = inputs.of(self.client, self.number)
        size = inputs.batch
        return [{"x": x[i : i + size], "y": y[i : i + size]} for i in range(0, len(y), size)]


def loss(params: jax.Array, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(batch["x"] @ params.T)
    return -jnp.take_along_axis(logits, batch["y"][:, None], axis=1)[:, 0]


algorithm = fed_avg.federated_averaging(
    fedjax.grad(loss),
    fedjax.optimizers.sgd(inputs.rate),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=inputs.batch, num_epochs=1),
)
state = algorithm.init(jnp.asarray(inputs.start))
key = jax.random.PRNGKey(0)
for number in range(len(inputs.order)):
    clients = [(client, Ordered(client, number), key) for client in range(len(inputs.x))]
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)
    clock.tick()
clock.close(np.asarray(state.params), {name: version(name) for name in ("fedjax", "jax")})
