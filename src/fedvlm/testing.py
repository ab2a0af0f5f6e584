"""The conformance suite: `check_method(MyMethod(...))` says what a method breaks, if anything."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fedvlm import tensors
from fedvlm.core import Client, Frozen, Method, Noisy, Telling, Tensors, register, schedule
from fedvlm.engines.batched import Batched
from fedvlm.engines.claims import sum_gap
from fedvlm.engines.client import Part, World, client, here
from fedvlm.engines.loop import Outcome, finish, start, train
from fedvlm.engines.single import Single
from fedvlm.engines.state import Plan, State
from fedvlm.maths.prompts import Affine, Layer, TextTower
from fedvlm.maths.towers import ImageTower
from fedvlm.record import pack, unpack
from fedvlm.storage.sealed import read_tensors, write_tensors

CLOSE = 1e-5  # relative, between engines


def toy_world(method: Method, sizes: Sequence[int] = (40, 9, 70, 33), dim: int = 16) -> World:
    """A made federation: four classes, clients of unequal size, each with its own shift."""
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
        members[f"client-{number}"] = Part(
            index[:size], index[size : size + 10], index[size + 10 :]
        )
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
    seen = torch.cat(x)
    if "image tower" in needs:
        seen = (seen @ torch.randn(dim, 3 * 64, generator=draw)).reshape(-1, 3, 8, 8)
    elif "patches" in needs:
        patches = seen[:, None] + 0.3 * torch.randn(len(seen), 6, dim, generator=draw)
        seen = (3.0 * patches).half()
    last = members[f"client-{len(sizes) - 1}"]
    reference = last.train if method.traits.reference else last.train[:0]
    return World(method, frozen, 3, x=seen, y=torch.cat(y), members=members, reference=reference)


def bare(
    x: torch.Tensor,
    y: torch.Tensor,
    order: torch.Tensor,
    held_x: torch.Tensor,
    held_y: torch.Tensor,
) -> Client:
    """A client, or several with a leading axis, of rows alone."""
    lead = y.shape[:-1]
    none = x.new_zeros(*lead, 0, *x.shape[len(lead) + 1 :])
    no_noise = x.new_zeros(*order.shape[:-1], 0)
    texts = x.new_zeros(*lead, 0, 0, x.shape[-1])
    return Client(x, y, order, held_x, held_y, none, order[..., :0], texts, no_noise)


def toy_text_tower(classes: int, dim: int, width: int = 8) -> TextTower:
    """A causal transformer of one layer and random weights; class names have one or two tokens."""
    draw = torch.Generator().manual_seed(11)

    def affine(out: int, into: int) -> Affine:
        return Affine(
            torch.randn(out, into, generator=draw) / into**0.5, torch.randn(out, generator=draw) / 9
        )

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
    """CLIP's image tower with two layers of width 8, random weights, for pictures of 8 x 8."""
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


def learn(world: World, engine: str = "batched", workers: int = 1, **plan: Any) -> Outcome:
    """Trains on all clients but the last, which stays unseen."""
    ids = sorted(world.members)
    whole = Plan(tuple(ids[:-1]), (ids[-1],), **plan)
    runner = Single(world) if engine == "single" else Batched(world, workers)
    state, fresh = start(world)
    try:
        state = train(world, runner, whole, state, fresh, lambda state, line: None)
        return finish(world, runner, whole, state, fresh)
    finally:
        runner.close()


def short(method: Method) -> Method:
    """The method with two rounds and two epochs at most: enough to see every verb at work."""
    names = {one.name for one in fields(method)}
    now = {"rounds": method.rounds, "epochs": schedule(method).epochs}
    return replace(method, **{key: min(value, 2) for key, value in now.items() if key in names})


def check_method(method: Method) -> None:
    """Raises AssertionError with what is broken and what to do. Takes a few seconds."""
    register(type(method))
    world = toy_world(short(method))
    check_is_pure(world)
    reference = learn(world)
    check_same(learn(world), reference, 0.0, "the same seed gives other tensors the second time")
    check_same(learn(world, "single"), reference, CLOSE, "single and batched engines differ")
    check_order(world, reference)
    check_padding(world)
    check_uploads(world)
    check_roundtrip(world, reference)
    check_unseen(world, reference)
    gap = sum_gap(world)
    assert gap <= CLOSE, f"from the sum of the uploads its aggregate differs by {gap:.1e}"


def check_is_pure(world: World) -> None:
    """No verb may change an argument: the server and other clients hold the same tensors."""
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    sent = method.send(shared, "client-0")
    one = client(world, "client-0", 0)
    before = tensors.copy({**_named("shared", shared), **_named("local", local), "x": one.x})
    upload, own = method.update(frozen, sent, local, one)
    held = tensors.copy(_named("upload", upload))
    weights = torch.tensor([1.0, 3.0])
    if upload:
        shared_after = method.aggregate(shared, [upload, upload], weights, ["client-0", "client-1"])
    else:
        shared_after = shared
    x = tensors.full(one.x)
    method.predict(frozen, method.send(shared_after, "client-0"), own, x)
    method.adapt(frozen, sent, own, one)
    after = {**_named("shared", shared), **_named("local", local), "x": one.x}
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    changed += [
        key for key, old in held.items() if not torch.equal(old, _named("upload", upload)[key])
    ]
    assert not changed, f"a verb changed its argument {changed[0]}; return new tensors instead"


def check_order(world: World, reference: Outcome) -> None:
    turned = replace(world, members=dict(reversed(list(world.members.items()))))
    check_same(learn(turned), reference, 0.0, "the order of clients changes the result")


def check_padding(world: World) -> None:
    """What lies in padded rows, and how many there are, is nobody's business."""
    from fedvlm.engines.client import pad

    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    one = client(world, "client-1", 0)
    wide = pad([one, client(world, "client-2", 0)])
    padded = type(one)(*(getattr(wide, field.name)[0] for field in fields(one)))
    soiled = replace(
        padded,
        x=soil(padded.x, padded.y < 0),
        held_x=soil(padded.held_x, padded.held_y < 0),
    )
    plain = method.update(frozen, method.send(shared, "client-1"), local, one)
    for other in (padded, soiled):
        again = method.update(frozen, method.send(shared, "client-1"), local, other)
        for name, a, b in zip(("upload", "local"), plain, again, strict=True):
            gap = tensors.difference(a, b)
            assert gap <= CLOSE, (
                f"{name} depends on padding by {gap:.1e}; use `batch.real`, and no row of y = -1"
            )


def soil(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.where(where.reshape(-1, *[1] * (x.ndim - 1)), 7.0, x)


def check_uploads(world: World) -> None:
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    upload, own = method.update(
        frozen, method.send(shared, "client-0"), local, client(world, "client-0", 0)
    )
    leaked = sorted(set(upload) & set(local))
    assert not leaked, f"the local tensor {leaked[0]!r} is in the upload; it never leaves a client"
    for key, value in own.items():
        twins = [k for k, v in upload.items() if v.shape == value.shape and torch.equal(v, value)]
        moved = key in local and not torch.equal(value, local[key])
        assert not (twins and moved), f"the upload {twins[0]!r} is the local tensor {key!r} renamed"
    if isinstance(method, Telling):
        check_small(world, method, method.traits.smallest or 1)
    assert set(own) == set(local), f"update returns local {sorted(own)}, init {sorted(local)}"


def check_small(world: World, tells: Telling, smallest: int) -> None:
    """A method that uploads class statistics says so by `covers`, and keeps small classes back."""
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    if isinstance(method, Noisy) and method.noise(frozen):  # then it goes by noisy counts as well
        return
    for id in world.members:
        one = client(world, id, 0)
        upload, _ = method.update(frozen, method.send(shared, id), local, one)
        counts = torch.bincount(one.y, minlength=len(frozen.classes))
        small = tells.covers(upload) & (counts < smallest)
        assert not small.any(), (
            f"the upload tells of a class with {counts[small].min()} rows at a client, fewer than "
            f"smallest = {smallest}; leave it out with `parts.withhold`"
        )


def check_roundtrip(world: World, reference: Outcome) -> None:
    values, about = pack(State(2, reference.shared, reference.local))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_tensors(path, values, about)
        back, told = pack(unpack(*read_tensors(path)))
    same = told == about and back.keys() == values.keys()
    same = same and all(torch.equal(back[key], values[key]) for key in values)
    assert same, "its tensors do not survive save and load"


def check_unseen(world: World, reference: Outcome) -> None:
    method, frozen = world.method, world.frozen
    _, fresh = method.init(frozen)
    x = tensors.full(world.x[:5])
    logits = method.predict(frozen, method.send(reference.shared, "nobody"), fresh, x)
    wanted = (5, len(frozen.classes))
    assert logits.shape == wanted, (
        f"predict gives {tuple(logits.shape)}, not (rows, classes) {wanted}"
    )
    assert logits.isfinite().all(), "an unseen client's logits are not finite"
    alone = method.predict(frozen, method.send(reference.shared, "nobody"), fresh, x[:1])
    gap = tensors.difference({"": logits[:1]}, {"": alone})
    assert gap <= CLOSE, f"a row's logits depend on the other rows by {gap:.1e}"


def check_same(a: Outcome, b: Outcome, close: float, what: str) -> None:
    gap = tensors.difference(a.shared, b.shared)
    for id in b.local:
        gap = max(gap, tensors.difference(here(a.local[id]), here(b.local[id])))
    assert gap <= close, f"{what} (by {gap:.1e}, allowed is {close:.0e})"


def _named(kind: str, values: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"{kind} {key}": value for key, value in values.items()}
