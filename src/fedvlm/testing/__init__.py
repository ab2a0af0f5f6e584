"""The conformance suite: `check_method(MyMethod(...))` says what a method breaks, if anything."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.channel.pipeline import ReceivedUploads, UploadReceiver
from fedvlm.core import ClassStatistics, Method, Noisy, Tensors, register, upload_sum
from fedvlm.engines.client import World, as_tensors, make_client
from fedvlm.engines.loop import Outcome
from fedvlm.engines.state import State, pack_state, unpack_state
from fedvlm.storage.files import read_tensors, write_tensors
from fedvlm.testing.toys import make_test_client, shorten, toy_image_tower, toy_text_tower, toy_world, train_toy

__all__ = [
    "check_method",
    "check_same",
    "check_small",
    "check_uploads",
    "make_test_client",
    "shorten",
    "toy_image_tower",
    "toy_text_tower",
    "toy_world",
    "train_toy",
]
TOLERANCE = 1e-5  # relative, between engines


def check_method(method: Method) -> None:
    """Raises AssertionError with what is broken and what to do. Takes a few seconds."""
    register(type(method))
    world = toy_world(shorten(method))
    check_is_pure(world)
    reference = train_toy(world)
    check_same(train_toy(world), reference, 0.0, "the same seed gives other tensors the second time")
    check_same(train_toy(world, "single"), reference, TOLERANCE, "single and batched engines differ")
    check_order(world, reference)
    check_padding(world)
    check_uploads(world)
    check_roundtrip(world, reference)
    check_unseen(world, reference)
    gap = sum_gap(world)
    assert gap <= TOLERANCE, f"from the sum of the uploads its aggregate differs by {gap:.1e}"


def check_is_pure(world: World) -> None:
    """No verb may change an argument: the server and other clients hold the same tensors."""
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    sent = method.send(shared, "client-0")
    client_data = make_client(world, "client-0", 0)
    before = tensors.copy({**_named("shared", shared), **_named("local", local), "x": client_data.x})
    upload, new_local = method.update(frozen, sent, local, client_data)
    held = tensors.copy(_named("upload", upload))
    weights = torch.tensor([1.0, 3.0])
    shared_after = method.aggregate(shared, [upload, upload], weights, ["client-0", "client-1"]) if upload else shared
    x = tensors.to_float32(client_data.x)
    method.predict(frozen, method.send(shared_after, "client-0"), new_local, x)
    method.adapt(frozen, sent, new_local, client_data)
    after = {**_named("shared", shared), **_named("local", local), "x": client_data.x}
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    changed += [key for key, old in held.items() if not torch.equal(old, _named("upload", upload)[key])]
    assert not changed, f"a verb changed its argument {changed[0]}; return new tensors instead"


def check_order(world: World, reference: Outcome) -> None:
    reversed_world = replace(world, members=dict(reversed(list(world.members.items()))))
    check_same(train_toy(reversed_world), reference, 0.0, "the order of clients changes the result")


def check_padding(world: World) -> None:
    """What lies in padded rows, and how many there are, is nobody's business."""
    from fedvlm.engines.chunks import pad_clients

    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    client_data = make_client(world, "client-1", 0)
    wide = pad_clients([client_data, make_client(world, "client-2", 0)])
    padded = type(client_data)(*(getattr(wide, field.name)[0] for field in fields(client_data)))
    filled = replace(
        padded,
        x=fill_padding(padded.x, padded.y < 0),
        val_x=fill_padding(padded.val_x, padded.val_y < 0),
    )
    expected = method.update(frozen, method.send(shared, "client-1"), local, client_data)
    for variant in (padded, filled):
        again = method.update(frozen, method.send(shared, "client-1"), local, variant)
        for name, a, b in zip(("upload", "local"), expected, again, strict=True):
            gap = tensors.max_relative_difference(a, b)
            assert gap <= TOLERANCE, f"{name} depends on padding by {gap:.1e}; use `batch.real`, and no row of y = -1"


def fill_padding(x: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    return torch.where(is_padding.reshape(-1, *[1] * (x.ndim - 1)), 7.0, x)


def check_uploads(world: World) -> None:
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    upload, new_local = method.update(frozen, method.send(shared, "client-0"), local, make_client(world, "client-0", 0))
    leaked = sorted(set(upload) & set(local))
    assert not leaked, f"the local tensor {leaked[0]!r} is in the upload; it never leaves a client"
    if copies := renamed_local(upload, local, new_local):
        # A change of what was zero is what it has become, once: so look a second time.
        shared = method.aggregate(shared, [upload], torch.ones(1), ["client-0"])
        again, later = method.update(
            frozen, method.send(shared, "client-0"), new_local, make_client(world, "client-0", 1)
        )
        copies &= renamed_local(again, new_local, later)
    for name, key in sorted(copies):
        raise AssertionError(f"the upload {name!r} is the local tensor {key!r} renamed")
    if isinstance(method, ClassStatistics):
        check_small(world, method, method.traits.classes.min_class_samples or 1)
    assert set(new_local) == set(local), f"update returns local {sorted(new_local)}, init {sorted(local)}"


def renamed_local(upload: Tensors, before: Tensors, after: Tensors) -> set[tuple[str, str]]:
    """Pairs of an uploaded and a local tensor that are the same, if the update changed it."""
    return {
        (name, key)
        for key, value in after.items()
        for name, sent in upload.items()
        if key in before and not torch.equal(value, before[key])
        if sent.shape == value.shape and torch.equal(sent, value)
    }


def check_small(world: World, statistics: ClassStatistics, smallest: int) -> None:
    """A method that uploads class statistics says so by `covered_classes`, and keeps small classes back."""
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    if isinstance(method, Noisy) and method.noise(frozen):  # then it goes by noisy counts as well
        return
    for id in world.members:
        client_data = make_client(world, id, 0)
        upload, _ = method.update(frozen, method.send(shared, id), local, client_data)
        counts = torch.bincount(client_data.y, minlength=len(frozen.classes))
        small = statistics.covered_classes(upload) & (counts < smallest)
        assert not small.any(), (
            f"the upload tells of a class with {counts[small].min()} rows at a client, fewer than "
            f"min_class_samples = {smallest}; leave it out with `parts.suppress_client_classes`"
        )


def check_roundtrip(world: World, reference: Outcome) -> None:
    values, about = pack_state(State(2, reference.shared, reference.local))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_tensors(path, values, about)
        back, read = pack_state(unpack_state(*read_tensors(path)))
    same = read == about and back.keys() == values.keys()
    same = same and all(torch.equal(back[key], values[key]) for key in values)
    assert same, "its tensors do not survive save and load"


def check_unseen(world: World, reference: Outcome) -> None:
    method, frozen = world.method, world.frozen
    _, initial_local = method.init(frozen)
    x = tensors.to_float32(world.x[:5])
    logits = method.predict(frozen, method.send(reference.shared, "nobody"), initial_local, x)
    expected_shape = (5, len(frozen.classes))
    assert logits.shape == expected_shape, f"predict gives {tuple(logits.shape)}, not (rows, classes) {expected_shape}"
    assert logits.isfinite().all(), "an unseen client's logits are not finite"
    alone = method.predict(frozen, method.send(reference.shared, "nobody"), initial_local, x[:1])
    gap = tensors.max_relative_difference({"": logits[:1]}, {"": alone})
    assert gap <= TOLERANCE, f"a row's logits depend on the other rows by {gap:.1e}"


def check_same(a: Outcome, b: Outcome, close: float, message: str) -> None:
    gap = tensors.max_relative_difference(a.shared, b.shared)
    for id in b.local:
        gap = max(gap, tensors.max_relative_difference(as_tensors(a.local[id]), as_tensors(b.local[id])))
    assert gap <= close, f"{message} (by {gap:.1e}, allowed is {close:.0e})"


def _named(kind: str, values: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"{kind} {key}": value for key, value in values.items()}


def sum_gap(world: World) -> float:
    """How far it is from that, in one round; 0 if the method does not say so."""
    method = world.method
    if upload_sum(method) is None:
        return 0.0
    shared, local = method.init(world.frozen)
    sent = {id: method.send(shared, id) for id in sorted(world.members)}
    uploads = {id: method.update(world.frozen, sent[id], local, make_client(world, id, 0))[0] for id in sent}
    ragged = method.traits.privacy.ragged_uploads  # what no sum is said of
    if not any(uploads.values()) or any(ragged & upload.keys() for upload in uploads.values()):
        return 0.0
    rows = {id: len(world.members[id].train) for id in sent}
    results = []
    for channel in (Channel(), Channel(secure=True)):
        decoded = UploadReceiver(channel, method, list(local), 0).receive(ReceivedUploads(0, uploads, sent, rows))
        results.append(method.aggregate(shared, decoded.uploads, decoded.weights, decoded.ids))
    return tensors.max_relative_difference(*results)
