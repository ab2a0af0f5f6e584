"""The texts of a class that TOFA weighs: the template's, descriptions, and clients' own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedvlm.core import Frozen, Tensors
from fedvlm.errors import SettingsError
from fedvlm.maths import alignment, gaussian_classes
from fedvlm.tensors import remember_latest

TERMS = 8  # a bound on the size of a term of r, for its fixed point


def texts(frozen: Frozen) -> Tensor:
    """(classes, 1 + descriptions, dim): the template's text first."""
    if frozen.text is None:
        raise SettingsError("tofa: text = true, but the encoder has no text; set text = false")
    if frozen.descriptions is None:
        return frozen.text[:, None]
    return torch.cat([frozen.text[:, None], frozen.descriptions], dim=1)


def class_texts(frozen: Frozen, sent: Tensors) -> Tensor:
    """(classes, dim): every class's texts, mixed by their weights."""
    assert frozen.text is not None  # `init` has seen to it
    described = () if frozen.descriptions is None else (frozen.descriptions,)
    mixed = _mixed(sent["weights"], frozen.text, *described)
    return mixed + sent["own"] if "own" in sent else mixed


@remember_latest
def _mixed(weights: Tensor, text: Tensor, *described: Tensor) -> Tensor:
    """Once for all clients: there may be many descriptions."""
    mixed = weights[:, :1] * text
    for descriptions in described:
        mixed = mixed + alignment.mix_texts(weights[:, 1:], descriptions)
    return mixed


def initial_weights(frozen: Frozen, has_client_texts: bool) -> Tensors:
    """b, uniform over the texts there are, and a place for the mix of clients' own texts."""
    has_text = (texts(frozen).abs().amax(-1) > 0).float()
    shared = {"weights": has_text / has_text.sum(1, keepdim=True)}
    return shared | ({"own": torch.zeros(len(has_text), frozen.dim)} if has_client_texts else {})


def score_texts(frozen: Frozen, sent: Tensors, counts: Tensor, sums: Tensor, scale: float) -> Tensors:
    """A client's terms of r over all texts, and on which classes it votes, as whole numbers."""
    assert frozen.text is not None  # `init` has seen to it
    groups = [frozen.text[:, None], frozen.descriptions, sent.get("texts")]
    present = counts > 0
    means = sums / counts.clamp(min=1)[:, None]
    # Group by group, because all in one place would be a copy for every client.
    margins = [alignment.text_margins(means, present, group, scale) for group in groups if group is not None]
    terms, voting = alignment.vote_terms(torch.cat(margins, dim=1), present)
    return {"scores": gaussian_classes.to_fixed_point(terms, TERMS), "voters": voting.to(torch.int32)}


def align_texts(shared: Tensors, total: Tensors, temperature: float) -> Tensors:
    """b of eq. 7 over all texts of a class, and the mix of those that clients brought."""
    common = shared["weights"].shape[1]
    has_text = shared["weights"] > 0
    client_texts = shared.get("texts")
    if client_texts is not None:
        has_text = torch.cat([has_text, client_texts.abs().amax(-1) > 0], dim=1)
    terms = gaussian_classes.from_fixed_point(total["scores"], TERMS)
    b = alignment.weigh_texts(terms, total["voters"], has_text, temperature).float()
    out = {"weights": b[:, :common]}
    return out if client_texts is None else out | {"own": alignment.mix_texts(b[:, common:], client_texts)}


def gather_texts(uploads: Sequence[Tensors], ids: Sequence[str]) -> Tensor:
    """(classes, texts, dim) of all clients, by id, without columns of padding alone."""
    ordered = sorted(range(len(ids)), key=lambda i: ids[i])
    all_texts = torch.cat([uploads[i]["texts"] for i in ordered], dim=1)
    return all_texts[:, all_texts.abs().amax((0, 2)) > 0]
