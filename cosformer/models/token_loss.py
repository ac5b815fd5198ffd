"""The loss of a token head, without all its logits in memory at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from cosformer.runtime import autocasts, compute_dtype

NOT_ASKED = -100
"""The label of a token that is not asked for, as in `F.cross_entropy`."""
MOST_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Device -> how many logits are made at a time: 64 MiB and 1 GiB of them in float32."""


def whole_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of labels `[N]`, summed, from all logits at once."""
    logits = F.linear(x, weight)
    wide = logits.to(compute_dtype(logits.dtype))
    return F.cross_entropy(wide, labels, ignore_index=NOT_ASKED, reduction="sum")


def loss_and_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of labels `[N]`, summed; the logits `[N, vocabulary]` become its gradient.

    The gradient is softmax − one-hot, and zeros where nothing is asked.
    """
    wide = logits.to(compute_dtype(logits.dtype))
    asked = (labels != NOT_ASKED)[:, None]
    label = torch.where(asked, labels[:, None], 0)
    log_sum = wide.logsumexp(-1, keepdim=True)
    if torch.compiler.is_compiling():  # two kernels; PyTorch 2.11 may gather what it has written
        is_label = torch.arange(wide.shape[-1], device=wide.device) == label
        right = torch.where(is_label, wide, 0).sum(-1, keepdim=True)
        known = (label >= 0) & (label < wide.shape[-1])
        right = torch.where(known, right, torch.nan)  # where `gather` would raise an error
        share = torch.where(asked, (wide - log_sum).exp() - is_label.to(wide.dtype), 0)
    else:
        right = wide.gather(-1, label)
        share = wide.sub_(log_sum).exp_()
        share.scatter_add_(-1, label, -torch.ones_like(log_sum))
        share.masked_fill_(~asked, 0)
    logits.copy_(share)
    return torch.where(asked, log_sum - right, 0).sum()


class TokenLoss(NamedTuple):
    """Cross entropy of the logits x Wᵀ, the sum over all labels, in float32 or above.

    Where there are many logits they are made in parts, and with each part its share of the
    gradient, so that none is kept: memory is that of x and W. There are no second derivatives then.
    Its two functions may be compiled; the loop around them may not, for a graph of all parts would
    hold several of them at a time.
    """

    whole: Callable[[Tensor, Tensor, Tensor], Tensor] = whole_loss
    part: Callable[[Tensor, Tensor], Tensor] = loss_and_gradient

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The loss of vectors x `[…, width]`, weights W `[vocabulary, width]` and labels `[…]`.

        Labels of -100 are not asked for.
        """
        x, labels = x.flatten(0, -2), labels.flatten()
        if x.shape[0] * weight.shape[0] <= _most(x):
            return self.whole(x, weight, labels)
        dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
        with torch.autocast(x.device.type, enabled=False):
            loss: Tensor = _SummedTokenLoss.apply(x.to(dtype), weight, labels, self.part)
        return loss


def _most(x: Tensor) -> int:
    return MOST_LOGITS.get(x.device.type, MOST_LOGITS["cpu"])


class _SummedTokenLoss(Function):
    """(x, W, labels) -> loss; the gradient is made with it, because it needs the same logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        wide = compute_dtype(x.dtype)
        narrow = weight.to(x.dtype)
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
        loss = x.new_zeros((), dtype=wide)
        rows = max(1, _most(x) // len(weight))
        rows = 2 ** (rows.bit_length() - 1)  # whole tiles, and parts of one length as a rule
        room = x.new_empty(min(rows, len(x)), len(weight))  # for the logits of every part
        parts = (each.split(rows) for each in (x, labels, of_x))
        for part, label, of_part in zip(*parts, strict=True):
            logits = torch.mm(part, narrow.mT, out=room[: len(part)])
            # not in place: compiled by PyTorch 2.11, that would have no gradient
            loss = loss + loss_of(logits, label)
            torch.mm(logits, narrow, out=of_part)
            of_weight += logits.mT @ part
        ctx.save_for_backward(of_x, of_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():  # by create_graph
            raise RuntimeError(
                "create_graph must be False for a loss whose logits are made in parts, which has "
                "no second derivatives, got True: take fewer tokens, or logits and cross_entropy"
            )
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad.to(of_x.dtype), of_weight * grad.to(of_weight.dtype), None, None
