"""The family that cosFormer belongs to: w(i, j) = γ^(i−j) · c(θ(i − j)) on any feature map."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import (
    check_bool,
    check_choice,
    check_inputs,
    check_key_mask,
    check_number_or_tensor,
    check_scale,
    check_tensor,
)
from cosformer.ops.dispatch import compute
from cosformer.ops.problem.arguments import build, check_placement, decaying, decaying_evenly
from cosformer.ops.problem.memo import remembered
from cosformer.ops.problem.normaliser import SUM_RULES
from cosformer.ops.problem.problem import WEIGHTS, Problem
from cosformer.ops.problem.weights import (
    Rates,
    angles,
    as_numbers,
    horizon_of,
    is_decaying,
    kind_of,
    log_gates,
    log_rates,
    sizes_of,
)
from cosformer.ops.replay.replay import replayed
from cosformer.ops.state import (
    State,
    at_least,
    check_state_shape,
    join,
    same_horizon,
    split,
)
from cosformer.runtime import compute_dtype

NORMALISERS = ("sum", "none")

Map = str | Callable[[Tensor], Tensor]


class Options(NamedTuple):
    """What `linear_attention` was given beside q, k and v, which explains each."""

    feature_map: Map
    causal: bool
    theta: float | Tensor
    gamma: Rates
    log_decay: Tensor | None
    raised: bool
    normaliser: str
    rule: str
    eps: float
    scale: float
    key_mask: Tensor | None
    cu_seqlens: Tensor | None = None
    query_start: int | None = None


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Map = "identity",
    causal: bool = False,
    theta: float | Tensor = 0.0,
    gamma: Rates = 1.0,
    log_decay: Tensor | None = None,
    raised: bool = False,
    normaliser: str = "sum",
    rule: str = "clamp",
    eps: float = 1e-6,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Linear attention with any feature map, cosine, decay and normaliser.

        s(i, j) = φ(q_i) · φ(k_j) · γ^(i−j) · c(θ(i − j))        out_i = Σ_j s(i, j) v_j / D_i

    | mechanism          | call                                                         |
    |--------------------|--------------------------------------------------------------|
    | cosFormer          | `feature_map="relu", theta=math.pi / (2 * horizon)`          |
    | … for ever         | the same and `raised=True`                                   |
    | … its ablations    | `feature_map="relu"`, `"leaky_relu"`, `"identity"` (signed)  |
    | Linear Transformer | `feature_map="1+elu"`                                        |
    | retention          | `gamma=[1 - 2.0**(-5 - h) for h in range(H)]`, not divided   |
    | gated linear       | `log_decay=logsigmoid(gate), normaliser="none"`              |

    Args:
        q, k, v: as in `attention`.
        feature_map: a name (identity, relu, leaky_relu, 1+elu, elu, silu), which costs no memory,
            or a function of q and of k, which may change their width.
        theta: radians per position, a number or one per head `[H]`. No horizon is enforced here.
        gamma: what is left of a weight one position on, in (0, 1], a number or one per head `[H]`;
            causal only. Numbers are looked at once; a tensor costs more with every call.
        log_decay: g_t ≤ 0 per token, `[B, H, T]`, in S_t = exp(g_t) S_{t−1} + φ(k_t) v_tᵀ.
            A GPU is not waited for: there a larger one is an assertion on the device.
        raised: c(x) = (1 + cos 2x)/2 instead of cos x.
        normaliser: `sum` divides by D_i = Σ_j s(i, j); `none` does not divide.
        eps, key_mask, cu_seqlens, query_start, impl: as in `attention`.
        rule: D_i is max(Σ, eps) (`clamp`), Σ + eps (`add`) or Σ kept ±eps from zero (`signed`).
        scale: a positive factor of every s(i, j), like 1/√d, that costs nothing on Hopper; of the
            output, then, and not of a state. Under `sum` it would cancel, and must be 1.

    Returns:
        `[B, H, T, V]` in the dtype of q.
    """
    options = Options(
        feature_map, causal, theta, as_numbers(gamma), log_decay, raised, normaliser, rule, eps,
        scale, key_mask, cu_seqlens, query_start,
    )  # fmt: skip
    return replayed(_linear_attention, q, k, v, *options, impl)


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    """`given` are the options, and impl."""
    *about, impl = given
    options = Options(*about)
    q, k, v = _map(q, k, v, options.feature_map, options.key_mask)
    check_placement(
        q, k,
        causal=options.causal, cu_seqlens=options.cu_seqlens, query_start=options.query_start,
    )  # fmt: skip
    return compute(q, k, v, _problem(q, k, options), impl=impl)[0]


def linear_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = None,
    feature_map: Map = "identity",
    theta: float | Tensor = 0.0,
    gamma: Rates = 1.0,
    log_decay: Tensor | None = None,
    raised: bool = False,
    normaliser: str = "sum",
    rule: str = "clamp",
    eps: float = 1e-6,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, State]:
    """Causal `linear_attention` over the next T tokens of a stream, and the stream's new state.

    Args:
        q, k, v: `[B, H, T, D]`, `[B, H_kv, T, D]`, `[B, H_kv, T, V]`.
        state: what the last call returned; None starts a stream. It is not changed.
        theta, gamma, log_decay: as in `linear_attention`, one per key head under grouped queries.
        key_mask: `[B, T]` bool, True = real token.
        others: as in `linear_attention`. Give the same weights and feature map with every call.

    Returns:
        `[B, H, T, V]` in the dtype of q, and the state after these tokens.
    """
    gamma = as_numbers(gamma)
    check_number_or_tensor("theta", theta)
    q, k, v = _map(q, k, v, feature_map, key_mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a stream needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    groups = q.shape[1] // k.shape[1]
    for name, values in (("theta", theta), ("gamma", gamma)):
        sizes = sizes_of(values)
        if groups > 1 and sizes and sizes != [k.shape[1]]:
            raise ValueError(
                f"{name} must be one per key head [{k.shape[1]}] in a stream, got {sizes}"
            )
    if log_decay is not None:
        check_tensor("log_decay", log_decay)
    if groups > 1 and log_decay is not None and log_decay.shape[1] != k.shape[1]:
        raise ValueError(
            f"log_decay must be one per key head [B, {k.shape[1]}, T] in a stream, "
            f"got {list(log_decay.shape)}"
        )
    kind = kind_of(theta, raised=raised)
    alien = kind != "plain" and feature_map != "relu"  # `attention` could not go on with it
    horizon = None if alien or is_decaying(gamma, log_decay) else horizon_of(theta)
    if state is None:
        shape = (q.shape[0], k.shape[1], WEIGHTS[kind], k.shape[3])
        zeros = torch.zeros(*shape, v.shape[3], dtype=compute_dtype(q.dtype), device=q.device)
        key_sum = zeros[..., 0] if normaliser == "sum" else zeros[..., 0][..., :0]
        start = torch.zeros((), dtype=torch.int64, device=q.device)
        state = State(zeros, key_sum, start, horizon)
    check_state_shape(state, k, v)
    if state.weight != kind:
        raise ValueError(f"state was made for {state.weight} weights, theta and raised ask {kind}")
    if (state.key_sum.shape[-1] > 0) != (normaliser == "sum"):
        raise ValueError(f"state was made for another normaliser than {normaliser!r}")
    if (state.horizon is None) != (horizon is None) or (
        state.horizon is not None
        and horizon is not None
        and not same_horizon(state.horizon, horizon)
    ):
        raise ValueError(
            "state was made with another theta or feature map, or with a decay where there is none"
        )
    options = Options(
        feature_map, True, theta, gamma, log_decay, raised, normaliser, rule, eps, scale, key_mask
    )
    problem = _problem(q, k, options, state.position)
    out, sums = compute(*at_least(state, q, k, v), problem, join(state), impl=impl)
    assert sums is not None
    position = state.position + q.shape[2]
    return out.to(q.dtype), split(sums, position, state.horizon, divided=normaliser == "sum")


def _map(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Map, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Checked tensors; a feature map of the caller's is applied here, a named one in the sweep."""
    q, k, v = check_inputs(q, k, v)
    if isinstance(feature_map, str):
        return q, k, v
    if not callable(feature_map):
        raise TypeError(
            f"feature_map must be a name or a function, got {type(feature_map).__name__}"
        )
    check_key_mask(key_mask, k)
    if key_mask is not None:  # the slope of φ at NaN would be NaN
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    return check_inputs(feature_map(q), feature_map(k), v)


def _problem(q: Tensor, k: Tensor, given: Options, position: Tensor | None = None) -> Problem:
    """`position` is where a stream stands."""
    check_bool("raised", given.raised)
    check_choice("normaliser", given.normaliser, NORMALISERS)
    check_choice("rule", given.rule, SUM_RULES)
    check_scale(given.scale, given.normaliser)
    theta, gamma, raised = given.theta, given.gamma, given.raised
    name = given.feature_map if isinstance(given.feature_map, str) else "identity"
    chosen = given.rule if given.normaliser == "sum" else "none"

    if is_decaying(gamma, given.log_decay) and not given.causal:
        raise ValueError("gamma and log_decay need causal=True: a decay runs forward in time")

    def make() -> Problem:
        problem = build(
            q,
            k,
            causal=given.causal,
            theta=angles(theta, q, k),
            weight=kind_of(theta, raised=raised),
            feature_map=name,
            rule=chosen,
            eps=given.eps,
            scale=given.scale,
            cu_seqlens=given.cu_seqlens,
            query_start=given.query_start,
            position=position,
        )
        if not is_decaying(gamma, None):
            return problem
        return decaying_evenly(problem, log_rates(gamma, q, k))

    numbers = (given.causal, theta, gamma, raised, given.eps, given.scale, given.query_start)
    values = (*q.shape[1:3], *k.shape[1:3], *numbers, name, chosen, given.cu_seqlens, position)
    problem = remembered(values, q, make)
    if given.log_decay is not None:
        along = log_gates(given.log_decay, q, k)
        if problem.query_start != 0:
            raise ValueError(
                "log_decay needs query i where key i stands, query_start=0, "
                f"got {given.query_start}"
            )
        problem = decaying(problem, along)
    check_key_mask(given.key_mask, k)
    return problem if given.key_mask is None else problem._replace(key_mask=given.key_mask)
