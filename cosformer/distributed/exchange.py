"""What ranks tell each other: states, in messages whose size does not depend on the length.

A state goes from rank to rank, in either direction, and what it is on a rank follows from what it
was on the rank before it in that direction:

    from_left_{m+1} = pass_m · from_left_m + to_right_m
    from_right_{m−1} = pass_m · from_right_m + to_left_m

`to_right` and `to_left` are made of the keys of rank m, and `pass` says how much of a state is left
behind all tokens of rank m, by their decays. Every rank gathers all of them by one message and sums
those within its reach for itself. The gradients go the same way in the opposite direction.

An exchange is begun and waited for by two functions, and so it is in the backward pass: what a rank
computes between the two, it computes while messages are on their way, forward and backward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from cosformer.distributed.stretch import Reach, Stretch
from cosformer.runtime import compute_dtype

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""PyTorch 2.13 has another name for it."""


class Message(NamedTuple):
    """What a rank tells all others."""

    to_right: Tensor | None  # [B, H, …], of the dtype of `to_left`
    to_left: Tensor | None
    log_pass: Tensor  # [b, H] float64: the logarithm of `pass`; b is 1 or the batch


class Carried(NamedTuple):
    """What reaches a rank, where somebody sent it; zeros if no rank is within reach."""

    from_left: Tensor | None
    from_right: Tensor | None


def send(message: Message, stretch: Stretch, reach: Reach) -> Callable[[], Carried]:
    """Begin to tell; the function that is returned waits for what comes, and is called once.

    If rank m is within the reach of rank n, then n must be within that of m.
    """
    way = _Way(stretch, reach)
    begun = _Begin.apply(*message, way)
    return lambda: Carried(*_End.apply(begun, message.log_pass, way))


def sum_over_ranks(x: Tensor, stretch: Stretch) -> Tensor:
    """Σ x over the ranks of the group."""
    total: Tensor = _Sum.apply(x, stretch)
    return total


def gather(x: Tensor, dim: int, stretch: Stretch) -> Tensor:
    """The tokens of all ranks, along a dimension of x."""
    sum_over_ranks(x.new_zeros(1, dtype=torch.float64), stretch)  # which compares the lengths
    rows: Tensor = _Gather.apply(x.movedim(dim, 0), stretch)
    return rows.movedim(0, dim)


class _Way:
    """What the two functions of an exchange know of each other."""

    told: "_Told"
    back: Callable[[], Carried]  # waits for what the backward pass has begun to tell
    arrived: Carried  # as the backward pass has it, with its history

    def __init__(self, stretch: Stretch, reach: Reach) -> None:
        self.stretch, self.reach = stretch, reach


class _Begin(Function):
    """(to_right, to_left, log_pass) -> a tensor without numbers, by which `_End` follows."""

    @staticmethod
    def forward(
        ctx: Any, to_right: Tensor | None, to_left: Tensor | None, log_pass: Tensor, way: _Way
    ) -> Tensor:
        way.told = _Told(Message(to_right, to_left, log_pass), way.stretch)
        ctx.way = way
        ctx.save_for_backward(log_pass)
        return log_pass.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        (log_pass,) = ctx.saved_tensors
        back, (from_left, from_right) = ctx.way.back(), ctx.way.arrived
        del ctx.way.back, ctx.way.arrived
        of_pass = None
        if ctx.needs_input_grad[2]:
            pairs = ((from_left, back.from_right), (from_right, back.from_left))
            sums = [(x * grad).flatten(2).sum(2) for x, grad in pairs if x is not None]
            of_pass = (log_pass.exp() * sum(sums)).sum_to_size(log_pass.shape)
        return back.from_right, back.from_left, of_pass, None


class _End(Function):
    """-> (from_left, from_right)."""

    @staticmethod
    def forward(
        ctx: Any, begun: Tensor, log_pass: Tensor, way: _Way
    ) -> tuple[Tensor | None, Tensor | None]:
        logs, rights, lefts = way.told.wait()
        n, reach = way.stretch.rank, way.reach
        before, after = slice(reach.first, n), slice(n + 1, reach.last + 1)
        from_left = None if rights is None else _arrived(logs[before], rights[before])
        from_right = None
        if lefts is not None:
            from_right = _arrived(logs[after].flip(0), lefts[after].flip(0))
        ctx.way = way
        ctx.save_for_backward(log_pass, from_left, from_right)
        return from_left, from_right

    @staticmethod
    def backward(ctx: Any, of_left: Tensor | None, of_right: Tensor | None) -> tuple[Any, ...]:
        log_pass, *arrived = ctx.saved_tensors
        of_left, of_right = (None if x is None else x.contiguous() for x in (of_left, of_right))
        ctx.way.arrived = Carried(*arrived)
        ctx.way.back = send(Message(of_right, of_left, log_pass), ctx.way.stretch, ctx.way.reach)
        return log_pass.new_empty(0), None, None


class _Told:
    """The messages of all ranks, on their way."""

    def __init__(self, message: Message, stretch: Stretch) -> None:
        self._stretch = stretch
        self._pass_shape, states = message.log_pass.shape, [x for x in message[:2] if x is not None]
        self._sent = tuple(x is not None for x in message[:2])
        self._state_shape, self._dtype = states[0].shape, states[0].dtype
        length = message.log_pass.new_full((1,), stretch.lengths[stretch.rank])
        with torch.no_grad():
            exact = torch.cat([length, message.log_pass.flatten()])  # float64
            parts = [exact, *(x.flatten() for x in states)]
            mine = torch.cat([x.contiguous().view(torch.uint8) for x in parts])
            mine = F.pad(mine, (0, -len(mine) % 8))  # so that every rank's float64 are aligned
            self._mine = mine  # which must live until it has been sent
            self._exact = exact.numel()
            self._all = mine.new_empty(len(stretch.lengths) * len(mine))
        self._work = _all_gather(self._all, mine, group=stretch.group, async_op=True)

    def wait(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """log_pass `[ranks, b, H]`, and the states to the right and to the left, `[ranks, …]`."""
        assert self._work is not None
        self._work.wait()
        rows = self._all.unflatten(0, (len(self._stretch.lengths), -1))
        exact = rows[:, : 8 * self._exact].view(torch.float64)
        self._stretch.check_told(exact[:, 0])
        found: list[Tensor | None] = []
        begin, size = 8 * self._exact, self._state_shape.numel() * self._dtype.itemsize
        for sent in self._sent:
            part = rows[:, begin : begin + size].view(self._dtype) if sent else None
            found.append(None if part is None else part.unflatten(1, self._state_shape))
            begin += size if sent else 0
        return exact[:, 1:].unflatten(1, self._pass_shape), found[0], found[1]


def _arrived(logs: Tensor, states: Tensor) -> Tensor:
    """What is left of the states of ranks that follow each other, behind the last of them."""
    behind = logs[1:].flip(0).cumsum(0).flip(0)
    left = torch.cat([behind, torch.zeros_like(logs[:1])]).exp()
    left = left.to(states.dtype).expand(-1, *states.shape[1:3])
    return torch.einsum("nbh,nbhx->bhx", left, states.flatten(3)).unflatten(2, states.shape[3:])


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stretch: Stretch) -> Tensor:
        ctx.stretch = stretch
        ranks, rank = len(stretch.lengths), stretch.rank
        told = x.new_zeros(ranks)
        told[rank] = stretch.lengths[rank]
        sums = torch.cat([x.flatten(), told])
        dist.all_reduce(sums, group=stretch.group)
        stretch.check_told(sums[-ranks:])
        return sums[:-ranks].view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return sum_over_ranks(grad, ctx.stretch), None


class _Gather(Function):
    """`[T, …]` of each rank -> those of all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stretch: Stretch) -> Tensor:
        ctx.stretch, ctx.dtype = stretch, x.dtype
        ranks, most = len(stretch.lengths), max(stretch.lengths)
        mine = x.new_zeros(most, *x.shape[1:])  # a collective wants as many of every rank
        mine[: len(x)] = x
        every = mine.new_empty(ranks, *mine.shape)
        _all_gather(
            every.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8), group=stretch.group
        )
        parts = zip(every, stretch.lengths, strict=True)
        return torch.cat([rows[:length] for rows, length in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        stretch = ctx.stretch
        total = sum_over_ranks(grad.to(compute_dtype(grad.dtype)), stretch)
        return total[stretch.start : stretch.end].to(ctx.dtype), None
