"""What methods on the image tower share."""

from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.core import Frozen, ImageTower


def tower_of(frozen: Frozen) -> ImageTower:
    assert frozen.image_tower is not None  # promised by `needs`
    return frozen.image_tower


def text_logits(frozen: Frozen, features: Tensor) -> Tensor:
    """(rows, classes) logits of image features against the frozen class texts."""
    assert frozen.text is not None  # promised by `needs`
    return frozen.scale * normalize(features, dim=-1) @ frozen.text.mT


def count_parameters(frozen: Frozen, trained: int) -> dict[str, float]:
    """What a table says of the size of a fine-tuning."""
    tower_size = sum(value.numel() for value in tower_of(frozen).weights.values())
    return {"trained parameters": trained, "share of the tower": trained / tower_size}
