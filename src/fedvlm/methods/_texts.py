"""The texts of a class that TOFA weighs: the template's, descriptions, and clients' own."""

import torch
from torch import Tensor

from fedvlm.core import Frozen, Tensors
from fedvlm.errors import SettingsError
from fedvlm.maths import alignment


def texts(frozen: Frozen) -> Tensor:
    """(classes, 1 + descriptions, dim): the template's text first."""
    if frozen.text is None:
        raise SettingsError("tofa: text = true, but the encoder has no text; set text = false")
    if frozen.descriptions is None:
        return frozen.text[:, None]
    return torch.cat([frozen.text[:, None], frozen.descriptions], dim=1)


def prompts(frozen: Frozen, sent: Tensors) -> Tensor:
    """(classes, dim): every class's texts, mixed by their weights."""
    assert frozen.text is not None  # `init` has seen to it
    mixed = sent["weights"][:, :1] * frozen.text
    if frozen.descriptions is not None:  # not `texts`, which would copy them for every prediction
        mixed = mixed + alignment.mix(sent["weights"][:, 1:], frozen.descriptions)
    return mixed + sent["own"] if "own" in sent else mixed
