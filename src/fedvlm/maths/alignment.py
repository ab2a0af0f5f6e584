"""Which descriptions of a class tell it from the others at every client.

Texts are (classes, texts, dim): first the template's, then the descriptions; a zero vector is no
text.
"""

import torch
from torch import Tensor

LEAST = 1e-3  # ε: what a margin of zero or less counts as, because the score takes its logarithm


def margins(means: Tensor, present: Tensor, texts: Tensor, scale: float) -> Tensor:
    """(classes, texts): u = p_c - max_{j≠c} p_j of a text of class c, over the classes present.

    p is the softmax over classes j of s_t · z̄_j · Φ(t); -1 for a class that is not present. Classes
    that are not are left out of the product, which is most of what a client of few classes does.
    """
    held = present.nonzero()[:, 0]
    if not len(held):
        return texts.new_full(texts.shape[:2], -1.0, dtype=torch.float64)
    few = 2 * len(held) < len(present)  # the texts of most are not worth a copy
    some = texts[held] if few else texts
    rank = torch.arange(len(held), device=held.device) if few else present.long().cumsum(0) - 1
    shares = (scale * means[held]).to(texts.dtype) @ some.reshape(-1, texts.shape[-1]).mT
    shares = shares.sub_(shares.amax(0)).exp_()
    total = shares.sum(0).double()
    own = rank.clamp(min=0).repeat_interleave(texts.shape[1])[None]
    mine = shares.gather(0, own)[0].double()
    best = shares.scatter_(0, own, 0.0).amax(0).double()
    found = ((mine - best) / total).reshape(some.shape[:2])
    if few:
        return found.new_full(texts.shape[:2], -1.0).index_copy(0, held, found)
    return torch.where(present[:, None], found, -1.0)


def votes(margins: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """A client's (classes, descriptions) terms u⁰ log(uᵐ/u⁰) of r, and (classes,) if it votes.

    It votes on a class it holds beside another one, if the template itself tells them apart. The
    template's own term is always 0 and left out.
    """
    template, others = margins[:, :1], margins[:, 1:]
    voting = present & (present.sum() > 1) & (template[:, 0] > 0)
    base = template.clamp(min=LEAST)
    terms = base * (others.clamp(min=LEAST) / base).log()
    return torch.where(voting[:, None], terms, 0.0), voting


def weights(terms: Tensor, voters: Tensor, there: Tensor, temperature: float) -> Tensor:
    """(classes, texts) b = softmax(r/τ_t) over the texts that are there, from summed terms.

    r is the mean over the voters, and 0 for the template; a class nobody votes on weighs all its
    texts the same.
    """
    scores = terms / voters.clamp(min=1)[:, None] / temperature
    scores = torch.cat([torch.zeros_like(there[:, :1], dtype=scores.dtype), scores], dim=1)
    return torch.where(there, scores, -torch.inf).softmax(-1)


def mix(shares: Tensor, texts: Tensor) -> Tensor:
    """(classes, dim): Σ_m b_m Φ(t_m), not made unit again."""
    return (shares[:, None, :].to(texts.dtype) @ texts)[:, 0]
