"""The family that cosFormer belongs to: w(i, j) = γ^(i−j) · c(θ(i − j)) on any feature map."""

from collections.abc import Callable

import torch
from torch import Tensor

from cosformer.ops.build import build, check_placement, decaying
from cosformer.ops.check import (
    check_choice,
    check_inputs,
    check_key_mask,
    check_tensor,
)
from cosformer.ops.dispatch import compute
from cosformer.ops.memo import remembered
from cosformer.ops.normaliser import SUM_RULES
from cosformer.ops.problem import WEIGHTS, Problem, compute_dtype
from cosformer.ops.replay import replayed
from cosformer.ops.state import (
    State,
    at_least,
    check_state_shape,
    join,
    same_horizon,
    split,
)
from cosformer.ops.weights import (
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

NORMALISERS = ("sum", "none")

Map = str | Callable[[Tensor], Tensor]


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

    Returns:
        `[B, H, T, V]` in the dtype of q.
    """
    gamma = as_numbers(gamma)
    about = (feature_map, causal, theta, gamma, log_decay, raised, normaliser, rule, eps)
    return replayed(_linear_attention, q, k, v, *about, key_mask, cu_seqlens, query_start, impl)


def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Map,
    causal: bool,
    theta: float | Tensor,
    gamma: Rates,
    log_decay: Tensor | None,
    raised: bool,
    normaliser: str,
    rule: str,
    eps: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    query_start: int | None,
    impl: str,
) -> Tensor:
    q, k, v = _map(q, k, v, feature_map, key_mask)
    check_placement(q, k, causal=causal, cu_seqlens=cu_seqlens, query_start=query_start)
    problem = _problem(
        q,
        k,
        causal=causal,
        theta=theta,
        gamma=gamma,
        log_decay=log_decay,
        raised=raised,
        feature_map=feature_map,
        normaliser=normaliser,
        rule=rule,
        eps=eps,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        query_start=query_start,
    )
    return compute(q, k, v, problem, impl=impl)[0]


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
    q, k, v = _map(q, k, v, feature_map, key_mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a stream needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    groups = q.shape[1] // k.shape[1]
    for name, values in (("theta", theta), ("gamma", gamma)):
        sizes = sizes_of(values)
        if groups > 1 and sizes not in ([], [k.shape[1]]):
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
    problem = _problem(
        q,
        k,
        causal=True,
        theta=theta,
        gamma=gamma,
        log_decay=log_decay,
        raised=raised,
        feature_map=feature_map,
        normaliser=normaliser,
        rule=rule,
        eps=eps,
        key_mask=key_mask,
        position=state.position,
    )
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


def _problem(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    theta: float | Tensor,
    gamma: Rates,
    log_decay: Tensor | None,
    raised: bool,
    feature_map: Map,
    normaliser: str,
    rule: str,
    eps: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
    position: Tensor | None = None,
) -> Problem:
    check_choice("normaliser", normaliser, NORMALISERS)
    check_choice("rule", rule, SUM_RULES)
    name = feature_map if isinstance(feature_map, str) else "identity"
    chosen = rule if normaliser == "sum" else "none"

    if is_decaying(gamma, log_decay) and not causal:
        raise ValueError("gamma and log_decay need causal=True: a decay runs forward in time")

    def make() -> Problem:
        problem = build(
            q,
            k,
            causal=causal,
            theta=angles(theta, q, k),
            weight=kind_of(theta, raised=raised),
            feature_map=name,
            rule=chosen,
            eps=eps,
            cu_seqlens=cu_seqlens,
            query_start=query_start,
            position=position,
        )
        return decaying(problem, log_rates(gamma, q, k)) if is_decaying(gamma, None) else problem

    numbers = (causal, theta, gamma, raised, eps, query_start)
    values = (*q.shape[1:3], *k.shape[1:3], *numbers, name, chosen, cu_seqlens, position)
    problem = remembered(values, q, make)
    if log_decay is not None:
        gates = log_gates(log_decay, q, k)
        if problem.query_start != 0:
            raise ValueError(
                f"log_decay needs query i where key i stands, query_start=0, got {query_start}"
            )
        problem = decaying(problem, gates)
    check_key_mask(key_mask, k)
    return problem if key_mask is None else problem._replace(key_mask=key_mask)
