"""What methods that train the image tower share."""

from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.core import Frozen, ImageTower
from fedvlm.methods._heads import zero_shot_logits


def tower_of(frozen: Frozen) -> ImageTower:
    """Return the image tower."""
    assert frozen.image_tower is not None  # promised by `needs`
    return frozen.image_tower


def text_logits(frozen: Frozen, features: Tensor) -> Tensor:
    """Return the (samples, classes) logits of image features, not yet normalised, against the class texts."""
    return zero_shot_logits(frozen, normalize(features, dim=-1))


def count_parameters(frozen: Frozen, trained: int) -> dict[str, float]:
    """Return the number of trained parameters, and the fraction of the tower that they are."""
    tower_size = sum(value.numel() for value in tower_of(frozen).weights.values())
    return {"trained parameters": trained, "share of the tower": trained / tower_size}
