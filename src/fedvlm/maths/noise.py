"""Normal noise that nobody can draw again, and how it is added so that no low bit tells on it.

torch's generator takes 32 bits of its seed: whoever has an upload can try them all and take its
noise away. Where noise protects somebody, it is made here of the system's entropy instead.

A sum of floating-point numbers tells in its last bits which numbers it can be the sum of (Mironov,
On significance of the least significant bits for differential privacy, CCS 2012). So the sum is
made in float64 and rounded to a grid that is far coarser than those bits and far finer than the
noise: of the sum itself nothing is left but the rounded one.
"""

import math
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Draw = Callable[..., Tensor]  # standard normal numbers of a shape, in float64
GRID_BITS = 10  # the grid's step is a power of two, 2^-10 to 2^-11 of the noise's deviation


def secure_normal(*shape: int) -> Tensor:
    """Of the system's entropy, by Box and Muller: a radius and an angle of 64 bits make two."""
    count = math.prod(shape)
    pairs = -(-count // 2)
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64)
    radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 0.5) * 2.0**-64))  # up to 9.5
    angle = bits[pairs:] * (2.0**-63 * math.pi)
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normals[:count].reshape(shape))


def seeded_normal(generator: torch.Generator) -> Draw:
    """For simulations, which are to be repeated and protect nobody."""
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def grid_step(std: float) -> float:
    """Of the grid that a sum with noise of this deviation is rounded to."""
    return 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)


def add_noise(value: Tensor, std: float, normal: Tensor) -> Tensor:
    """value + deviation · normal, rounded to the grid, in the type of the value."""
    if not std:
        return value
    grid = grid_step(std)
    multiples = (value.double() + std * normal.double()) / grid
    return (multiples.round() * grid).to(value.dtype)
