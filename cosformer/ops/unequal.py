"""Causal attention where query i does not stand at key i: three problems, joined by states."""

from typing import Any

import torch
from torch import Tensor

from cosformer.ops.problem import Problem, for_each_query_head


def in_pieces(
    compute: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem, impl: str
) -> tuple[Tensor, Tensor | None]:
    """Earlier keys meet the queries as a state, and later queries the keys.

    keys       ┌── before ──┬── shared ──┐ (later keys are never seen)
    queries    (no key yet) ├── shared ──┼── after ──┐
    """
    start, queries, keys = problem.query_start, q.shape[2], k.shape[2]
    weights_per_head = problem.theta.shape[0] > 1 or problem.query_decay is not None
    if q.shape[1] > k.shape[1] and weights_per_head:  # heads of a group cannot share the state
        k, v = (for_each_query_head(x, q.shape[1] // k.shape[1]) for x in (k, v))
    nothing = _clip(-start, queries)  # queries that stand before the first key
    before = _clip(start, keys)
    shared_stop = before + _clip(start + queries - before, keys - before)

    def piece(
        rows: slice, columns: slice, state: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        part = _part(problem, rows, columns, causal)
        given = (q[:, :, rows], k[:, :, columns], v[:, :, columns])
        return compute(*given, part, state, impl=impl, keep_state=True)

    _, state = piece(slice(0, 0), slice(0, before), None, False)
    shared = slice(nothing, nothing + shared_stop - before)
    out, state = piece(shared, slice(before, shared_stop), state, True)
    pieces = [q.new_zeros(*q.shape[:2], nothing, v.shape[-1]), out] if nothing else [out]
    if shared.stop < queries:
        out, _ = piece(slice(shared.stop, queries), slice(keys, keys), state, False)
        pieces.append(out)
    return torch.cat(pieces, 2), None


def _part(problem: Problem, rows: slice, columns: slice, causal: bool) -> Problem:
    """A stretch of queries and keys, with L counted from the last key before it."""
    query_decay, key_decay = problem.query_decay, problem.key_decay
    if query_decay is not None and key_decay is not None:
        done = key_decay[..., columns.start - 1, None] if columns.start else 0.0
        query_decay, key_decay = query_decay[..., rows] - done, key_decay[..., columns] - done
    return problem._replace(
        causal=causal,
        query_start=0,
        query_position=problem.query_position[:, rows],
        key_position=problem.key_position[:, columns],
        query_decay=query_decay,
        key_decay=key_decay,
        query_basis=None,
        key_basis=None,
        key_mask=None if problem.key_mask is None else problem.key_mask[:, columns],
    )


def _clip(count: int, limit: int) -> int:
    """Between 0 and the limit, by branches: a tracer reasons about them better than about min."""
    if count <= 0:
        return 0
    return count if count <= limit else limit
