"""The verified sum: members add up masked uploads, so that nobody sees a single one.

An upload is multiplied by the member's weight, written in fixed point modulo 2^64 and masked: each pair of members
shares a mask that one adds and the other subtracts, so that masks cancel in the sum of all. The sum equals the plain
sum to 2^-32 for each member. Before it, the members sum their class counts, and what later uploads may hold follows
from these. A simulation leaves the masks out, because they cancel exactly. `fedvlm.deploy` adds keys and signatures.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.channel.settings import Channel
from fedvlm.channel.steps import change_norm, max_change_norm
from fedvlm.core import MIN_CLASS_CLIENTS, Method, StateBounded, Tensors, setting, upload_sum
from fedvlm.errors import FederationError, SettingsError

Vector = NDArray[np.uint64]
FIXED_POINT_STEPS = 2.0**32  # steps of fixed point in 1
MAX_FIXED_POINT_SUM = 2.0**62  # a sum of fixed-point numbers stays below it; the rest is for sign and margin
WEIGHT_KEY = "channel/weight"  # weights travel inside the sum, not beside it
MIN_SUM_MEMBERS = 3  # with two members each knows the upload of the other
SAMPLES_PER_DIMENSION = 8  # samples for each dimension below which second moments show who is a member
KEY_BYTES = 32


def weight_upload(upload: Tensors, weight: float, context: str) -> Tensors:
    """Return weight · upload, and the weight itself; integers are summed as they are."""
    weighted: Tensors = {WEIGHT_KEY: torch.tensor(weight, dtype=torch.float64)}
    for key, value in upload.items():
        if not value.is_floating_point() and weight != 1:
            raise FederationError(
                f"{context}: {key!r} holds integers, whose mean is not an integer; set channel.verified = false"
            )
        weighted[key] = weight * value.double() if value.is_floating_point() else value
    return weighted


def to_fixed_point(tensors: Tensors, members: int, context: str) -> Tensors:
    """Return the tensors as integers, small enough for the sum over this many members."""
    floats = {key: value for key, value in tensors.items() if value.is_floating_point()}
    integers = {key: value for key, value in tensors.items() if key not in floats}
    _check_limit(floats, MAX_FIXED_POINT_SUM / FIXED_POINT_STEPS / members, context)
    _check_limit(integers, MAX_FIXED_POINT_SUM / members, context)
    rounded = {key: (value.double() * FIXED_POINT_STEPS).round() for key, value in floats.items()}
    return {key: value.to(torch.int64) for key, value in {**rounded, **integers}.items()}


def _check_limit(tensors: Tensors, limit: float, context: str) -> None:
    """Refuse numbers that would overflow the sum, while it is still known whose they are."""
    for key, value in tensors.items():
        is_outside = ~(value.double().abs() < limit)  # also where it is NaN
        if is_outside.any():
            raise FederationError(
                f"{context}: {int(is_outside.sum())} of {value.numel()} numbers of {key!r} (as "
                f"{value[is_outside].flatten()[0].item():.4g}) are outside ±{limit:.4g}, the range of the "
                "verified sum; set channel.clip, or lower the learning rate"
            )


def pack_integers(integers: Tensors) -> Vector:
    """Return all numbers in one vector modulo 2^64, by sorted name."""
    parts = [integers[key].reshape(-1).numpy().view(np.uint64) for key in sorted(integers)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def unpack_integers(vector: Vector, template: Mapping[str, Tensor]) -> Tensors:
    """Invert `pack_integers`, with names and shapes of the template."""
    sizes = [template[key].numel() for key in sorted(template)]
    if vector.shape != (sum(sizes),):
        raise FederationError(f"the sum must have {sum(sizes)} numbers, got {vector.size}; a member's upload differs")
    parts = np.split(vector.view(np.int64), np.cumsum(sizes)[:-1])
    return {
        key: torch.from_numpy(part.copy()).reshape(template[key].shape)
        for key, part in zip(sorted(template), parts, strict=True)
    }


def add_vectors(vectors: Iterable[Vector]) -> Vector:
    """Return the sum modulo 2^64: the masks cancel."""
    total: Vector | None = None
    for vector in vectors:
        total = vector.copy() if total is None else np.add(total, vector, out=total)
    assert total is not None, "a sum has members"
    return total


def decode_sum(sums: Tensors, is_total: bool, template: Tensors) -> Tensors:
    """Return what the aggregate gets in place of all uploads: their mean, or their total."""
    weight = float(sums[WEIGHT_KEY]) / FIXED_POINT_STEPS
    if not weight > 0:
        raise FederationError(f"the weights of the sum must be above 0, got {weight:g}; a member sent a wrong mask")
    divisor = FIXED_POINT_STEPS * (1.0 if is_total else weight)
    return {
        key: (sums[key].double() / divisor).to(value.dtype)
        if value.is_floating_point()
        else sums[key]  # a sum of int32 may need int64
        for key, value in template.items()
    }


def sum_uploads(
    uploads: Mapping[str, Tensors], weights: Mapping[str, float], is_total: bool, context_of: Callable[[str], str]
) -> Tensors:
    """Return the decoded sum of uploads that are all in this process."""
    vectors, integers = [], dict[str, Tensor]()
    for id, upload in uploads.items():
        weighted = weight_upload(upload, weights[id], context_of(id))
        integers = to_fixed_point(weighted, len(uploads), context_of(id))
        vectors.append(pack_integers(integers))
    return decode_sum(unpack_integers(add_vectors(vectors), integers), is_total, next(iter(uploads.values())))


def derive_key(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Return a key of 256 bits by HKDF-SHA256."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), KEY_BYTES, salt, info).derive(secret)


def key_stream(key: bytes, n_bytes: int) -> bytes:
    """Return the ChaCha20 key stream of a key that is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    return Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(n_bytes))


def mask_vector(vector: Vector, name: str, pair_keys: Mapping[str, bytes]) -> Vector:
    """Return a member's vector under the masks that it shares with every other member."""
    out = vector.copy()
    for peer, key in pair_keys.items():
        mask = np.frombuffer(key_stream(key, 8 * vector.size), np.uint64)
        (np.add if name < peer else np.subtract)(out, mask, out=out)
    return out


def count_classes(y: Tensor, n_classes: int, method: Method) -> Tensors:
    """Return samples, and 1 for every class that a member would contribute to; small classes count together, last."""
    if setting(method, "noise_multiplier"):  # exact counts would not be covered by its ε
        nothing = torch.zeros(n_classes + 1, dtype=torch.int64)
        return {"counts": nothing, "members": nothing, "samples": nothing[0]}
    if y.ndim == 2:  # several findings per image: each has the classes absent and present
        by_finding = [count_classes(column, 2, method) for column in y.unbind(1)]
        return {key: torch.stack([counts[key] for counts in by_finding]) for key in by_finding[0]}
    smallest = setting(method, "min_class_samples") or 1
    counts = torch.bincount(y[y >= 0], minlength=n_classes)
    rest = counts[counts < smallest].sum()[None]
    counts = torch.cat([counts, rest])
    counts = torch.where(counts >= smallest, counts, 0)
    return {"counts": counts, "members": (counts > 0).long(), "samples": (y >= 0).sum()}


def class_limits(method: Method, dim: int, total: Tensors) -> Tensors:
    """Return what uploads may hold by the summed counts, as tensors that `update` finds beside what was sent.

    `open` (classes,) is 1 where enough members contribute to a class, `open rest` likewise of the samples of small
    classes; with `diagonal`, only the diagonal of second moments leaves. Only methods that upload class statistics
    have limits. With noise there are none: it protects single samples, and small classes by noisy counts.
    """
    is_open_to_all = (method.traits.classes.min_class_samples or 1) <= 1  # or its owner allows single samples
    if is_open_to_all or setting(method, "noise_multiplier"):
        return {}
    is_open = (total["members"] >= MIN_CLASS_CLIENTS).double()
    limits = {"open": is_open[..., :-1], "open rest": is_open[..., -1]}
    enough = int(total["samples"].min()) >= SAMPLES_PER_DIMENSION * (dim + 1)
    return limits if enough else {**limits, "diagonal": torch.ones_like(total["samples"], dtype=torch.float32)}


def check_verified(channel: Channel, method: Method) -> None:
    """Refuse, before any work, what a verified sum cannot do."""
    if not channel.verified:
        return
    kind = upload_sum(method)
    if kind in ("samples", "clients") and method.rounds and not channel.clip:
        raise SettingsError(
            f"channel.verified needs channel.clip for {method.name}: without a bound a single member could choose the "
            "head that all others train from; set channel.clip"
        )
    if kind == "total" and not isinstance(method, StateBounded):
        raise SettingsError(
            f"channel.verified is not possible with {method.name}: it does not bound its state (`check_state`), so a "
            "single member could choose it; choose another method, or set channel.verified = false"
        )


def check_state(channel: Channel, method: Method, before: Tensors, after: Tensors, members: int) -> None:
    """Refuse a shared state that no honest sum leads to."""
    if isinstance(method, StateBounded):
        method.check_state(before, after, members)
        return
    change = {key: value - before[key] for key, value in after.items() if value.is_floating_point() and key in before}
    limit = max_change_norm(channel, sum(value.numel() for value in change.values())) if channel.clip else 0.0
    if not (norm := change_norm(change)) <= limit * (1 + 1e-4):
        raise FederationError(
            f"the mean of the verified sum changes the state by {norm:.4g}, but channel.clip and noise allow "
            f"{limit:.4g}; a member's upload was damaged or forged, and the round is void"
        )
