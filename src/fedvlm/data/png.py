"""Pixels as PNG that is stored, not compressed: compressors differ, and so would digests."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BLOCK_BYTES = 65535  # bytes of a stored block


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """(height, width) grey or (height, width, 3) colour."""
    height, width = pixels.shape[:2]
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0))).tobytes()  # each line unfiltered
    starts = range(0, len(lines), MAX_BLOCK_BYTES)
    body = b"\x78\x01" + b"".join(_block(lines[at : at + MAX_BLOCK_BYTES], at == starts[-1]) for at in starts)
    colour = b"\x02" if pixels.ndim == 3 else b"\x00"
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08" + colour + b"\0\0\0"
    chunks = (
        (b"IHDR", head),
        (b"IDAT", body + zlib.adler32(lines).to_bytes(4, "big")),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in chunks
    )


def _block(data: bytes, last: bool) -> bytes:
    size = len(data)
    return bytes([last]) + size.to_bytes(2, "little") + (size ^ MAX_BLOCK_BYTES).to_bytes(2, "little") + data


def scale_to_grey(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    """Numbers from black to white; all below and above are one or the other."""
    scaled = (values.astype(np.float64) - low) / max(high - low, 1e-12)
    out: NDArray[np.uint8] = np.rint(255 * scaled.clip(0, 1)).astype(np.uint8)
    return out
