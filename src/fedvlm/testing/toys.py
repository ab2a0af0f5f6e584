"""Toy federations and towers, small enough to train in a moment."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from fedvlm.core import Client, Frozen, Method, schedule
from fedvlm.engines.batched import Batched
from fedvlm.engines.client import ClientRows, World
from fedvlm.engines.loop import Outcome, finish_training, initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.maths.image_tower import ImageTower
from fedvlm.maths.text_tower import Affine, Layer, TextTower


def toy_world(method: Method, sizes: Sequence[int] = (40, 9, 70, 33), dim: int = 16) -> World:
    """Make a toy federation: four classes, clients of unequal size, each with its own shift.

    Args:
        method: that the federation is to train.
        sizes: training samples of each client.
        dim: dimension of the embeddings.

    Returns:
        Method, samples and clients, as `train_toy` takes them.

    Example:
        >>> import fedvlm
        >>> from fedvlm.testing import *
        >>> len(toy_world(fedvlm.make("fedavg")).members)
        4
    """
    draw = torch.Generator().manual_seed(7)
    unit = torch.nn.functional.normalize
    text = unit(torch.randn(4, dim, generator=draw), dim=1)
    x, y, members, first = [], [], {}, 0
    for number, size in enumerate(sizes):
        rows = size + 20
        labels = torch.randint(4, (rows,), generator=draw)
        shift = 0.4 * torch.randn(dim, generator=draw)
        noise = 0.3 * torch.randn(rows, dim, generator=draw)
        x.append(unit(text[labels] + shift + noise, dim=1))
        y.append(labels)
        index = np.arange(first, first + rows)
        members[f"client-{number}"] = ClientRows(index[:size], index[size : size + 10], index[size + 10 :])
        first += rows
    classes = ("ant", "bee", "cat", "dog")
    needs = method.traits.needs
    frozen = Frozen(
        classes,
        dim,
        20.0,
        text,
        text_tower=toy_text_tower(len(classes), dim) if "text tower" in needs else None,
        image_tower=toy_image_tower(dim) if "image tower" in needs else None,
        descriptions=unit(text[:, None] + 0.2 * torch.randn(4, 3, dim, generator=draw), dim=2),
    )
    inputs = torch.cat(x)
    if "image tower" in needs:
        inputs = (inputs @ torch.randn(dim, 3 * 64, generator=draw)).reshape(-1, 3, 8, 8)
    elif "patches" in needs:
        patches = inputs[:, None] + 0.3 * torch.randn(len(inputs), 6, dim, generator=draw)
        inputs = (3.0 * patches).half()
    last = members[f"client-{len(sizes) - 1}"]
    reference = last.train if method.traits.training.reference else last.train[:0]
    return World(method, frozen, 3, x=inputs, y=torch.cat(y), members=members, reference=reference)


def make_test_client(
    x: torch.Tensor, y: torch.Tensor, order: torch.Tensor, held_x: torch.Tensor, held_y: torch.Tensor
) -> Client:
    """Make a client, or several with a leading axis, of samples alone.

    Args:
        x: (..., samples, dim) training samples.
        y: (..., samples) their labels.
        order: (..., steps, batch) samples of each minibatch.
        held_x: (..., validation, dim) validation samples.
        held_y: (..., validation) their labels.

    Returns:
        What `update` and `adapt` of a method take.

    Example:
        >>> import torch
        >>> from fedvlm.testing import *
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> make_test_client(x, y, y[None], x, y).x.shape
        torch.Size([4, 4])
    """
    lead = y.shape[:-1]
    none = x.new_zeros(*lead, 0, *x.shape[len(lead) + 1 :])
    no_noise = x.new_zeros(*order.shape[:-1], 0)
    texts = x.new_zeros(*lead, 0, 0, x.shape[-1])
    return Client(x, y, order, held_x, held_y, none, order[..., :0], texts, no_noise, none)


def toy_text_tower(classes: int, dim: int, width: int = 8) -> TextTower:
    """Make a causal transformer of one layer with random weights; class names have one or two tokens.

    Args:
        classes: number of classes.
        dim: dimension of the class features.
        width: of the token vectors.

    Returns:
        A text tower for prompt methods.

    Example:
        >>> from fedvlm.testing import *
        >>> tower = toy_text_tower(4, 16)
    """
    draw = torch.Generator().manual_seed(11)

    def affine(out: int, into: int) -> Affine:
        return Affine(torch.randn(out, into, generator=draw) / into**0.5, torch.randn(out, generator=draw) / 9)

    norm = Affine(torch.ones(width), torch.zeros(width))
    return TextTower(
        start=torch.randn(width, generator=draw),
        template="of a {}",
        prefix=torch.randn(2, width, generator=torch.Generator().manual_seed(13)),
        suffixes=torch.randn(classes, 3, width, generator=draw),
        ends=torch.arange(classes) % 2 + 1,
        positions=0.1 * torch.randn(24, width, generator=draw),
        layers=(
            Layer(
                norm,
                affine(3 * width, width),
                affine(width, width),
                norm,
                affine(2 * width, width),
                affine(width, 2 * width),
            ),
        ),
        final=norm,
        projection=torch.randn(dim, width, generator=draw),
        heads=2,
        eps=1e-5,
        activation="quick_gelu",
    )


def toy_image_tower(dim: int) -> ImageTower:
    """Make CLIP's image tower with two layers of width 8 and random weights, for images of 8 x 8.

    Args:
        dim: dimension of the embeddings.

    Returns:
        An image tower for methods that train it.

    Example:
        >>> from fedvlm.testing import *
        >>> tower = toy_image_tower(16)
    """
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = CLIPVisionModelWithProjection(
            CLIPVisionConfig(
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
                projection_dim=dim,
                attn_implementation="eager",
            )
        )
    model.eval().requires_grad_(False)
    return ImageTower(model, lambda pixels: model(pixel_values=pixels).image_embeds)


def train_toy(world: World, engine: str = "batched", workers: int = 1, **plan: Any) -> Outcome:
    """Train on all clients but the last, which stays unseen.

    Args:
        world: a toy federation.
        engine: batched or single.
        workers: processes.
        plan: further fields of a training's plan.

    Returns:
        Shared and local tensors at the end.

    Example:
        >>> import fedvlm
        >>> from fedvlm.testing import *
        >>> sorted(train_toy(toy_world(shorten(fedvlm.make("fedavg")))).shared)
        ['head']
    """
    ids = sorted(world.members)
    full_plan = Plan(tuple(ids[:-1]), (ids[-1],), **plan)
    runner = Sequential(world) if engine == "single" else Batched(world, workers)
    state, initial_local = initial_state(world)
    try:
        state = run_rounds(world, runner, full_plan, state, initial_local, lambda state, line: None)
        return finish_training(world, runner, full_plan, state, initial_local)
    finally:
        runner.close()


def shorten(method: Method) -> Method:
    """Return the method with at most two rounds and two epochs, enough to run every verb.

    Args:
        method: any method.

    Returns:
        The same method with a shorter schedule.

    Example:
        >>> import fedvlm
        >>> from fedvlm.testing import *
        >>> shorten(fedvlm.make("fedavg")).rounds
        2
    """
    names = {setting.name for setting in fields(method)}
    now = {"rounds": method.rounds, "local_epochs": schedule(method).local_epochs}
    return replace(method, **{key: min(value, 2) for key, value in now.items() if key in names})
