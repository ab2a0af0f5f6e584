"""Entropic transport between the patches of an image and a few prompts, for many images at once.

A plan T ≥ 0 (prompts x patches) maximises Σ T·similarity + λ·entropy. Unbalanced: every patch gives
at most α = 1/V, every prompt takes exactly β = γ/n. Classical: every patch gives exactly α, γ = 1.

Dykstra's scaling finds T = α · min(1, 1/s) · k e^g with k = e^(similarity/λ), s = Σ k e^g, and one
number g for each prompt. It creeps for small λ and for γ near 1, so the n numbers are found by
Newton's method instead, on the same equations: what each prompt takes is to be β. With few prompts
that is a tiny system for every image and class. The number of steps depends on the settings alone,
so no image waits for another and the plan passes through vmap.
"""

from math import log
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import threshold

from fedvlm.core.schema import POSITIVE, POSITIVE_FRACTION, check_range

TransportKind = Literal["unbalanced", "classical", "averaging"]
MAX_EXPONENT = 60.0  # e to this power is far from the largest float32
WARM_START_REG = 0.2  # λ that is reached in a few steps from anywhere
WARM_STEPS, LAST_STEPS = 2, 6  # steps for each larger λ on the way, and for the last
EXTRA_STEPS = 6  # more steps where γ is above 0.9, and nearly every patch has to give all it has
NEWTON_RIDGE = 1e-6  # of what a prompt takes: keeps the system regular where every patch gives all it has
NUMBERS_PER_CHUNK = 300_000  # numbers: small enough for a core's cache, large enough for calls to be cheap


def transport_plan(
    similarity: Tensor,
    kind: TransportKind,
    gamma: float = 1.0,
    entropy_reg: float = 0.1,
    steps: int = LAST_STEPS,
) -> Tensor:
    """(..., prompts, patches) cosines -> the plan T of the same shape, at least in float32.

    `gamma` is the mass γ of an unbalanced plan, `entropy_reg` the weight λ of the entropy. The
    usual number of `steps` is right to rounding for cosines as CLIP has them; wider ones may take
    more.
    """
    similarity = similarity.to(torch.promote_types(similarity.dtype, torch.float32))
    *batch_shape, prompts, patches = similarity.shape
    if kind == "averaging":
        return torch.full_like(similarity, 1 / (prompts * patches))
    check_range("gamma", gamma, POSITIVE_FRACTION)
    check_range("entropy_reg", entropy_reg, POSITIVE)
    exact = kind == "classical" or gamma == 1  # where all mass is taken every patch gives all
    problems = similarity.reshape(-1, prompts, patches)
    size = max(1, NUMBERS_PER_CHUNK // (prompts * patches))
    plans = [_solve(chunk, 1 if exact else gamma, entropy_reg, exact, steps) for chunk in torch.split(problems, size)]
    return torch.cat(plans).reshape(*batch_shape, prompts, patches)


def _solve(similarity: Tensor, gamma: float, entropy_reg: float, exact: bool, steps: int) -> Tensor:
    _, prompts, patches = similarity.shape
    target = gamma * patches / prompts  # β in units of α
    # One prompt after the other in memory, so that all that a prompt takes is one piece.
    cost = similarity.transpose(0, 1).contiguous().transpose(0, 1)
    # A constant added to a prompt's row changes g and not T; with 0 as the largest no e overflows.
    cost = cost - cost.amax(dim=-1, keepdim=True)
    levels = [entropy_reg]
    while levels[-1] < WARM_START_REG:
        levels.append(2 * levels[-1])
    kernel = (cost / levels[-1]).exp()
    g = (target / kernel.sum(dim=-1, keepdim=True)).log()
    for level in reversed(levels):
        # Cosines differ by 2 at most, and so does λg: below SPAN no e^g or e^(c/λ) overflows.
        plain = 2 / level < MAX_EXPONENT
        if level < levels[-1]:
            kernel = kernel.square() if plain else cost / level
            # λg is carried on; where e^g is the larger part of it, without what γ has in it.
            g = 2 * g - (log(gamma / prompts) if plain else 0)
        is_cold_start = len(levels) == 1  # no larger λ came before
        last = steps + is_cold_start + (not plain) + (EXTRA_STEPS if gamma > 0.9 and not exact else 0)
        count = WARM_STEPS if level > entropy_reg else last
        two = kernel.unbind(-2) if plain and prompts == 2 else ()
        product = two[0] * two[1] if two else kernel
        for _ in range(count):
            if two:
                step = _newton_of_two(two[0], two[1], product, g, target, exact)
            else:
                step = _newton(*_transported_mass(kernel, g, exact, plain), target, exact)
            g = g + step.sign() * step.abs().log1p()  # shortened, since e^g is far from straight
    transported, _ = _transported_mass(kernel, g, exact, plain)
    return transported * (target / transported.sum(dim=-1, keepdim=True) / patches)


def _transported_mass(kernel: Tensor, g: Tensor, exact: bool, plain: bool) -> tuple[Tensor, Tensor]:
    """What each prompt takes of every patch in units of α, and s: 1 or more where it is all."""
    if plain:
        wish = kernel * g.exp()
    else:
        raised = kernel + g
        largest = raised.amax(dim=-2, keepdim=True)
        # Dividing all wishes by e^most changes nothing where they exceed 1 and are cut anyway.
        wish = (raised - (largest if exact else largest.clamp(min=0))).exp()
    total = wish.sum(dim=-2, keepdim=True)
    return wish / (total if exact else total.clamp(min=1)), total


def _newton(transported: Tensor, total: Tensor, target: float, exact: bool) -> Tensor:
    """(problems, prompts, 1): what to add to g.

    The system is a Laplacian: prompts compete for patches that give all they have (`shared`), and
    gain from those that do not (`free`).
    """
    held = transported if exact else transported * (total >= 1)
    row_mass = transported.sum(dim=-1, keepdim=True)
    lack = target - row_mass
    free = row_mass - held.sum(dim=-1, keepdim=True) + NEWTON_RIDGE * target
    if transported.shape[-2] == 2:
        shared = (held[:, :1] * transported[:, 1:]).sum(dim=-1, keepdim=True)
        return _solve_two(free, shared, lack)
    shared = held @ transported.mT
    between = shared - torch.diag_embed(shared.diagonal(dim1=-2, dim2=-1))
    system = torch.diag_embed(between.sum(dim=-1) + free[..., 0]) - between
    step: Tensor = torch.linalg.solve(system, lack)
    return step


def _newton_of_two(
    first_kernel: Tensor, second_kernel: Tensor, product: Tensor, g: Tensor, target: float, exact: bool
) -> Tensor:
    """`_newton` of the plain kernels of two prompts and their product, in few passes."""
    wish = -g.exp()  # all below 0, so that one `threshold` tells patches that give all they have
    total = torch.addcmul(first_kernel * wish[:, 0], second_kernel, wish[:, 1])
    part = (total if exact else total.clamp(max=-1)).reciprocal_()  # -1: a wish is granted
    held = part if exact else threshold(part, -1.0, 0.0)
    dot = torch.linalg.vecdot
    row_mass = torch.stack([dot(first_kernel, part), dot(second_kernel, part)], -1)[..., None] * wish
    free = torch.full_like(row_mass, NEWTON_RIDGE * target)
    if not exact:
        free += row_mass - torch.stack([dot(first_kernel, held), dot(second_kernel, held)], -1)[..., None] * wish
    shared = dot(product, held.square())[:, None, None] * wish.prod(dim=-2, keepdim=True)
    return _solve_two(free, shared, target - row_mass)


def _solve_two(free: Tensor, shared: Tensor, lack: Tensor) -> Tensor:
    """The step of two prompts."""
    determinant = free.prod(dim=-2, keepdim=True) + shared * free.sum(dim=-2, keepdim=True)
    step: Tensor = (free.flip(-2) * lack + shared * lack.sum(dim=-2, keepdim=True)) / determinant
    return step
