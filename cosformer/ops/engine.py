"""The family that cosFormer belongs to: w(i, j) = γ^(i−j) · c(θ(i − j)) on any feature map."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cosformer.ops.build import build, check_placement, decaying, per_head
from cosformer.ops.check import (
    check_choice,
    check_inputs,
    check_key_mask,
    check_number,
    check_number_or_tensor,
    check_tensor,
    readable,
)
from cosformer.ops.dispatch import compute
from cosformer.ops.memo import Numbers, remembered
from cosformer.ops.normaliser import SUM_RULES
from cosformer.ops.problem import WEIGHTS, Problem, compute_dtype
from cosformer.ops.state import (
    Horizon,
    State,
    at_least,
    check_state_shape,
    join,
    same_horizon,
    split,
)

NORMALISERS = ("sum", "none")

Map = str | Callable[[Tensor], Tensor]
Rates = float | Sequence[float] | Tensor


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
    | retention          | `gamma=[1 - 2 ** (-5 - h) …], normaliser="none"`             |
    | gated linear       | `log_decay=logsigmoid(gate), normaliser="none"`              |

    Args:
        q, k, v: as in `attention`.
        feature_map: a name (identity, relu, leaky_relu, 1+elu, elu, silu), which costs no memory,
            or a function of q and of k, which may change their width.
        theta: radians per position, a number or one per head `[H]`. No horizon is enforced here.
        gamma: what is left of a weight one position on, in (0, 1], a number or one per head `[H]`;
            causal only. Numbers are looked at once; a tensor costs more with every call.
        log_decay: g_t ≤ 0 per token, `[B, H, T]`, in S_t = exp(g_t) S_{t−1} + φ(k_t) v_tᵀ.
            A GPU is not waited for to check it.
        raised: c(x) = (1 + cos 2x)/2 instead of cos x.
        normaliser: `sum` divides by D_i = Σ_j s(i, j); `none` does not divide.
        eps, key_mask, cu_seqlens, query_start, impl: as in `attention`.
        rule: D_i is max(Σ, eps) (`clamp`), Σ + eps (`add`) or Σ kept ±eps from zero (`signed`).

    Returns:
        `[B, H, T, V]` in the dtype of q.
    """
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
    q, k, v = _map(q, k, v, feature_map, key_mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a stream needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    groups = q.shape[1] // k.shape[1]
    for name, values in (("theta", theta), ("gamma", gamma)):
        sizes = _sizes(values)
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
    kind = _kind(theta, raised=raised)
    alien = kind != "plain" and feature_map != "relu"  # `attention` could not go on with it
    horizon = None if alien or _decays(gamma, log_decay) else _horizon_of(theta)
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

    if _decays(gamma, log_decay) and not causal:
        raise ValueError("gamma and log_decay need causal=True: a decay runs forward in time")

    def make() -> Problem:
        problem = build(
            q,
            k,
            causal=causal,
            theta=_angle(theta, q, k),
            weight=_kind(theta, raised=raised),
            feature_map=name,
            rule=chosen,
            eps=eps,
            cu_seqlens=cu_seqlens,
            query_start=query_start,
            position=position,
        )
        return decaying(problem, _log_rates(gamma, q, k)) if _decays(gamma, None) else problem

    if isinstance(gamma, Sequence):
        for n, rate in enumerate(gamma):
            check_number(f"gamma[{n}]", rate)
        gamma = Numbers(map(float, gamma))
    numbers = (causal, theta, gamma, raised, eps, query_start)
    values = (*q.shape[1:3], k.shape[2], *numbers, name, chosen, cu_seqlens, position)
    problem = remembered(values, q, make)
    if log_decay is not None:
        problem = decaying(problem, _gates(log_decay, q, k))
    check_key_mask(key_mask, k)
    return problem if key_mask is None else problem._replace(key_mask=key_mask)


def _kind(theta: float | Tensor, *, raised: bool) -> str:
    if raised:
        return "raised_cosine"
    return "cosine" if isinstance(theta, Tensor) or theta else "plain"


def _horizon_of(theta: float | Tensor) -> Horizon:
    if isinstance(theta, Tensor):
        return (math.pi / 2) / theta.double()
    return math.pi / (2 * theta) if theta else math.inf


def _angle(theta: float | Tensor, q: Tensor, k: Tensor) -> Tensor:
    check_number_or_tensor("theta", theta)
    if isinstance(theta, Tensor) and _is_at_hand(theta) and not bool(theta.isfinite().all()):
        raise ValueError(f"theta must be finite, got {theta.tolist()}")
    if isinstance(theta, Tensor) and theta.requires_grad and torch.is_grad_enabled():
        raise ValueError("theta must not require a gradient: none is computed for it")
    if not isinstance(theta, Tensor) and not math.isfinite(theta):
        raise ValueError(f"theta must be finite, got {theta}")
    return _for_heads("theta", theta, q, k)


def _decays(gamma: Rates, log_decay: Tensor | None) -> bool:
    return log_decay is not None or isinstance(gamma, Tensor) or gamma != 1


def _sizes(values: Rates) -> list[int]:
    if isinstance(values, Sequence):
        return [len(values)]
    return list(values.shape) if isinstance(values, Tensor) else []


def _log_rates(gamma: Rates, q: Tensor, k: Tensor) -> Tensor:
    """log γ, `[1, h, T]`, or `[1, h, 1]` where T ≠ S."""
    if isinstance(gamma, Sequence):
        gamma = torch.tensor(gamma, dtype=torch.float64)
    check_number_or_tensor("gamma", gamma)
    if isinstance(gamma, Tensor):
        is_wrong = _is_at_hand(gamma) and not bool(((gamma > 0) & (gamma <= 1)).all())
    else:
        is_wrong = not 0 < gamma <= 1
    if is_wrong:
        raise ValueError(f"gamma must lie in (0, 1], got {gamma}")
    rates = _for_heads("gamma", gamma, q, k).log()[None]
    return rates.expand(-1, -1, q.shape[2]) if q.shape[2] == k.shape[2] else rates


def _gates(log_decay: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The decay of every token `[B, H, T]` in float64."""
    batch, heads, queries = q.shape[:3]
    check_tensor("log_decay", log_decay)
    if not log_decay.dtype.is_floating_point:
        raise ValueError(f"log_decay must be real, got {log_decay.dtype}")
    if log_decay.device != q.device:
        raise ValueError(
            f"log_decay must be on the device of q, {q.device}, got {log_decay.device}"
        )
    if queries != k.shape[2]:
        raise ValueError(f"log_decay needs as many queries as keys, got {queries} and {k.shape[2]}")
    sizes = (batch, heads, queries), (batch, k.shape[1], queries)
    if log_decay.shape not in sizes:
        raise ValueError(
            f"log_decay must be [batch, heads, length] = {list(sizes[0])}, "
            f"got {list(log_decay.shape)}"
        )
    if _is_at_hand(log_decay) and not bool((log_decay <= 0).all()):
        worst = log_decay.detach().max()
        raise ValueError(f"log_decay must be at most 0, got {float(worst):g}")
    groups = heads // log_decay.shape[1]
    # exp(−800) is 0 even in float64; a larger number would swallow the differences after it.
    gates = log_decay.double().clamp(min=-800)
    return gates if groups == 1 else gates.repeat_interleave(groups, 1)


def _is_at_hand(x: Tensor) -> bool:
    """Whether a check may look at the values without waiting for a GPU."""
    return not x.is_cuda and readable(x)


def _for_heads(name: str, values: float | Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A number, or one per head of q or of k, as float64 `[1, 1]` or `[H, 1]` where q is."""
    if not isinstance(values, Tensor):  # filled in on the device, which a graph can capture
        return torch.full((1, 1), values, dtype=torch.float64, device=q.device)
    if values.dim() == 0:
        return values.to(device=q.device, dtype=torch.float64).reshape(1, 1)
    if values.dim() != 1 or values.shape[0] not in (q.shape[1], k.shape[1]):
        raise ValueError(
            f"{name} must be a number or one per head [{q.shape[1]}], got {list(values.shape)}"
        )
    return per_head(values, q)
