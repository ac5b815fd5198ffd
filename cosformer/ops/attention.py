"""cosFormer attention ("cosFormer: Rethinking Softmax in Attention", Qin et al., ICLR 2022).

s(i, j) = relu(q_i) · relu(k_j) · cos(π/2 · (i − j) / horizon)
out_i   = Σ_j s(i, j) v_j / max(Σ_j s(i, j), eps)

A decay γ multiplies s(i, j) by γ^|i − j|, which the paper does not have.
"""

import difflib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_inputs, check_key_mask
from cosformer.ops.again import attend_again
from cosformer.ops.dispatch import compute, kept_problem, placed
from cosformer.ops.linear import Arguments as Family
from cosformer.ops.linear import go_on
from cosformer.ops.problem import (
    Horizon,
    Placement,
    Problem,
    Rates,
    check_length,
    check_one_decay,
    cosine_angle,
    decaying_evenly,
    divisor,
    kind_within,
    quarter_turn_over,
)
from cosformer.ops.reference import scores, with_summed_gates
from cosformer.ops.state import State, check_continues, check_gates_go_on
from cosformer.runtime import compute_dtype, full_precision

OF_SOFTMAX = {
    "is_causal": "causal=True means the same",
    "attn_mask": "linear attention cannot apply one; causal=True and key_mask serve its usual ends",
    "dropout_p": "drop values instead: v = torch.nn.functional.dropout(v, p)",
    "scale": "cosFormer has none: relu features are divided by their own sum",
    "enable_gqa": "grouped heads need no flag: k and v may have fewer heads than q",
}
"""Arguments of `scaled_dot_product_attention` that are not arguments here, and why."""


class Arguments(NamedTuple):
    """The arguments of `attention` other than q, k and v; its docstring explains each."""

    causal: bool
    horizon: Horizon | None
    decay: Rates | None
    log_decay: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    query_start: int | None
    positions: str
    weight: str
    eps: float
    impl: str = "auto"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    horizon: Horizon | None = None,
    decay: Rates | None = None,
    log_decay: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
    positions: str = "index",
    weight: str = "cosine",
    eps: float = 1e-6,
    impl: str = "auto",
    **of_softmax: Any,
) -> Tensor:
    """cosFormer attention in linear time and memory. There is no 1/√d.

    Args:
        q: queries `[B, H, T, D]`; any strides.
        k: keys `[B, H_kv, S, D]`; H is a multiple of H_kv.
        v: values `[B, H_kv, S, V]`.
        causal: a query sees keys at its own index and before. With T ≠ S the last query stands
            at the last key, unless `query_start` says otherwise.
        horizon: the distance at which weights reach zero, a number or one per head `[H]`; at least
            the sequence length, unless `decay` lets it pass. None: max(T, S), as in the paper, or
            each packed sequence's length. `math.inf`: no cosine.
        decay: γ in (0, 1], by which weights shrink with every token between query and key: one
            number, or one per head as a sequence or a tensor `[H]` (or `[H_kv]`), which may be
            learned. Without `causal` weights shrink with |i − j|, and query i must stand at key i:
            cross attention has no decay. Numbers that are all 1 mean no decay. Numbers of at most
            2^(-24/horizon) make every weight vanish before the horizon, so that no length is too
            long; of a tensor, which may be learned, the op does not know it.
        log_decay: log γ of each token, `[B, H, T]` (or `[B, H_kv, T]`), at most 0, instead of
            `decay`. A weight shrinks by the tokens after the earlier of query and key, up to and
            with the later one. Needs T = S. On a GPU the device asserts that none is above 0.
        key_mask: `[B, S]` bool, True = real token. Masked keys and values have no effect.
        cu_seqlens: boundaries `[0, …, T]` of sequences laid end to end in a batch of one;
            positions start again at each.
        query_start: the key index that the first query stands at.
        positions: cross attention compares equal indices (`index`), or each side's positions
            scaled to the longer length (`stretch`).
        weight: `cosine`, or `raised_cosine` (1 + cos(2θδ))/2, which never turns negative. Of the
            latter, rows whose weights are below 2⁻¹² on average fade to zero (docs/numerics.md).
        eps: the least denominator.
        impl: `auto` (which is best for the call), `reference` (quadratic), `chunked` (torch),
            `triton` (any GPU that Triton knows) or `hopper` (CUDA C++ for H100 and H200).

    Returns:
        `[B, H, T, V]` in the dtype of q. A query that sees nothing gets zeros.

    >>> q, k, v = torch.randn(3, 1, 8, 1000, 64)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 8, 1000, 64])
    """
    if of_softmax:
        raise _unknown(of_softmax)
    if decay is not None:
        decay = check_one_decay(decay, log_decay)
    given = Arguments(
        causal, horizon, decay, log_decay, key_mask, cu_seqlens, query_start, positions, weight,
        eps, impl,
    )  # fmt: skip
    if isinstance(q, Tensor) and q.is_cuda:
        return attend_again(_attention, _problem, q, k, v, given)
    return _attention(q, k, v, given)


def attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    horizon: Horizon | None = None,
    decay: Rates | None = None,
    log_decay: Tensor | None = None,
    state: State | None = None,
    key_mask: Tensor | None = None,
    weight: str | None = None,
    eps: float = 1e-6,
    impl: str = "auto",
) -> tuple[Tensor, State]:
    """Causal attention over the next T tokens of a stream, and the stream's new state.

    Args:
        q, k, v: the next tokens, `[B, H, T, D]`, `[B, H_kv, T, D]`, `[B, H_kv, T, V]`.
        horizon: to start a stream: a number, or one per key head `[H_kv]`. With `math.inf` there
            is no cosine, and the stream may be endless.
        decay: to start a stream: γ in (0, 1], a number or one per key head. The state remembers
            it, as it does the horizon: None goes on with it, and any other is an error. Numbers of
            at most 2^(-24/horizon) make the stream endless, as in `attention`.
        log_decay: log γ of each of these tokens, `[B, H_kv, T]`, at most 0. A stream that starts
            with one needs one in every call.
        state: to go on with one. It is not changed.
        key_mask: `[B, T]` bool, True = real token.
        weight, eps, impl: as in `attention`.

    Returns:
        `[B, H, T, V]` in the dtype of q, and the state after these tokens.

    >>> q, k, v = torch.randn(3, 1, 8, 100, 64)
    >>> first, state = attention_with_state(q, k, v, horizon=4096)
    >>> second, state = attention_with_state(q, k, v, state=state)
    >>> int(state.position)
    200
    """
    q, k, v = check_inputs(q, k, v)
    check_key_mask(key_mask, k)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a stream needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    if decay is not None and (state is not None or log_decay is not None):
        decay = check_one_decay(decay, log_decay)  # that of a new stream is checked by its state
    if state is None:
        if horizon is None:
            raise ValueError("horizon is required to start a stream: it cannot follow the length")
        state = State.empty(
            q.shape[0],
            k.shape[1],
            k.shape[3],
            v.shape[3],
            horizon=horizon,
            decay=decay,
            per_token=log_decay is not None,
            weight=weight or "cosine",
            dtype=compute_dtype(q.dtype),
            device=q.device,
        )
        horizon = decay = None
    limit = check_continues(state, k, v, horizon, weight, decay)
    check_gates_go_on(state, log_decay, k)
    if state.is_limited:
        check_length(q.shape[2], limit, state.position)
    given = Family(
        "relu", True, quarter_turn_over(limit), state.decay, log_decay,
        raised=state.weight == "raised_cosine", eps=eps, key_mask=key_mask, impl=impl,
    )  # fmt: skip
    return go_on(q, k, v, state, given)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    horizon: Horizon | None = None,
    decay: Rates | None = None,
    log_decay: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
    positions: str = "index",
    weight: str = "cosine",
    eps: float = 1e-6,
    rows: slice | None = None,
    columns: slice | None = None,
) -> Tensor:
    """The dense map A with `attention(q, k, v) = A @ v`, whole or a window of it.

    Args:
        q, k: `[B, H, T, D]`, `[B, H_kv, S, D]`.
        rows, columns: slices of queries and keys; None for all. Only this window is ever formed:
            a row's sum over the keys outside it is taken in linear time.
        others: as in `attention`.

    Returns:
        `[B, H, rows, columns]` in the dtype of q.

    >>> q, k = torch.randn(2, 1, 8, 10_000, 64)
    >>> attention_weights(q, k, rows=slice(500, 600), columns=slice(0, 50)).shape
    torch.Size([1, 8, 100, 50])
    """
    q, k, _ = check_inputs(q, k, k)
    check_key_mask(key_mask, k)
    if decay is not None:
        decay = check_one_decay(decay, log_decay)
    given = Arguments(
        causal, horizon, decay, log_decay, key_mask, cu_seqlens, query_start, positions, weight, eps
    )
    problem = _problem(q, k, given)
    rows = _window("rows", rows, q.shape[2])
    columns = _window("columns", columns, k.shape[2])
    dtype = compute_dtype(q.dtype)
    summed = (q.to(dtype), k.to(dtype), torch.ones_like(k[..., :1], dtype=dtype))
    undivided = problem._replace(rule="none")
    total, _ = compute(*summed, undivided)
    mass = None
    if weight == "raised_cosine":
        plain = undivided._replace(weight="plain", query_basis=None, key_basis=None)
        mass, _ = compute(*summed, plain)
    with full_precision(q):
        window = scores(q, k, with_summed_gates(problem, dtype), rows, columns)
    return (window / divisor(total, problem.rule, eps, mass)[:, :, rows]).to(q.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, given: Arguments) -> Tensor:
    q, k, v = check_inputs(q, k, v)
    if given.key_mask is not None:
        check_key_mask(given.key_mask, k)
    return compute(q, k, v, _problem(q, k, given), impl=given.impl)[0]


def _problem(q: Tensor, k: Tensor, given: Arguments) -> Problem:
    def make() -> Problem:
        placement = Placement(given.causal, given.query_start, given.cu_seqlens, given.positions)
        decays = "" if given.log_decay is None else "log_decay"
        problem = placed(
            q,
            k,
            placement,
            lambda: cosine_angle(q, k, given.horizon, given.weight, placement, given.decay),
            own_horizons=given.horizon is None,
            decays=decays if given.decay is None else "decay",
            weight=kind_within(given.horizon, given.weight),
            feature_map="relu",
            rule="clamp",
            eps=given.eps,
        )
        return decaying_evenly(problem, given.decay, q, k, "decay")

    return kept_problem(q, k, given, make)


def _unknown(given: dict[str, Any]) -> TypeError:
    """The error for an unknown argument; for one of PyTorch's attention it says what to use."""
    name = next(iter(given))
    near = difflib.get_close_matches(name, Arguments._fields, 1)
    advice = f": {OF_SOFTMAX[name]}" if name in OF_SOFTMAX else ""
    advice = advice or (f"; did you mean {near[0]!r}?" if near else "")
    return TypeError(f"attention has no argument {name!r}{advice}")


def _window(name: str, window: slice | None, length: int) -> slice:
    if window is None:
        return slice(0, length)
    if not isinstance(window, slice):
        raise TypeError(f"{name} must be a slice or None, got {type(window).__name__}")
    if not torch.compiler.is_compiling():  # a tracer does not see whether a bound has __index__
        for bound in (window.start, window.stop, window.step):
            if bound is not None and not hasattr(bound, "__index__"):
                raise TypeError(f"{name} must be a slice of whole numbers, got {window}")
    seen = range(length)[window]  # PyTorch 2.11 traces no slice.indices
    if seen.step != 1:
        raise ValueError(f"{name} must be a slice with step 1, got {window}")
    return slice(seen.start, max(seen.start, seen.stop))
