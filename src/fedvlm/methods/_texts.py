"""The texts of a class that TOFA weighs: the template's, descriptions, and clients' own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedvlm.core import Frozen, Tensors
from fedvlm.errors import SettingsError
from fedvlm.maths import alignment, gaussian
from fedvlm.tensors import latest

TERMS = 8  # a bound on the size of a term of r, for its fixed point


def texts(frozen: Frozen) -> Tensor:
    """(classes, 1 + descriptions, dim): the template's text first."""
    if frozen.text is None:
        raise SettingsError("tofa: text = true, but the encoder has no text; set text = false")
    if frozen.descriptions is None:
        return frozen.text[:, None]
    return torch.cat([frozen.text[:, None], frozen.descriptions], dim=1)


def prompts(frozen: Frozen, sent: Tensors) -> Tensor:
    """(classes, dim): every class's texts, mixed by their weights."""
    assert frozen.text is not None  # `init` has seen to it
    described = () if frozen.descriptions is None else (frozen.descriptions,)
    mixed = _mixed(sent["weights"], frozen.text, *described)
    return mixed + sent["own"] if "own" in sent else mixed


@latest
def _mixed(weights: Tensor, text: Tensor, *described: Tensor) -> Tensor:
    """Once for all clients: there may be many descriptions."""
    mixed = weights[:, :1] * text
    for one in described:
        mixed = mixed + alignment.mix(weights[:, 1:], one)
    return mixed


def first_weights(frozen: Frozen, own: bool) -> Tensors:
    """b, uniform over the texts there are, and a place for the mix of clients' own texts."""
    there = (texts(frozen).abs().amax(-1) > 0).float()
    shared = {"weights": there / there.sum(1, keepdim=True)}
    return shared | ({"own": torch.zeros(len(there), frozen.dim)} if own else {})


def scores(frozen: Frozen, sent: Tensors, counts: Tensor, sums: Tensor, scale: float) -> Tensors:
    """A client's terms of r over all texts, and on which classes it votes, as whole numbers."""
    assert frozen.text is not None  # `init` has seen to it
    groups = [frozen.text[:, None], frozen.descriptions, sent.get("texts")]
    present = counts > 0
    means = sums / counts.clamp(min=1)[:, None]
    # Group by group, because all in one place would be a copy for every client.
    each = [alignment.margins(means, present, one, scale) for one in groups if one is not None]
    terms, voting = alignment.votes(torch.cat(each, dim=1), present)
    return {"scores": gaussian.to_fixed(terms, TERMS), "voters": voting.to(torch.int32)}


def aligned(shared: Tensors, total: Tensors, temperature: float) -> Tensors:
    """b of eq. 7 over all texts of a class, and the mix of those that clients brought."""
    common = shared["weights"].shape[1]
    there = shared["weights"] > 0
    own = shared.get("texts")
    if own is not None:
        there = torch.cat([there, own.abs().amax(-1) > 0], dim=1)
    terms = gaussian.from_fixed(total["scores"], TERMS)
    b = alignment.weights(terms, total["voters"], there, temperature).float()
    out = {"weights": b[:, :common]}
    return out if own is None else out | {"own": alignment.mix(b[:, common:], own)}


def gathered(uploads: Sequence[Tensors], ids: Sequence[str]) -> Tensor:
    """(classes, texts, dim) of all clients, by id, without columns of padding alone."""
    ordered = sorted(range(len(ids)), key=lambda i: ids[i])
    every = torch.cat([uploads[i]["texts"] for i in ordered], dim=1)
    return every[:, every.abs().amax((0, 2)) > 0]
