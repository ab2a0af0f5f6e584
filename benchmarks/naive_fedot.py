"""FedOT as a first version would write it: autograd through the Cayley transform at every step."""

import torch
from torch import Tensor

from fedvlm.core import Client


def cayley(raw: Tensor) -> Tensor:
    skew = (raw - raw.T) / 2
    eye = torch.eye(len(raw))
    return (eye + skew) @ torch.linalg.inv(eye - skew)


def update(
    head: Tensor, raws: list[Tensor], client: Client, rate: float, decay: float, momentum: float
) -> tuple[Tensor, list[Tensor]]:
    """One client's round; raws are the blocks of X, put together by `block_diag`."""
    head = head.clone().requires_grad_()
    raws = [raw.clone().requires_grad_() for raw in raws]
    optimizer = torch.optim.SGD([head, *raws], lr=rate, momentum=momentum, weight_decay=decay)
    for rows in client.order:
        turn = torch.block_diag(*(cayley(raw) for raw in raws))
        turned = client.x[rows] @ turn.T
        logits = 100 * torch.nn.functional.normalize(turned, dim=1) @ head.T
        loss = torch.nn.functional.cross_entropy(logits, client.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.detach(), [raw.detach() for raw in raws]
