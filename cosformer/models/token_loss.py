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
MOST_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Device -> how many logits are made at a time: 64 MiB and 1 GiB of them in float32."""


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
    if x.shape[0] * weight.shape[0] <= _most(x):
        logits = F.linear(x, weight)
        wide = logits.to(compute_dtype(logits.dtype))
        return F.cross_entropy(wide, labels, ignore_index=NOT_ASKED, reduction="sum")
    dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
    with torch.autocast(x.device.type, enabled=False):
        loss: Tensor = _SummedTokenLoss.apply(x.to(dtype), weight, labels)
    return loss


def _most(x: Tensor) -> int:
    return MOST_LOGITS.get(x.device.type, MOST_LOGITS["cpu"])


class _SummedTokenLoss(Function):
    """(x, W, labels) -> loss; the gradient is made with it, because it needs the same logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wide = compute_dtype(x.dtype)
        narrow = weight.to(x.dtype)
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
        loss = x.new_zeros((), dtype=wide)
        rows = max(1, _most(x) // len(weight))
        parts = (each.split(rows) for each in (x, labels, of_x))
        for part, label, of_part in zip(*parts, strict=True):
            logits = (part @ narrow.mT).to(wide)
            asked, label = (label != NOT_ASKED)[:, None], label.clamp(min=0)[:, None]
            largest = logits.logsumexp(-1, keepdim=True)
            loss += torch.where(asked, largest - logits.gather(-1, label), 0).sum()
            of_logits = _of_logits(logits, largest, label, asked).to(x.dtype)
            of_part.copy_(of_logits @ narrow)
            of_weight += of_logits.mT @ part
        ctx.save_for_backward(of_x, of_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad.to(of_x.dtype), of_weight * grad.to(of_weight.dtype), None


def _of_logits(logits: Tensor, largest: Tensor, label: Tensor, asked: Tensor) -> Tensor:
    """softmax − one-hot, zeros where nothing is asked; the logits are used up."""
    if torch.compiler.is_compiling():  # one kernel; a scattered sum would be three
        is_label = torch.arange(logits.shape[-1], device=logits.device) == label
        return torch.where(asked, (logits - largest).exp() - is_label.to(logits.dtype), 0)
    share = logits.sub_(largest).exp_()
    share.scatter_add_(-1, label, -torch.ones_like(largest))
    return share.masked_fill_(~asked, 0)
