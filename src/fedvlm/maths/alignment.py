"""Which descriptions of a class tell it from the others at every client.

Texts are (classes, texts, dim): first the template's, then the descriptions; a zero vector is no
text.
"""

import torch
from torch import Tensor

TEXTS_PER_CHUNK = 800  # texts, whose scores then stay in a core's cache
MIN_MARGIN = 1e-3  # ε: what a margin of zero or less counts as, because the score takes its logarithm


def text_margins(means: Tensor, present: Tensor, texts: Tensor, scale: float) -> Tensor:
    """(classes, texts): u = p_c - max_{j≠c} p_j of a text of class c, over the classes present.

    p is the softmax over classes j of s_t · z̄_j · Φ(t); -1 for a class that is not present. Classes
    that are not are left out of the product, which is most of what a client of few classes does.
    """
    present_classes, n_texts = present.nonzero()[:, 0], texts.shape[1]
    scaled_means = (scale * means[present_classes]).to(texts.dtype)
    out = means.new_full(texts.shape[:2], -1.0, dtype=torch.float64)
    size = max(1, TEXTS_PER_CHUNK // max(1, n_texts))
    for first in range(0, len(present_classes), size):
        chunk = present_classes[first : first + size]
        scores = scaled_means @ texts.index_select(0, chunk).flatten(0, 1).mT
        scores = scores.sub_(scores.amax(0)).exp_()
        total = scores.sum(0).double()
        class_rows = torch.arange(first, first + len(chunk), device=present_classes.device)
        class_rows = class_rows.repeat_interleave(n_texts)[None]
        class_score = scores.gather(0, class_rows)[0].double()
        best = scores.scatter_(0, class_rows, 0.0).amax(0).double()
        out[chunk] = ((class_score - best) / total).reshape(len(chunk), n_texts)
    return out


def vote_terms(margins: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """A client's (classes, descriptions) terms u⁰ log(uᵐ/u⁰) of r, and (classes,) if it votes.

    It votes on a class it holds beside another one, if the template itself tells them apart. The
    template's own term is always 0 and left out.
    """
    template, description_margins = margins[:, :1], margins[:, 1:]
    voting = present & (present.sum() > 1) & (template[:, 0] > 0)
    base = template.clamp(min=MIN_MARGIN)
    terms = base * (description_margins.clamp(min=MIN_MARGIN) / base).log()
    return torch.where(voting[:, None], terms, 0.0), voting


def weigh_texts(terms: Tensor, voters: Tensor, has_text: Tensor, temperature: float) -> Tensor:
    """(classes, texts) b = softmax(r/τ_t) over the texts that are there, from summed terms.

    r is the mean over the voters, and 0 for the template; a class nobody votes on weighs all its
    texts the same.
    """
    scores = terms / voters.clamp(min=1)[:, None] / temperature
    scores = torch.cat([torch.zeros_like(has_text[:, :1], dtype=scores.dtype), scores], dim=1)
    return torch.where(has_text, scores, -torch.inf).softmax(-1)


def mix_texts(text_weights: Tensor, texts: Tensor) -> Tensor:
    """(classes, dim): Σ_m b_m Φ(t_m), not made unit again."""
    return (text_weights[:, None, :].to(texts.dtype) @ texts)[:, 0]
