"""The loss of a token head, without all its logits in memory at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from cosformer.runtime import autocasts, compute_dtype

NOT_ASKED = -100
"""The label of a token that is not asked for, as in `F.cross_entropy`."""
MOST_LOGITS = 2**24
"""How many logits are made at a time: 64 MiB of them in float32."""


def summed_token_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the logits x Wᵀ, the sum over all labels, in float32 or above.

    Where there are many logits they are made in parts, and with each part its share of the
    gradient, so that none is kept: memory is that of x and W. There are no second derivatives then.

    Args:
        x: vectors `[…, width]`.
        weight: W `[vocabulary, width]`.
        labels: `[…]`; those of -100 are not asked for.
    """
    x, labels = x.flatten(0, -2), labels.flatten()
    if x.shape[0] * weight.shape[0] <= MOST_LOGITS:
        logits = F.linear(x, weight)
        wide = logits.to(compute_dtype(logits.dtype))
        return F.cross_entropy(wide, labels, ignore_index=NOT_ASKED, reduction="sum")
    dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
    with torch.autocast(x.device.type, enabled=False):
        loss: Tensor = _SummedTokenLoss.apply(x.to(dtype), weight, labels)
    return loss


class _SummedTokenLoss(Function):
    """(x, W, labels) -> loss; the gradient is made with it, because it needs the same logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wide = compute_dtype(x.dtype)
        narrow = weight.to(x.dtype)
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
        loss = x.new_zeros((), dtype=wide)
        rows = max(1, MOST_LOGITS // len(weight))
        parts = (each.split(rows) for each in (x, labels, of_x))
        for part, label, of_part in zip(*parts, strict=True):
            logits = (part @ narrow.mT).to(wide)
            asked, label = (label != NOT_ASKED)[:, None], label.clamp(min=0)[:, None]
            largest = logits.logsumexp(-1, keepdim=True)
            loss += torch.where(asked, largest - logits.gather(-1, label), 0).sum()
            of_logits = logits.sub_(largest).exp_()
            of_logits.scatter_add_(-1, label, -torch.ones_like(largest))
            of_logits = of_logits.masked_fill_(~asked, 0).to(x.dtype)
            of_part.copy_(of_logits @ narrow)
            of_weight += of_logits.mT @ part
        ctx.save_for_backward(of_x, of_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad.to(of_x.dtype), of_weight * grad.to(of_weight.dtype), None
