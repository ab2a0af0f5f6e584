"""The conformance suite: `check_method(MyMethod(...))` names everything that a method breaks."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.channel.pipeline import ReceivedUploads, UploadReceiver
from fedvlm.channel.steps import upload_change
from fedvlm.core import ClassStatistics, Client, Method, Noisy, Tensors, register, upload_sum
from fedvlm.engines.chunks import pad_clients
from fedvlm.engines.client import World, as_tensors, make_client
from fedvlm.engines.loop import Outcome
from fedvlm.engines.state import State, pack_state, unpack_state
from fedvlm.errors import FedVLMError
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
T = TypeVar("T")
TOLERANCE = 1e-5  # relative, between engines
SAMPLE_COSINE_GAP = 1e-7  # vectors with a cosine so close to 1 are proportional


def check_method(method: Method) -> None:
    """Raise an AssertionError that names everything the method breaks, with the remedies; takes a few seconds.

    Args:
        method: the method with its settings.

    Example:
        >>> import fedvlm
        >>> from fedvlm.testing import *
        >>> check_method(fedvlm.make("zero-shot"))
    """
    register(type(method))
    world = toy_world(shorten(method))
    failures: list[str] = []

    def run(check: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return check(*arguments)
        except (AssertionError, FedVLMError) as error:
            failures.append(str(error))
            return None

    for check in (check_is_pure, check_padding, check_uploads, check_samples_stay, check_upload_order, check_sum):
        run(check, world)
    reference = run(train_toy, world)
    if reference is not None:
        for trained_check in (check_engines, check_order, check_roundtrip, check_unseen):
            run(trained_check, world, reference)
    failures = list(dict.fromkeys(failures))
    assert not failures, f"method {method.name} breaks the contract:\n" + "\n".join(f"- {text}" for text in failures)


def check_engines(world: World, reference: Outcome) -> None:
    """The same seed and another engine give the same tensors."""
    check_same(train_toy(world), reference, 0.0, "the same seed gives other tensors the second time")
    check_same(train_toy(world, "single"), reference, TOLERANCE, "the sequential and the batched engine differ")


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
    """The order in which clients are named does not matter."""
    reversed_world = replace(world, members=dict(reversed(list(world.members.items()))))
    check_same(train_toy(reversed_world), reference, 0.0, "the order of clients changes the result")


def check_padding(world: World) -> None:
    """Padded rows never count, whatever they hold and wherever they are.

    A minibatch reads row 0 where it has no sample, so one variant has padding there.
    """
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    client = make_client(world, "client-1", 0)
    wide = pad_clients([client, make_client(world, "client-2", 0)])
    padded = Client(*(getattr(wide, field.name)[0] for field in fields(client)))
    filled = replace(padded, x=fill_padding(padded.x, padded.y < 0), val_x=fill_padding(padded.val_x, padded.val_y < 0))
    x = torch.cat([torch.full_like(client.x[:1], 7.0), client.x])
    y = torch.cat([torch.full_like(client.y[:1], -1), client.y])
    shifted = replace(client, x=x, y=y, order=torch.where(client.order >= 0, client.order + 1, -1))
    sent = method.send(shared, "client-1")
    expected = method.update(frozen, sent, local, client)
    for variant in (padded, filled, shifted):
        for name, a, b in zip(("upload", "local"), expected, method.update(frozen, sent, local, variant), strict=True):
            gap = tensors.max_relative_difference(a, b)
            assert gap <= TOLERANCE, (
                f"{name} depends on padding by {gap:.1e}; average the loss over `batch.real`, and skip rows of y = -1"
            )


def fill_padding(x: Tensor, is_padding: Tensor) -> Tensor:
    """Return the rows with 7 where there is padding."""
    return torch.where(is_padding.reshape(-1, *[1] * (x.ndim - 1)), 7.0, x)


def first_uploads(world: World) -> tuple[Tensors, dict[str, Tensors]]:
    """Return the initial shared tensors and what every client uploads in the first round."""
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    return shared, {
        id: method.update(frozen, method.send(shared, id), local, make_client(world, id, 0))[0]
        for id in sorted(world.members)
    }


def check_samples_stay(world: World) -> None:
    """No upload, and no change of what was sent, holds a vector proportional to a training sample at every client.

    At a single client the gradient of a linear head may be: that of its only misclassified sample.
    """
    shared, uploads = first_uploads(world)
    cosines: dict[str, list[float]] = {}
    for id, upload in uploads.items():
        samples = tensors.to_float32(world.x[torch.from_numpy(world.members[id].train)])
        vectors = {samples[0].numel(): samples.flatten(1), samples.shape[-1]: samples.flatten(0, -2)}.values()
        sent = world.method.send(shared, id)
        change = {key: value for key, value in upload_change(upload, sent).items() if key in sent}
        values = {f"the upload {key!r}": value for key, value in upload.items()}
        values |= {f"the change of {key!r}": value for key, value in change.items()}
        for name, value in values.items():
            cosines.setdefault(name, []).append(max(largest_cosine(value, known) for known in vectors))
    for name, by_client in cosines.items():
        assert min(by_client) < 1 - SAMPLE_COSINE_GAP, (
            f"{name} holds a training sample (cosine {min(by_client):.7f}); upload sums over many samples"
        )


def largest_cosine(value: Tensor, samples: Tensor) -> float:
    """Return the largest absolute cosine between a vector in a tensor, along any axis, and a sample."""
    size, normalize = samples.shape[1], torch.nn.functional.normalize
    if not (value.is_floating_point() and value.numel()):
        return 0.0
    vectors = [value.movedim(axis, -1).reshape(-1, size) for axis in range(value.ndim) if value.shape[axis] == size]
    known = normalize(samples.double(), dim=1)
    return max((float((normalize(rows.double(), dim=1) @ known.mT).abs().max()) for rows in vectors), default=0.0)


def check_upload_order(world: World) -> None:
    """The aggregate is the same for any order of the uploads, by its tensors or by what it predicts."""
    method, frozen = world.method, world.frozen
    shared, uploads = first_uploads(world)
    if not any(uploads.values()):
        return
    ids = list(uploads)
    weights = torch.tensor([float(len(world.members[id].train)) for id in ids])
    forward = method.aggregate(shared, list(uploads.values()), weights, ids)
    backward = method.aggregate(shared, list(uploads.values())[::-1], weights.flip(0), ids[::-1])
    gap = tensors.max_relative_difference(forward, backward)
    if gap > TOLERANCE:  # a method may keep what each client uploaded in the order of the uploads
        x, local = tensors.to_float32(world.x[:20]), method.init(frozen)[1]
        logits = (
            {"": method.predict(frozen, method.send(aggregate, ids[0]), local, x)} for aggregate in (forward, backward)
        )
        gap = tensors.max_relative_difference(*logits)
    assert gap <= TOLERANCE, (
        f"the order of the uploads changes the aggregate by {gap:.1e}; use every upload alike, or in the order of `ids`"
    )


def check_sum(world: World) -> None:
    """An aggregate that declares that a sum of the uploads is enough gives the same from that sum."""
    gap = sum_gap(world)
    assert gap <= TOLERANCE, f"the aggregate differs by {gap:.1e} if it gets the sum of the uploads that it declares"


def check_uploads(world: World) -> None:
    """Refuse a method that uploads a local tensor, under whatever name, or statistics of small classes.

    Args:
        world: a toy federation of the method.

    Example:
        >>> import fedvlm
        >>> from fedvlm.testing import *
        >>> check_uploads(toy_world(shorten(fedvlm.make("fedot"))))
    """
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
    """Refuse an upload that has statistics of a class with too few samples.

    Args:
        world: a toy federation of the method.
        statistics: the method, which names the classes of an upload.
        smallest: samples that a class must have.

    Example:
        >>> import fedvlm
        >>> from fedvlm.testing import *
        >>> method = shorten(fedvlm.make("fedgh"))
        >>> check_small(toy_world(method), method, 16)
    """
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    if isinstance(method, Noisy) and method.noise(frozen):  # then it suppresses by noisy counts
        return
    for id in world.members:
        client_data = make_client(world, id, 0)
        upload, _ = method.update(frozen, method.send(shared, id), local, client_data)
        counts = torch.bincount(client_data.y, minlength=len(frozen.classes))
        small = statistics.covered_classes(upload) & (counts < smallest)
        assert not small.any(), (
            f"the upload has statistics of a class with {counts[small].min()} samples at a client, fewer than "
            f"min_class_samples = {smallest}; leave it out with `parts.suppress_client_classes`"
        )


def check_roundtrip(world: World, reference: Outcome) -> None:
    """Tensors survive saving and loading."""
    values, about = pack_state(State(2, reference.shared, reference.local))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_tensors(path, values, about)
        back, read = pack_state(unpack_state(*read_tensors(path)))
    same = read == about and back.keys() == values.keys()
    same = same and all(torch.equal(back[key], values[key]) for key in values)
    assert same, "its tensors do not survive save and load"


def check_unseen(world: World, reference: Outcome) -> None:
    """A client that nobody has seen gets finite logits, each sample by itself."""
    method, frozen = world.method, world.frozen
    _, initial_local = method.init(frozen)
    x = tensors.to_float32(world.x[:5])
    logits = method.predict(frozen, method.send(reference.shared, "nobody"), initial_local, x)
    expected_shape = (5, len(frozen.classes))
    assert logits.shape == expected_shape, f"predict gives {tuple(logits.shape)}, not (rows, classes) {expected_shape}"
    assert logits.isfinite().all(), "an unseen client's logits are not finite"
    alone = method.predict(frozen, method.send(reference.shared, "nobody"), initial_local, x[:1])
    gap = tensors.max_relative_difference({"": logits[:1]}, {"": alone})
    assert gap <= TOLERANCE, f"the logits of a sample depend on the other samples by {gap:.1e}"


def check_same(a: Outcome, b: Outcome, close: float, message: str) -> None:
    """Refuse outcomes whose shared or local tensors differ.

    Args:
        a: outcome of a training.
        b: outcome of another.
        close: largest relative difference that is allowed.
        message: beginning of the error.

    Example:
        >>> import fedvlm
        >>> from fedvlm.testing import *
        >>> world = toy_world(shorten(fedvlm.make("fedavg")))
        >>> check_same(train_toy(world, "single"), train_toy(world), 1e-5, "engines differ")
    """
    gap = tensors.max_relative_difference(a.shared, b.shared)
    for id in b.local:
        gap = max(gap, tensors.max_relative_difference(as_tensors(a.local[id]), as_tensors(b.local[id])))
    assert gap <= close, f"{message} (by {gap:.1e}, allowed is {close:.0e})"


def _named(kind: str, values: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"{kind} {key}": value for key, value in values.items()}


def sum_gap(world: World) -> float:
    """Return the gap between the aggregates of the uploads and of their sum; 0 if the method declares no sum."""
    method = world.method
    if upload_sum(method) is None:
        return 0.0
    shared, local = method.init(world.frozen)
    sent = {id: method.send(shared, id) for id in sorted(world.members)}
    uploads = {id: method.update(world.frozen, sent[id], local, make_client(world, id, 0))[0] for id in sent}
    ragged = method.traits.privacy.ragged_uploads  # these have no sum
    if not any(uploads.values()) or any(ragged & upload.keys() for upload in uploads.values()):
        return 0.0
    rows = {id: len(world.members[id].train) for id in sent}
    results = []
    for channel in (Channel(), Channel(verified=True)):
        decoded = UploadReceiver(channel, method, list(local), 0).receive(ReceivedUploads(0, uploads, sent, rows))
        ids = decoded.contributors or decoded.ids
        results.append(method.aggregate(shared, decoded.uploads, decoded.weights, ids))
    return tensors.max_relative_difference(*results)
