"""The family that cosFormer belongs to: w(i, j) = γ^|i−j| · c(θ(i − j)) on any feature map."""

import math
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
    require_all,
)
from cosformer.ops.again import attend_again
from cosformer.ops.dispatch import compute, kept_problem, placed, with_tensors
from cosformer.ops.problem import (
    DENOMINATORS,
    WEIGHTS,
    Horizon,
    Placement,
    Problem,
    Rates,
    angles,
    as_kept,
    as_numbers,
    build,
    decaying_evenly,
    is_one,
    kind_of,
    quarter_turn_over,
    same_numbers,
    sizes_of,
    written,
    zero_masked,
)
from cosformer.ops.state import (
    State,
    at_least,
    check_gates_go_on,
    check_state_shape,
    join,
    no_tokens_yet,
    split,
)
from cosformer.runtime import compute_dtype

NORMALISERS = ("sum", "none")

Map = str | Callable[[Tensor], Tensor]


class Arguments(NamedTuple):
    """The arguments of `linear_attention` but q, k and v; its docstring explains each."""

    feature_map: Map = "identity"
    causal: bool = False
    theta: float | Tensor = 0.0
    gamma: Rates = 1.0
    log_decay: Tensor | None = None
    raised: bool = False
    normaliser: str = "sum"
    rule: str = "clamp"
    eps: float = 1e-6
    scale: float = 1.0
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    query_start: int | None = None
    impl: str = "auto"


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

        s(i, j) = φ(q_i) · φ(k_j) · γ^|i−j| · c(θ(i − j))        out_i = Σ_j s(i, j) v_j / D_i

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
            or a function of q and of k, which may change their width. leaky_relu is max(x, x/10).
        theta: radians per position, a number or one per head `[H]`. No horizon is enforced here.
        gamma: `decay` of `attention`: what is left of a weight one position on, in (0, 1], a number
            or one per head `[H]`. Numbers are looked at once; a tensor costs more with every call.
        log_decay: that of `attention`, g_t ≤ 0 per token, `[B, H, T]`: if causal, it is that of
            S_t = exp(g_t) S_{t−1} + φ(k_t) v_tᵀ. With `gamma` beside it the two multiply.
        raised: c(x) = (1 + cos 2x)/2 instead of cos x, with the rule `clamp` or no division.
        normaliser: `sum` divides by D_i = Σ_j s(i, j); `none` does not divide.
        eps, key_mask, cu_seqlens, query_start, impl: as in `attention`.
        rule: D_i is max(Σ, eps) (`clamp`), Σ + eps (`add`) or Σ kept ±eps from zero (`signed`).
        scale: a positive factor of the output, like 1/√d; states are without it. Under `sum` it
            would cancel, and must be 1.

    Returns:
        `[B, H, T, V]` in the dtype of q.
    """
    given = Arguments(
        feature_map, causal, theta, as_numbers(gamma), log_decay, raised, normaliser, rule, eps,
        scale, key_mask, cu_seqlens, query_start, impl,
    )  # fmt: skip
    if isinstance(q, Tensor) and q.is_cuda:
        return attend_again(_linear_attention, linear_problem, q, k, v, given)
    return _linear_attention(q, k, v, given)


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, given: Arguments) -> Tensor:
    q, k, v, given = mapped(q, k, v, given)
    return compute(q, k, v, linear_problem(q, k, given), impl=given.impl)[0]


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
    given = Arguments(
        feature_map, True, theta, gamma, log_decay, raised, normaliser, rule, eps, scale, key_mask,
        impl=impl,
    )  # fmt: skip
    q, k, v, given = mapped(q, k, v, given)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a stream needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    check_arguments(given)
    check_per_key_head(q, k, theta=theta, gamma=gamma)
    if state is None:
        states = WEIGHTS[kind_of(theta, raised=raised)]
        shape = (q.shape[0], k.shape[1], states, k.shape[3])
        zeros = torch.zeros(*shape, v.shape[3], dtype=compute_dtype(q.dtype), device=q.device)
        key_sum = zeros.new_zeros(*shape[:3], k.shape[3] if normaliser == "sum" else 0)
        start = torch.zeros((), dtype=torch.int64, device=q.device)
        kept = as_kept(gamma, "gamma", k)
        total = 0.0 if log_decay is None else no_tokens_yet(zeros)
        state = State(zeros, key_sum, start, _state_horizon(given), kept, total)
    check_goes_on(state, k, v, given)
    return go_on(q, k, v, state, given)


def go_on(q: Tensor, k: Tensor, v: Tensor, state: State, given: Arguments) -> tuple[Tensor, State]:
    """The next tokens of a stream and its state after them, for callers that have checked both.

    The weights and the decay of `given` are those of the state.
    """
    dtype = q.dtype
    q, k, v = at_least(state, q, k, v)
    problem = stream_problem(q, k, given, state.position)
    out, sums = compute(q, k, v, problem, join(state), impl=given.impl)
    assert sums is not None
    return out.to(dtype), split(sums, state, q.shape[2], given.log_decay)


def check_goes_on(state: State, k: Tensor, v: Tensor, given: Arguments) -> None:
    """Refuse a state that does not fit these tokens or was made with other arguments."""
    check_state_shape(state, k, k.shape[3], v.shape[3])
    kind, horizon = kind_of(given.theta, raised=given.raised), _state_horizon(given)
    if state.weight != kind:
        raise ValueError(f"state was made for {state.weight} weights, theta and raised ask {kind}")
    if (state.key_sum.shape[-1] > 0) != (given.normaliser == "sum"):
        raise ValueError(f"state was made for another normaliser than {given.normaliser!r}")
    if state.horizon is None or horizon is None:
        same = state.horizon is horizon
    else:
        same = same_numbers(state.horizon, horizon, "horizon")
    if not same:
        raise ValueError("state was made with another theta or feature map")
    kept = as_kept(given.gamma, "gamma", k)
    if not same_numbers(state.decay, kept, "gamma"):
        raise ValueError(
            f"gamma must be the state's {written(state.decay)}, got {written(given.gamma)}"
        )
    check_gates_go_on(state, given.log_decay, k)


def _state_horizon(given: Arguments) -> Horizon | None:
    """The horizon that a state remembers; None, as `attention` refuses it, unless φ is relu."""
    return quarter_turn_over(given.theta) if given.feature_map == "relu" else None


def check_arguments(given: Arguments) -> None:
    """Refuse names and numbers that are wrong whatever the tensors are."""
    theta = given.theta
    check_number_or_tensor("theta", theta)
    if isinstance(theta, Tensor):
        require_all(theta.isfinite(), "theta must be finite", theta)
        if theta.requires_grad and torch.is_grad_enabled():
            raise ValueError("theta must not require a gradient: none is computed for it")
    elif not abs(theta) < math.inf:
        raise ValueError(f"theta must be finite, got {theta}")
    check_bool("raised", given.raised)
    check_choice("normaliser", given.normaliser, NORMALISERS)
    check_choice("rule", given.rule, DENOMINATORS)
    check_scale(given.scale, given.normaliser)
    if given.raised and given.normaliser == "sum" and given.rule != "clamp":
        raise ValueError(f"raised=True needs rule='clamp' or normaliser='none', got {given.rule!r}")


def check_per_key_head(q: Tensor, k: Tensor, **given: Rates | None) -> None:
    """Refuse numbers per query head where query heads share a state, and so its weights."""
    if q.shape[1] == k.shape[1]:
        return
    for name, values in given.items():
        sizes = [] if values is None else sizes_of(values)
        if sizes and sizes != [k.shape[1]]:
            raise ValueError(
                f"{name} must be one per key head [{k.shape[1]}], whose queries share a state, "
                f"got {sizes}"
            )


def mapped(
    q: Tensor, k: Tensor, v: Tensor, given: Arguments
) -> tuple[Tensor, Tensor, Tensor, Arguments]:
    """Checked tensors, and the arguments that remain.

    A feature map that is a function has been applied, and `identity` remains. One that has a name
    is applied later, by the implementation.
    """
    q, k, v = check_inputs(q, k, v)
    check_key_mask(given.key_mask, k)
    phi = given.feature_map
    if isinstance(phi, str):
        return q, k, v, given
    if not callable(phi):
        raise TypeError(f"feature_map must be a name or a function, got {type(phi).__name__}")
    k = zero_masked(k, given.key_mask)  # the slope of φ at NaN would be NaN
    features = phi(q), phi(k)
    for x, found in zip((q, k), features, strict=True):
        rows = list(x.shape[:3])
        if not isinstance(found, Tensor) or list(found.shape[:-1]) != rows:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"feature_map must return a tensor {[*rows, 'width']}, got {shape}")
    return *check_inputs(*features, v), given._replace(feature_map="identity")


def linear_problem(q: Tensor, k: Tensor, given: Arguments) -> Problem:
    """The checked problem of a call without a state."""

    def make() -> Problem:
        check_arguments(given)
        placement = Placement(given.causal, given.query_start, given.cu_seqlens)
        decays = given.log_decay is not None or not is_one(given.gamma)
        names = "gamma and log_decay" if decays else ""
        problem = placed(
            q, k, placement, lambda: angles(given.theta, q, k), decays=names, **_about(given)
        )
        return decaying_evenly(problem, given.gamma, q, k)

    return kept_problem(q, k, given, make)


def stream_problem(q: Tensor, k: Tensor, given: Arguments, position: Tensor) -> Problem:
    """The problem after `position` tokens of a stream, for callers that have checked `given`."""
    placement = Placement(given.causal, stream_position=position)
    problem = build(q, k, placement, angles(given.theta, q, k), **_about(given))
    return with_tensors(decaying_evenly(problem, given.gamma, q, k), q, k, given)


def _about(given: Arguments) -> dict[str, Any]:
    """The members of a problem that are numbers and names."""
    return {
        "weight": kind_of(given.theta, raised=given.raised),
        "feature_map": given.feature_map,
        "rule": given.rule if given.normaliser == "sum" else "none",
        "eps": given.eps,
        "scale": given.scale,
    }
