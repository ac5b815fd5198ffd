"""What a rank computes: its own keys as a state, and attention to them and to other ranks' states.

    causal                  the states of earlier ranks; then a causal pass that begins with them
    in both directions      the sum of all states, which all queries read
    …, decaying or packed   a pass over the rank's own tokens, to which is added what its queries
                            read from the states of earlier and of later ranks; then the division

Packed sequences cut a rank's tokens into its first sequence, which may have begun on an earlier
rank, its last one, which may go on on a later rank, and those between, which no other rank sees.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import cosformer.ops as ops
from cosformer.check import check_bool
from cosformer.distributed.exchange import Message, begin_sum, send
from cosformer.distributed.stretch import Cut, Piece, Stretch, cut
from cosformer.ops.problem import (
    WEIGHTS,
    Problem,
    for_each_query_head,
    is_one,
    least_gate,
    log_rates,
    quarter_turn_over,
    quotient,
    running_sum,
    with_ones,
    zero_masked,
)
from cosformer.runtime import compute_dtype, full_precision

Meanwhile = Callable[[], Tensor | None]


class Asked(NamedTuple):
    """What both functions ask for."""

    given: ops.Arguments
    alone: Callable[..., Tensor]  # the same of packed sequences that lie on this rank as a whole
    own_horizons: bool  # whether the horizon of each packed sequence is its length
    meanwhile: Meanwhile | None  # what the caller computes while messages are on their way

    @property
    def decays(self) -> bool:
        return self.given.log_decay is not None or not is_one(self.given.gamma)


class Part(NamedTuple):
    """A piece of a sequence: its tokens, and the problem of these alone, at their positions."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    since_start: Tensor | None
    """`[b, h, T]` float64: the logarithm of what is left, at each token, of a weight on what came
    before the piece."""
    impl: str

    @property
    def until_end(self) -> Tensor | None:
        """The logarithm of what is left of each token's weight behind the last one."""
        left = self.since_start
        return None if left is None else left[..., -1:] - left


def attend(
    q: Tensor, k: Tensor, v: Tensor, asked: Asked, stretch: Stretch, bounds: Sequence[int]
) -> Tensor:
    """`[B, H, T, V]` of the tokens of this rank; `bounds` are of sequences on all ranks."""
    check_bool("causal", asked.given.causal)
    if asked.meanwhile is not None and not callable(asked.meanwhile):
        raise TypeError(f"meanwhile must be a function, got {type(asked.meanwhile).__name__}")
    pieces = cut(bounds, stretch)
    first = _part(q, k, v, asked, pieces.first)
    last = first if pieces.first is pieces.last else _part(q, k, v, asked, pieces.last)
    between = _Between(q, k, v, asked, pieces)
    with full_precision(q):
        if asked.given.causal:
            return _causal(first, last, between, stretch)
        if len(bounds) == 2 and not asked.decays:
            total = begin_sum(_state(first, None), stretch)
            first, *_ = _with_queries(first, last, between)
            return _read(first, first.problem, total())
        return _both_ways(first, last, between, stretch)


def _part(q: Tensor, k: Tensor, v: Tensor, asked: Asked, piece: Piece) -> Part:
    """One piece of the tokens `[B, H, T, ·]` of this rank."""
    given, rows = asked.given, piece.rows
    q, k, v = q[:, :, rows], k[:, :, rows], v[:, :, rows]
    gates, mask = given.log_decay, given.key_mask
    given = given._replace(
        log_decay=None if gates is None else gates[..., rows],
        key_mask=None if mask is None else mask[:, rows],
    )
    if asked.own_horizons:
        given = given._replace(theta=quarter_turn_over(max(piece.sequence_length, 1)))
    position = torch.full((), piece.position, dtype=torch.int64, device=q.device)
    problem = ops.stream_problem(q, k, given, position)
    return Part(q, k, v, problem, _decay(k, given), given.impl)


def _decay(k: Tensor, given: ops.Arguments) -> Tensor | None:
    """L, the logarithm of the decay summed up to and with each token: `[b, h, T]` float64."""
    rates, total = log_rates(given.gamma, k, k), None
    if rates is not None:
        total = rates.expand(-1, -1, k.shape[2]).cumsum(-1)
    if given.log_decay is None:
        return total
    sums = running_sum(given.log_decay, least_gate(compute_dtype(k.dtype)))
    return sums if total is None else total + sums


class _Between(NamedTuple):
    """The sequences that lie on this rank as a whole, between its first and its last one."""

    q: Tensor
    k: Tensor
    v: Tensor
    asked: Asked
    pieces: Cut

    def outputs(self) -> list[Tensor]:
        """`[B, H, T, V]` of all of them, if there are any."""
        bounds, given = self.pieces.between, self.asked.given
        if not bounds:
            return []
        rows = slice(bounds[0], bounds[-1])
        gates, mask = given.log_decay, given.key_mask
        out = self.asked.alone(
            *(x[:, :, rows] for x in (self.q, self.k, self.v)),
            cu_seqlens=torch.tensor([x - bounds[0] for x in bounds], device=self.q.device),
            log_decay=None if gates is None else gates[..., rows],
            key_mask=None if mask is None else mask[:, rows],
        )
        return [out]

    def log_pass(self, part: Part, rank: int) -> Tensor:
        """The logarithm of what is left of a state behind all tokens of this rank: `[b, H_kv]`.

        Nothing is left where a sequence begins or ends on this rank; there is no gradient then.
        """
        heads, left, reach = part.k.shape[1], part.since_start, self.pieces.reach
        passes = self.pieces.first is self.pieces.last and reach.first < rank < reach.last
        if left is not None and left.shape[2] and passes:
            return left[..., -1].expand(-1, heads)
        batch = 1 if self.asked.given.log_decay is None else part.k.shape[0]
        log = 0.0 if passes else -math.inf
        return torch.full((batch, heads), log, dtype=torch.float64, device=part.k.device)


def _with_queries(first: Part, last: Part, between: _Between) -> tuple[Part, Part, _Between]:
    """Call `meanwhile`; if it returns queries, all parts get those instead of their own."""
    like, meanwhile, pieces = between.q, between.asked.meanwhile, between.pieces
    q = None if meanwhile is None else meanwhile()
    if q is None:
        return first, last, between
    if not isinstance(q, Tensor):
        raise TypeError(f"meanwhile must return a tensor or None, got {type(q).__name__}")
    if q.shape != like.shape or q.dtype != like.dtype:
        raise ValueError(
            f"meanwhile must return queries such as q, {like.dtype} {list(like.shape)}, got "
            f"{q.dtype} {list(q.shape)}"
        )
    begun = first._replace(q=q[:, :, pieces.first.rows])
    ended = begun if last is first else last._replace(q=q[:, :, pieces.last.rows])
    return begun, ended, between._replace(q=q)


def _causal(first: Part, last: Part, between: _Between, stretch: Stretch) -> Tensor:
    """Only the first sequence of a rank has keys on earlier ranks, and the last on later ones."""
    state, log_pass = _state(last, last.until_end), between.log_pass(last, stretch.rank)
    receive = send(Message(state, None, log_pass), stretch, between.pieces.reach)
    first, last, between = _with_queries(first, last, between)
    others = between.outputs()
    if last is not first:
        others.append(_compute(last, last.problem, None))
    out = _compute(first, first.problem, receive().from_left)
    return torch.cat([out, *others], 2) if others else out


def _both_ways(first: Part, last: Part, between: _Between, stretch: Stretch) -> Tensor:
    """Sums over a rank's own keys, earlier and later ones, which share one denominator."""
    to_right, to_left = _state(last, last.until_end), _state(first, first.since_start)
    message = Message(to_right, to_left, between.log_pass(last, stretch.rank))
    receive = send(message, stretch, between.pieces.reach)
    first, last, between = _with_queries(first, last, between)
    parts = [first] if last is first else [first, last]
    sums = [_Sums(part) for part in parts]
    others = between.outputs()
    found = receive()
    sums[0].add(found.from_left, first.since_start)
    sums[-1].add(found.from_right, last.until_end)
    outs = [each.divided() for each in sums]
    return torch.cat([outs[0], *others, *outs[1:]], 2) if len(outs) + len(others) > 1 else outs[0]


class _Sums:
    """Σ_j w(i, j) s_ij [v_j 1] of the queries of a part, first over its own keys."""

    def __init__(self, part: Part) -> None:
        self.dtype, self.problem = part.q.dtype, part.problem
        self.part = part = _wide(part)
        undivided = part.problem._replace(rule="none", scale=1.0)
        self.kinds = [undivided]
        if undivided.weight == "raised_cosine" and self.problem.rule != "none":
            plain = undivided._replace(weight="plain", query_basis=None, key_basis=None)
            self.kinds.append(plain)  # Σ_j s_ij, below which a faint row is not divided
        ones = part.v[..., -1:]
        columns = [part.v, ones][: len(self.kinds)]
        self.sums = [
            _compute(part._replace(v=values), kind, None)
            for kind, values in zip(self.kinds, columns, strict=True)
        ]

    def add(self, state: Tensor | None, log_left: Tensor | None) -> None:
        """What the queries read from a state, of which so much is left at each."""
        assert state is not None
        states = [state, state[:, :, :1, :, -1:]]
        for n, kind in enumerate(self.kinds):
            read = _read(self.part, kind, states[n])
            if log_left is not None:
                groups = read.shape[1] // self.part.k.shape[1]
                read = read * _factor(log_left, self.part.k, groups)
            self.sums[n] = self.sums[n] + read

    def divided(self) -> Tensor:
        """The output `[B, H, T, V]`."""
        mass = self.sums[1] if len(self.sums) > 1 else None
        return quotient(self.sums[0], self.problem, mass).to(self.dtype)


def _wide(part: Part) -> Part:
    """The part in float32 at least; where rows are divided, values have one more column, of 1."""
    dtype = compute_dtype(part.q.dtype)
    q, k, v = (x.to(dtype) for x in (part.q, part.k, part.v))
    v = zero_masked(v, part.problem.key_mask)  # else a hidden NaN would spoil its products
    v = with_ones(v, part.problem.rule)
    return part._replace(q=q, k=k, v=v)


def _state(part: Part, log_left: Tensor | None) -> Tensor:
    """The keys of a part as a state `[B, H_kv, R, D, V(+1)]`, of each of which so much is left."""
    problem = part.problem
    if log_left is not None:
        part = _wide(part)
        part = part._replace(v=part.v * _factor(log_left, part.k))
        problem = problem._replace(rule="none", scale=1.0)
    problem = _without_decay(problem)._replace(query_position=problem.query_position[:, :0])
    if problem.query_basis is not None:
        problem = problem._replace(query_basis=problem.query_basis[:, :, :0])
    batch, heads, _, width = part.k.shape
    columns = part.v.shape[3] + (problem.rule != "none")
    shape = (batch, heads, WEIGHTS[problem.weight], width, columns)
    empty = part.q.new_zeros(shape, dtype=compute_dtype(part.q.dtype))
    state = ops.compute(part.q[:, :, :0], part.k, part.v, problem, empty, impl=part.impl)[1]
    assert state is not None
    return state


def _read(part: Part, problem: Problem, state: Tensor) -> Tensor:
    """What the queries of a part read from a state, divided as the problem says."""
    problem = _without_decay(problem)._replace(key_position=problem.key_position[:, :0])
    if problem.key_basis is not None:
        problem = problem._replace(key_basis=problem.key_basis[:, :, :0])
    if problem.key_mask is not None:
        problem = problem._replace(key_mask=problem.key_mask[:, :0])
    columns = state.shape[-1] - (problem.rule != "none")
    none = part.k.new_empty(*part.k.shape[:2], 0, columns)
    return ops.compute(part.q, part.k[:, :, :0], none, problem, state, impl=part.impl)[0]


def _compute(part: Part, problem: Problem, state: Tensor | None) -> Tensor:
    return ops.compute(part.q, part.k, part.v, problem, state, impl=part.impl)[0]


def _without_decay(problem: Problem) -> Problem:
    return problem._replace(causal=False, mild=False, query_decay=None, key_decay=None, gates=None)


def _factor(log_left: Tensor, like: Tensor, groups: int = 1) -> Tensor:
    """exp of `[b, h, T]` as a factor of rows `[B, H, T, ·]`; h is 1 or the number of key heads."""
    left = log_left.exp().to(like.dtype)[..., None]
    return left if left.shape[1] == 1 else for_each_query_head(left, groups)
