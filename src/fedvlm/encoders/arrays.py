"""What the encoder server and its client have in common: arrays in JSON, and the token.

POST /embed takes {"images": [base64 of a file, ...], "patches": false}, POST /text takes
{"sentences": [...]}; both answer {"fingerprint": ..., "pooled": array, "patches": array or null}.
An array is {"dtype": "float32", "shape": [...], "data": base64 of little-endian values}. GET /info
answers name, dim, scale, offers, fingerprint, preprocess, max_batch and max_bytes.
"""

from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import SettingsError

DTYPES = {"float32": "<f4", "float16": "<f2"}
REMOTE_OFFERS = frozenset({"image", "text", "patches"})  # weights and gradients are never among them


def encode_array(values: NDArray[Any]) -> dict[str, Any]:
    dtype = values.dtype.name
    data = b64encode(np.ascontiguousarray(values, DTYPES[dtype]).tobytes()).decode()
    return {"dtype": dtype, "shape": list(values.shape), "data": data}


def decode_array(array: Any) -> NDArray[Any]:
    """Raises ValueError or a kin of it on anything that is not an array of `pack`."""
    data = b64decode(array["data"], validate=True)
    return np.frombuffer(data, DTYPES[array["dtype"]]).reshape(array["shape"])


def read_token(file: str | Path) -> str:
    try:
        token = Path(file).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the token file {file} cannot be read ({error}); correct it") from error
    if not token or not token.isascii() or not token.isprintable():
        raise SettingsError(f"the token file {file} must hold one line of visible ASCII; write one")
    return token
