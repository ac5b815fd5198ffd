"""What ranks tell each other: states, in messages whose size does not depend on the length.

A state goes from rank to rank, in either direction, and what it is on a rank follows from what it
was on the rank before it in that direction:

    from_left_{m+1} = pass_m · from_left_m + to_right_m
    from_right_{m−1} = pass_m · from_right_m + to_left_m

`to_right` and `to_left` are made of the keys of rank m, and `pass` says how much of a state is left
behind all tokens of rank m, by their decays; it is 0 where a sequence begins or ends on rank m. Few
ranks gather all of them by one message, and each sums those within its reach for itself. Many ranks
hand them on, each after it has added its own: to the next rank, then to the first, second, fourth …
after it, so that what a rank receives, and the hops, grow as log₂(ranks). The gradients go the same
way in the opposite direction.

An exchange is begun and waited for by two functions, and so it is in the backward pass: what a rank
computes between the two, it computes while messages are on their way, forward and backward.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from cosformer.distributed.stretch import Reach, Stretch
from cosformer.runtime import bytes_of, compute_dtype

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""PyTorch 2.13 has another name for it."""
MANY = 16
"""Ranks from which on states are handed on: fewer gather them in less time, for one hop is faster
than several until the bytes are many."""

_RECENT: deque[Any] = deque(maxlen=2)
"""The last collectives on CPUs, one for each thread of gloo. If such a thread were the last to have
one, it would need the interpreter to free the tensors, and would abort a program that ends then."""


class Message(NamedTuple):
    """What a rank tells all others."""

    to_right: Tensor | None  # [B, H, …], of the dtype of `to_left`
    to_left: Tensor | None
    log_pass: Tensor  # [b, H] float64: the logarithm of `pass`, −∞ for 0; b is 1 or the batch


class Carried(NamedTuple):
    """What reaches a rank, where somebody sent it; zeros if no rank is within reach."""

    from_left: Tensor | None
    from_right: Tensor | None


def send(
    message: Message, stretch: Stretch, reach: Reach, furthest: int | None = None
) -> Callable[[], Carried]:
    """Begin to tell; the function that is returned waits for what comes, and is called once.

    If rank m is within the reach of rank n, then n must be within that of m. No reach is further
    than `furthest` ranks, which is the same on all of them; None: any may be.
    """
    last = len(stretch.lengths) - 1
    way = _Way(stretch, reach, last if furthest is None else min(furthest, last))
    begun = _Begin.apply(*message, way)
    return lambda: Carried(*_End.apply(begun, message.log_pass, way))


def begin_sum(x: Tensor, stretch: Stretch) -> Callable[[], Tensor]:
    """Begin to sum x over the ranks; the function that is returned waits, and is called once."""
    summing = _Summing(stretch)
    begun = _BeginSum.apply(x, summing)

    def total() -> Tensor:
        found: Tensor = _EndSum.apply(begun, summing)
        return found

    return total


def sum_over_ranks(x: Tensor, stretch: Stretch) -> Tensor:
    """Σ x over the ranks of the group."""
    return begin_sum(x, stretch)()


def gather(x: Tensor, dim: int, stretch: Stretch) -> Tensor:
    """The tokens of all ranks, along a dimension of x."""
    sum_over_ranks(x.new_zeros(1, dtype=torch.float64), stretch)  # which compares the lengths
    rows: Tensor = _Gather.apply(x.movedim(dim, 0), stretch)
    return rows.movedim(0, dim)


class _Way:
    """What the two functions of an exchange know of each other."""

    told: "_Told | _HandedOn"
    back: Callable[[], Carried]  # waits for what the backward pass has begun to tell
    arrived: Carried  # as the backward pass has it, with its history

    def __init__(self, stretch: Stretch, reach: Reach, furthest: int) -> None:
        self.stretch, self.reach, self.furthest = stretch, reach, furthest


class _Begin(Function):
    """(to_right, to_left, log_pass) -> a tensor without numbers, by which `_End` follows."""

    @staticmethod
    def forward(
        ctx: Any, to_right: Tensor | None, to_left: Tensor | None, log_pass: Tensor, way: _Way
    ) -> Tensor:
        message = Message(to_right, to_left, log_pass)
        is_many = len(way.stretch.lengths) >= MANY
        way.told = _HandedOn(message, way) if is_many else _Told(message, way)
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
        from_left, from_right = way.told.wait()
        del way.told  # what was sent and received is no longer needed
        ctx.way = way
        ctx.save_for_backward(log_pass, from_left, from_right)
        return from_left, from_right

    @staticmethod
    def backward(ctx: Any, of_left: Tensor | None, of_right: Tensor | None) -> tuple[Any, ...]:
        log_pass, *arrived = ctx.saved_tensors
        of_left, of_right = (None if x is None else x.contiguous() for x in (of_left, of_right))
        ctx.way.arrived = Carried(*arrived)
        way = ctx.way
        back = Message(of_right, of_left, log_pass)
        way.back = send(back, way.stretch, way.reach, way.furthest)
        return log_pass.new_empty(0), None, None


class _Told:
    """The messages of all ranks, on their way to each."""

    def __init__(self, message: Message, way: _Way) -> None:
        self._way, lengths = way, way.stretch.lengths
        length = message.log_pass.new_full((1,), lengths[way.stretch.rank])
        parts = {"length": length, "log_pass": message.log_pass, **message._asdict()}
        self._parts = {name: x for name, x in parts.items() if x is not None}
        self._mine = _bytes(*self._parts.values())  # must live until it is sent
        self._all = self._mine.new_empty(len(lengths) * len(self._mine))
        self._work = _kept(
            _all_gather(self._all, self._mine, group=way.stretch.group, async_op=True), self._mine
        )

    def wait(self) -> Carried:
        assert self._work is not None
        self._work.wait()
        stretch, reach = self._way.stretch, self._way.reach
        rows = self._all.unflatten(0, (len(stretch.lengths), -1))
        parts = _parts(rows, self._parts.values())
        found = dict(zip(self._parts, parts, strict=True))
        stretch.check_told(found["length"][:, 0])
        logs, rights, lefts = found["log_pass"], found.get("to_right"), found.get("to_left")
        before, after = slice(reach.first, stretch.rank), slice(stretch.rank + 1, reach.last + 1)
        return Carried(
            None if rights is None else _arrived(logs[before], rights[before]),
            None if lefts is None else _arrived(logs[after].flip(0), lefts[after].flip(0)),
        )


def _kept(work: Any, sent: Tensor) -> Any:
    """A collective that has begun, once it is among the recent ones."""
    if not sent.is_cuda:
        _RECENT.append(work)
    return work


def _bytes(*parts: Tensor) -> Tensor:
    """Numbers one after another, filled up so that float64 behind them are aligned."""
    found = torch.cat([bytes_of(x) for x in parts])
    return F.pad(found, (0, -len(found) % 8))


def _parts(found: Tensor, like: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors in bytes `[…, bytes]`, with the dtypes of others and their shapes behind `…`."""
    begin = 0
    for x in like:
        yield found[..., begin : begin + x.nbytes].view(x.dtype).unflatten(-1, x.shape)
        begin += x.nbytes


def _arrived(logs: Tensor, states: Tensor) -> Tensor:
    """What is left of the states of ranks that follow each other, behind the last of them."""
    behind = logs[1:].flip(0).cumsum(0).flip(0)
    left = torch.cat([behind, torch.zeros_like(logs[:1])]).exp()
    left = left.to(states.dtype).expand(-1, *states.shape[1:3])
    return torch.einsum("nbh,nbhx->bhx", left, states.flatten(3)).unflatten(2, states.shape[3:])


class _HandedOn:
    """What ranks hand on to each other, in both directions."""

    def __init__(self, message: Message, way: _Way) -> None:
        self._way, lengths = way, way.stretch.lengths
        self._length = message.log_pass.new_full((1,), lengths[way.stretch.rank])
        self._lengths = self._length.new_empty(len(lengths))
        group = way.stretch.group
        self._work = _kept(
            _all_gather(self._lengths, self._length, group=group, async_op=True), self._length
        )
        self._right, self._left = (
            None if state is None else _Handing(state, message.log_pass, way.stretch, sign)
            for state, sign in ((message.to_right, 1), (message.to_left, -1))
        )

    def wait(self) -> Carried:
        assert self._work is not None
        self._work.wait()
        self._way.stretch.check_told(self._lengths)
        both = [each for each in (self._right, self._left) if each is not None]
        distance = 0
        while distance < self._way.furthest:
            for each in both if distance else ():  # the first hop is under way
                each.hop(distance, each.found)
            for each in both:
                each.take()
            distance = 2 * distance or 1
        rank, reach = self._way.stretch.rank, self._way.reach
        right, left = self._right, self._left
        return Carried(
            None if right is None else right.arrived(is_near=reach.first < rank),
            None if left is None else left.arrived(is_near=reach.last > rank),
        )


class _Handing:
    """What ranks hand on in one direction, in which `place` counts them from 0."""

    def __init__(self, state: Tensor, log_pass: Tensor, stretch: Stretch, sign: int) -> None:
        """`sign`: 1 to the right, −1 to the left."""
        self._stretch, self._sign, self._last = stretch, sign, len(stretch.lengths) - 1
        self._place = stretch.rank if sign > 0 else self._last - stretch.rank
        self._own = (log_pass, state)
        self.found: tuple[Tensor, Tensor] | None = None
        """log_pass and state of ranks before this one, as if they were one rank."""
        self.hop(1, self._own)

    def hop(self, distance: int, given: tuple[Tensor, Tensor] | None) -> None:
        """Begin to send to the rank at a distance, and to receive from the one behind."""
        self._sent, self._received, operations = None, None, []
        if given is not None and self._place + distance <= self._last:
            self._sent = _bytes(*given)  # must live until it is sent
            operations.append(self._operation(dist.isend, self._sent, distance))
        if self._place - distance >= (0 if given is self._own else 1):  # nothing comes to the first
            size = sum(x.nbytes for x in self._own)
            self._received = self._own[1].new_empty(size + -size % 8, dtype=torch.uint8)
            operations.append(self._operation(dist.irecv, self._received, -distance))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def take(self) -> None:
        """Wait, and put what has come before what has come until now."""
        for work in self._works:
            work.wait()
        if self._received is None:
            return
        log_earlier, earlier = _parts(self._received, self._own)
        if self.found is not None:
            log_later, later = self.found
            left = log_later.exp().to(earlier.dtype).expand(earlier.shape[:2])
            earlier = later + torch.einsum("bh,bh...->bh...", left, earlier)
            log_earlier = log_earlier + log_later
        self.found = (log_earlier, earlier)

    def arrived(self, *, is_near: bool) -> Tensor:
        """The state that reaches this rank; zeros if no rank is near enough."""
        return self.found[1] if self.found and is_near else torch.zeros_like(self._own[1])

    def _operation(
        self, operation: Callable[..., Any], tensor: Tensor, distance: int
    ) -> dist.P2POp:
        peer = self._stretch.rank + self._sign * distance
        group = self._stretch.group
        return dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group)


class _Summing:
    """A sum on its way, and what the two functions of it know of each other."""

    back: Callable[[], Tensor]  # waits for the sum that the backward pass has begun

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch

    def begin(self, x: Tensor) -> None:
        ranks, rank = len(self.stretch.lengths), self.stretch.rank
        told = x.new_zeros(ranks)
        told[rank] = self.stretch.lengths[rank]
        self._sums, self._shape = torch.cat([x.flatten(), told]), x.shape
        group = self.stretch.group
        self._work = _kept(dist.all_reduce(self._sums, group=group, async_op=True), self._sums)

    def wait(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        ranks = len(self.stretch.lengths)
        self.stretch.check_told(self._sums[-ranks:])
        return self._sums[:-ranks].view(self._shape)


class _BeginSum(Function):
    """x -> a tensor without numbers, by which `_EndSum` follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summing: _Summing) -> Tensor:
        ctx.summing = summing
        summing.begin(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return ctx.summing.back(), None


class _EndSum(Function):
    """-> Σ x over ranks."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, summing: _Summing) -> Tensor:
        ctx.summing = summing
        return summing.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.summing.back = begin_sum(grad, ctx.summing.stretch)
        return grad.new_empty(0), None


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
