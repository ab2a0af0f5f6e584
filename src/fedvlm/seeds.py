"""Seeds by purpose: the same words always give the same numbers, on every machine."""

from hashlib import sha256

import numpy as np
import torch


def seed(purpose: str, *parts: str | int) -> int:
    """A 63-bit seed for one purpose; `seed("order", run, client, round)` is for that order only."""
    words = "\x1f".join([purpose, *(str(part) for part in parts)])
    return int.from_bytes(sha256(words.encode()).digest()[:8], "big") >> 1


def generator(purpose: str, *parts: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(seed(purpose, *parts))


def numbers(purpose: str, *parts: str | int) -> np.random.Generator:
    """The numpy counterpart, for what is split or drawn before there are tensors."""
    return np.random.Generator(np.random.PCG64(seed(purpose, *parts)))
