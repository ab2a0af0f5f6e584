"""Which descriptions of a class tell it from the others at every client.

Texts are (classes, texts, dim): first the template's, then the descriptions; a zero vector is no
text.
"""

import torch
from torch import Tensor

AT_ONCE = 800  # texts, whose scores then stay in a core's cache
LEAST = 1e-3  # ε: what a margin of zero or less counts as, because the score takes its logarithm


def margins(means: Tensor, present: Tensor, texts: Tensor, scale: float) -> Tensor:
    """(classes, texts): u = p_c - max_{j≠c} p_j of a text of class c, over the classes present.

    p is the softmax over classes j of s_t · z̄_j · Φ(t); -1 for a class that is not present. Classes
    that are not are left out of the product, which is most of what a client of few classes does.
    """
    held, many = present.nonzero()[:, 0], texts.shape[1]
    own = (scale * means[held]).to(texts.dtype)
    out = means.new_full(texts.shape[:2], -1.0, dtype=torch.float64)
    size = max(1, AT_ONCE // max(1, many))
    for first in range(0, len(held), size):
        some = held[first : first + size]
        shares = own @ texts.index_select(0, some).flatten(0, 1).mT
        shares = shares.sub_(shares.amax(0)).exp_()
        total = shares.sum(0).double()
        places = torch.arange(first, first + len(some), device=held.device)
        places = places.repeat_interleave(many)[None]
        mine = shares.gather(0, places)[0].double()
        best = shares.scatter_(0, places, 0.0).amax(0).double()
        out[some] = ((mine - best) / total).reshape(len(some), many)
    return out


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
