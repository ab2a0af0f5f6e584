"""The conformance suite: `check_method(MyMethod(...))` says what a method breaks, if anything."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedvlm import tensors
from fedvlm.core import Method, Noisy, Telling, Tensors, register
from fedvlm.engines.claims import sum_gap
from fedvlm.engines.client import World, client, here
from fedvlm.engines.loop import Outcome
from fedvlm.engines.state import State, pack, unpack
from fedvlm.storage.sealed import read_tensors, write_tensors
from fedvlm.testing.toys import bare, learn, short, toy_image_tower, toy_text_tower, toy_world

__all__ = [
    "bare",
    "check_method",
    "check_same",
    "check_small",
    "check_uploads",
    "learn",
    "short",
    "toy_image_tower",
    "toy_text_tower",
    "toy_world",
]
CLOSE = 1e-5  # relative, between engines


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
    from fedvlm.engines.crowd import pad

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
    if twins := renamed(upload, local, own):
        # A change of what was zero is what it has become, once: so look a second time.
        shared = method.aggregate(shared, [upload], torch.ones(1), ["client-0"])
        again, later = method.update(
            frozen, method.send(shared, "client-0"), own, client(world, "client-0", 1)
        )
        twins &= renamed(again, own, later)
    for name, key in sorted(twins):
        raise AssertionError(f"the upload {name!r} is the local tensor {key!r} renamed")
    if isinstance(method, Telling):
        check_small(world, method, method.traits.min_class_samples or 1)
    assert set(own) == set(local), f"update returns local {sorted(own)}, init {sorted(local)}"


def renamed(upload: Tensors, before: Tensors, after: Tensors) -> set[tuple[str, str]]:
    """Pairs of an uploaded and a local tensor that are the same, if the update changed it."""
    return {
        (name, key)
        for key, value in after.items()
        for name, sent in upload.items()
        if key in before and not torch.equal(value, before[key])
        if sent.shape == value.shape and torch.equal(sent, value)
    }


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
            f"min_class_samples = {smallest}; leave it out with `parts.withhold`"
        )


def check_roundtrip(world: World, reference: Outcome) -> None:
    values, about = pack(State(2, reference.shared, reference.local))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_tensors(path, values, about)
        back, read = pack(unpack(*read_tensors(path)))
    same = read == about and back.keys() == values.keys()
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
