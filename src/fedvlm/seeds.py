"""Seeds by purpose: the same purpose and parts give the same numbers on every machine."""

from hashlib import sha256

import numpy as np
import torch


def seed(purpose: str, *parts: str | int) -> int:
    """Return a 63-bit seed for one purpose, as `seed("order", run, client, round)`."""
    words = "\x1f".join([purpose, *(str(part) for part in parts)])
    return int.from_bytes(sha256(words.encode()).digest()[:8], "big") >> 1


def generator(purpose: str, *parts: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(seed(purpose, *parts))


def numbers(purpose: str, *parts: str | int) -> np.random.Generator:
    """Return a numpy generator, for what is split or drawn before there are tensors."""
    return np.random.Generator(np.random.PCG64(seed(purpose, *parts)))
