"""Which descriptions of a class tell it from the others at every client.

Texts are (classes, texts, dim): first the template's, then the descriptions; a zero vector is no
text.
"""

import torch
from torch import Tensor

GONE = -1e4  # added to the score of a class that does not count
LEAST = 1e-3  # ε: what a margin of zero or less counts as, because the score takes its logarithm


def margins(means: Tensor, present: Tensor, texts: Tensor, scale: float) -> Tensor:
    """(classes, texts): u = p_c - max_{j≠c} p_j of a text of class c, over the classes present.

    p is the softmax over classes j of s_t · z̄_j · Φ(t); -1 for a class that is not present.
    """
    classes = len(means)
    flat = texts.reshape(-1, texts.shape[-1])
    scaled = (scale * means).to(texts.dtype)
    scores = (scaled @ flat.mT).reshape(classes, *texts.shape[:2])
    mine = scores.diagonal(dim1=0, dim2=1).mT.double()
    # Not -inf: a client of one class has no others, and a maximum over nothing is NaN later.
    absent = torch.where(present, 0.0, GONE)[:, None]
    self_ = torch.zeros(classes, classes, dtype=scores.dtype, device=scores.device)
    others = scores + (absent + self_.fill_diagonal_(GONE)).to(scores.dtype)[:, :, None]
    best = others.amax(0)
    all_others = best.double() + (others - best).exp().sum(0).double().log()
    best, total = best.double(), torch.logaddexp(mine, all_others)
    return torch.where(present[:, None], (mine - total).exp() - (best - total).exp(), -1.0)


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
