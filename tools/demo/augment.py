"""Random changes of geometry and style for training pictures."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .sets import SIZE


def augment(images: Tensor, strong: float) -> Tensor:
    """Random geometry for all, a change of style for the share `strong`. White is zero here."""
    count = len(images)
    angle = (torch.rand(count) - 0.5) * 0.5
    zoom = torch.empty(count).uniform_(0.85, 1.25)
    flip = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 0, 1] = flip * zoom * angle.cos(), -zoom * angle.sin()
    theta[:, 1, 0], theta[:, 1, 1] = flip * zoom * angle.sin(), zoom * angle.cos()
    theta[:, :, 2] = (torch.rand(count, 2) - 0.5) * 0.25
    grid = F.affine_grid(theta, [count, 3, SIZE, SIZE], align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)  # outside is zero, that is white
    kind = torch.bucketize(torch.rand(count) / strong, torch.tensor([0.3, 0.5, 0.7, 0.85, 0.95, 1.0]))
    for number in range(6):
        rows = (kind == number).nonzero()[:, 0]
        if not len(rows):
            continue
        chosen = images[rows]
        ink = chosen.mean(1, keepdim=True).expand_as(chosen)
        level = torch.empty(len(rows), 1, 1, 1).uniform_(0.15, 0.6)
        if number == 0:  # other colours
            mix = torch.eye(3) + 0.35 * torch.randn(len(rows), 3, 3)
            images[rows] = torch.einsum("nij,njhw->nihw", mix, chosen).clamp(-1, 0)
        elif number == 1:  # grey
            images[rows] = ink
        elif number == 2:  # outlines
            down = F.pad(ink[:, :, 1:] - ink[:, :, :-1], (0, 0, 0, 1)).abs()
            across = F.pad(ink[..., 1:] - ink[..., :-1], (0, 1)).abs()
            images[rows] = -(2 * (down + across)).clamp(0, 1)
        elif number == 3:  # black where dark
            images[rows] = -((-ink - level) * 12).sigmoid()
        elif number == 4:  # black where light, as in a stencil
            images[rows] = -((ink + level) * 12).sigmoid() * (ink < -0.02)
        else:  # negative
            images[rows] = -1 - chosen
    return images
