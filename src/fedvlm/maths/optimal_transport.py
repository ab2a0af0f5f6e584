"""Solve entropic optimal transport between the patches of an image and a few prompts, for many images at once.

A plan T ≥ 0 (prompts x patches) maximises Σ T·similarity + λ·entropy. Unbalanced: every patch gives at most α = 1/V,
every prompt takes exactly β = γ/n. Classical: every patch gives exactly α, and γ = 1.

Dykstra's scaling, as in POT, finds T = α · min(1, 1/s) · k e^g with k = e^(similarity/λ), s = Σ k e^g, and one number g
for each prompt. It converges slowly for small λ and for γ near 1, so we solve the same equations for the n numbers by
Newton's method. With few prompts that is a tiny system for every image and class. The number of steps depends on the
settings alone, so images are independent and the plan passes through vmap.
"""

from math import log
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import threshold

from fedvlm.core.schema import POSITIVE, POSITIVE_FRACTION, check_range

TransportKind = Literal["unbalanced", "classical", "averaging"]
MAX_EXPONENT = 60.0  # e to this power is far from the largest float32
WARM_START_REG = 0.2  # λ at which a few steps converge from anywhere
WARM_STEPS, LAST_STEPS = 2, 6  # for each larger λ before, and for the last
EXTRA_STEPS = 6  # if γ is above 0.9, where nearly every patch is exhausted
NEWTON_RIDGE = 1e-6  # relative to β: keeps the system regular where all patches are exhausted
NUMBERS_PER_CHUNK = 300_000  # fits a core's cache, and makes the cost of calls small


def transport_plan(
    similarity: Tensor, kind: TransportKind, gamma: float = 1.0, entropy_reg: float = 0.1, steps: int = LAST_STEPS
) -> Tensor:
    """Return the plan T of (..., prompts, patches) cosines, at least in float32.

    `gamma` is the mass γ of an unbalanced plan, `entropy_reg` the weight λ of the entropy. The default number of steps
    is exact to rounding for cosines as CLIP has them; a wider range may need more.
    """
    similarity = similarity.to(torch.promote_types(similarity.dtype, torch.float32))
    *batch_shape, prompts, patches = similarity.shape
    if kind == "averaging":
        return torch.full_like(similarity, 1 / (prompts * patches))
    check_range("gamma", gamma, POSITIVE_FRACTION)
    check_range("entropy_reg", entropy_reg, POSITIVE)
    exact = kind == "classical" or gamma == 1  # with all mass, every patch gives all
    problems = similarity.reshape(-1, prompts, patches)
    size = max(1, NUMBERS_PER_CHUNK // (prompts * patches))
    plans = [_solve(chunk, 1 if exact else gamma, entropy_reg, exact, steps) for chunk in torch.split(problems, size)]
    return torch.cat(plans).reshape(*batch_shape, prompts, patches)


def _solve(similarity: Tensor, gamma: float, entropy_reg: float, exact: bool, steps: int) -> Tensor:
    """Solve (problems, prompts, patches), from a large λ to the last by halving."""
    _, prompts, patches = similarity.shape
    target = gamma * patches / prompts  # β in units of α
    # Prompts outermost in memory, so that the row of a prompt is contiguous.
    cost = similarity.transpose(0, 1).contiguous().transpose(0, 1)
    # A constant added to a row changes g and not T; with 0 as the largest entry nothing overflows.
    cost = cost - cost.amax(dim=-1, keepdim=True)
    levels = [entropy_reg]
    while levels[-1] < WARM_START_REG:
        levels.append(2 * levels[-1])
    kernel = (cost / levels[-1]).exp()
    g = (target / kernel.sum(dim=-1, keepdim=True)).log()
    for level in reversed(levels):
        # Cosines differ by 2 at most, and so does λg: below MAX_EXPONENT no e^g or e^(c/λ) overflows.
        plain = 2 / level < MAX_EXPONENT
        if level < levels[-1]:
            kernel = kernel.square() if plain else cost / level
            # λg is kept; without the part of γ, where e^g is its larger part.
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
            g = g + step.sign() * step.abs().log1p()  # shortened, because e^g is far from linear
    transported, _ = _transported_mass(kernel, g, exact, plain)
    return transported * (target / transported.sum(dim=-1, keepdim=True) / patches)


def _transported_mass(kernel: Tensor, g: Tensor, exact: bool, plain: bool) -> tuple[Tensor, Tensor]:
    """Return the mass from every patch to each prompt in units of α, and s: at least 1 where a patch is exhausted."""
    if plain:
        wish = kernel * g.exp()
    else:
        raised = kernel + g
        largest = raised.amax(dim=-2, keepdim=True)
        # Dividing by e^largest changes nothing where the sum exceeds 1 and is cut anyway.
        wish = (raised - (largest if exact else largest.clamp(min=0))).exp()
    total = wish.sum(dim=-2, keepdim=True)
    return wish / (total if exact else total.clamp(min=1)), total


def _newton(transported: Tensor, total: Tensor, target: float, exact: bool) -> Tensor:
    """Return the (problems, prompts, 1) step in g.

    The system is a Laplacian: prompts compete for exhausted patches (`shared`), and gain from the others (`free`).
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
    """Do `_newton` for the plain kernels of two prompts and their product, in few passes."""
    wish = -g.exp()  # negative, so that one `threshold` finds exhausted patches
    total = torch.addcmul(first_kernel * wish[:, 0], second_kernel, wish[:, 1])
    part = (total if exact else total.clamp(max=-1)).reciprocal_()  # -1: not exhausted
    held = part if exact else threshold(part, -1.0, 0.0)
    dot = torch.linalg.vecdot
    row_mass = torch.stack([dot(first_kernel, part), dot(second_kernel, part)], -1)[..., None] * wish
    free = torch.full_like(row_mass, NEWTON_RIDGE * target)
    if not exact:
        free += row_mass - torch.stack([dot(first_kernel, held), dot(second_kernel, held)], -1)[..., None] * wish
    shared = dot(product, held.square())[:, None, None] * wish.prod(dim=-2, keepdim=True)
    return _solve_two(free, shared, target - row_mass)


def _solve_two(free: Tensor, shared: Tensor, lack: Tensor) -> Tensor:
    """Solve the system of two prompts."""
    determinant = free.prod(dim=-2, keepdim=True) + shared * free.sum(dim=-2, keepdim=True)
    step: Tensor = (free.flip(-2) * lack + shared * lack.sum(dim=-2, keepdim=True)) / determinant
    return step
