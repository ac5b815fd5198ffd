"""The arguments horizon, theta, gamma and log_decay, checked and as tensors on q's device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cosformer.check import check_number, check_number_or_tensor, check_tensor, require_all
from cosformer.memo import Memo, Numbers
from cosformer.ops.problem.decay import GATE_RULE
from cosformer.ops.problem.heads import for_each_query_head, per_head_shapes
from cosformer.ops.problem.horizon import Horizon, check_horizon, check_length, vanishes
from cosformer.ops.problem.placement import Placement, longer, sequence_of
from cosformer.ops.problem.problem import WEIGHTS, Problem
from cosformer.runtime import mapped_over

Rates = float | Sequence[float] | Tensor
"""One number for all heads, or one for each."""


def check_weight(weight: str) -> str:
    """Refuse a `weight` that `attention` does not have."""
    names = [name for name in WEIGHTS if name != "plain"]
    if weight not in names:
        raise ValueError(f"weight must be one of {', '.join(names)}, got {weight!r}")
    return weight


def kind_within(horizon: Horizon | None, weight: str) -> str:
    """The kind of weights, a name of `WEIGHTS`, that `attention` is asked for."""
    if horizon is not None:
        check_number_or_tensor("horizon", horizon)
    if isinstance(horizon, Tensor) or horizon != math.inf:
        return check_weight(weight)
    if check_weight(weight) == "raised_cosine":
        raise ValueError("horizon must be finite with weight='raised_cosine', got inf")
    return "plain"


def kind_of(theta: float | Tensor, *, raised: bool) -> str:
    """The kind of weights, a name of `WEIGHTS`, that `linear_attention` is asked for."""
    if raised:
        return "raised_cosine"
    return "cosine" if isinstance(theta, Tensor) or theta else "plain"


def quarter_turn_over(x: float | Tensor) -> float | Tensor:
    """π/2 over a horizon is its θ, radians per position; over a θ, the horizon, maybe infinite."""
    if isinstance(x, Tensor):
        return (math.pi / 2) / x.double()
    return math.pi / (2 * x) if x else math.inf


def angle_of(horizon: Horizon, q: Tensor) -> Tensor:
    """θ as `[1, 1]` or, one per query head, `[H, 1]`."""
    theta = quarter_turn_over(horizon)
    if isinstance(theta, Tensor):
        return _per_head(theta, q)
    return torch.full((1, 1), theta, dtype=torch.float64, device=q.device)


def cosine_angle(
    q: Tensor,
    k: Tensor,
    horizon: Horizon | None,
    weight: str,
    given: Placement,
    decay: Rates | None = None,
) -> Tensor:
    """θ for a call without a state; refuses a length past the horizon, unless decays allow it."""
    queries, keys, start, packed = q.shape[2], k.shape[2], given.query_start, given.cu_seqlens
    if horizon is None and packed is not None:
        own = packed.diff()[sequence_of(packed, queries)]
        return (math.pi / 2) / own.to(torch.float64)[None]
    length: int | Tensor = longer(queries, keys)  # queries end with the keys, or begin with them
    if horizon is None:
        horizon = longer(longer(queries, keys), 1)
        if start is None:  # no length passes itself; a graph must put no condition on an open one
            return angle_of(horizon, q)
    else:
        horizon = check_horizon(horizon, q.shape[1], k.shape[1])
    if weight == "cosine" and not vanishes(decay, horizon):
        if packed is not None:
            length = packed.diff().max()
            unread = torch.compiler.is_compiling() or mapped_over(length)
            length = length if unread else int(length)
        elif start is not None:
            length = max(keys, start + queries) - min(start, 0)
        check_length(length, horizon)
    return angle_of(horizon, q)


def angles(theta: float | Tensor, q: Tensor, k: Tensor) -> Tensor:
    """θ of `linear_attention`, a number or a tensor, as `[1, 1]` or `[H, 1]`."""
    return _for_heads("theta", theta, q, k)


def as_numbers(rates: Rates, name: str = "gamma") -> Rates:
    """A sequence of numbers as a tuple, which can be compared with that of another call."""
    if isinstance(rates, Tensor):
        return rates
    if type(rates) is Numbers and not torch.compiler.is_compiling():
        return rates  # they were checked when they were made
    if not isinstance(rates, Sequence) or isinstance(rates, str | bytes):
        check_number(name, rates, "a number, a sequence of them or a tensor")
        return rates if torch.compiler.is_compiling() else float(rates)
    for n, rate in enumerate(rates):
        check_number(f"{name}[{n}]", rate)
    # tracers know no tuples of our own, and keep nothing
    return tuple(rates) if torch.compiler.is_compiling() else Numbers(map(float, rates))


def check_one_decay(decay: Rates, log_decay: Tensor | None) -> Rates:
    """The decay of `attention`, as numbers or a tensor; refuses one per head and one per token."""
    if log_decay is not None:
        raise ValueError("decay and log_decay must not both be given: name one of them")
    return as_numbers(decay, "decay")


def is_one(rates: Rates | None) -> bool:
    """Whether there is no decay: None, or numbers that are all 1. A tensor is not read."""
    if rates is None or isinstance(rates, Tensor):
        return rates is None
    return all(rate == 1 for rate in (rates if isinstance(rates, Sequence) else (rates,)))


LOGARITHMS: Memo[Tensor] = Memo()
"""What `log_rates` returned for numbers."""
KEPT: Memo[float | Tensor] = Memo()
"""What `as_kept` returned for numbers: the same tensor again is known to equal the state's."""


def as_kept(rates: Rates | None, name: str, k: Tensor) -> float | Tensor:
    """γ as a state of the key heads of k remembers it: a number, or `[H_kv]`."""
    like = k.new_empty(0, dtype=torch.float64)  # keys of any dtype share what is kept
    return KEPT.recall_for(like, (rates, k.shape[1]), lambda: _as_kept(rates, name, k))


def _as_kept(rates: Rates | None, name: str, k: Tensor) -> float | Tensor:
    if log_rates(rates, k, k, name) is None or rates is None:
        return 1.0
    if isinstance(rates, Sequence):
        return torch.tensor(rates, dtype=torch.float64, device=k.device)
    return rates.to(k.device, copy=True) if isinstance(rates, Tensor) else float(rates)


def sizes_of(values: Rates) -> list[int]:
    """`[]` for one number, `[H]` for one per head."""
    if isinstance(values, Sequence):
        return [len(values)]
    return list(values.shape) if isinstance(values, Tensor) else []


def log_rates(rates: Rates | None, q: Tensor, k: Tensor, name: str = "gamma") -> Tensor | None:
    """log γ, `[1, h, 1]`; None where γ is 1, by numbers."""
    rule = f"{name} must lie in (0, 1]"
    if isinstance(rates, Tensor):
        check_number_or_tensor(name, rates)
        require_all((rates > 0) & (rates <= 1), rule, rates)
        return _for_heads(name, rates, q, k).log()[None]
    if rates is None:
        return None
    numbers = rates if isinstance(rates, Sequence) else [rates]
    if not all(0 < rate <= 1 for rate in numbers):
        raise ValueError(f"{rule}, got {list(numbers) if numbers is rates else rates}")

    def logarithms() -> Tensor:
        values = (
            torch.tensor(rates, dtype=torch.float64, device="cpu")
            if numbers is rates
            else numbers[0]
        )
        return _for_heads(name, values, q, k).log()[None]  # which also checks how many there are

    like = q.new_empty(0, dtype=torch.float64)  # a CUDA graph must not copy numbers to its device
    found = LOGARITHMS.recall_for(like, (rates, q.shape[1], k.shape[1]), logarithms)
    return None if is_one(rates) else found


def decaying_evenly(
    problem: Problem, rates: Rates | None, q: Tensor, k: Tensor, name: str = "gamma"
) -> Problem:
    """The problem with a decay that is the same for all tokens."""
    log_decay = log_rates(rates, q, k, name)
    if rates is None or log_decay is None:
        return problem
    if not isinstance(rates, Tensor):
        least = min(rates) if isinstance(rates, Sequence) else rates
        problem = problem._replace(mild=least >= 0.5)
    if problem.is_aligned:
        total = log_decay.expand(-1, -1, problem.key_position.shape[1]).cumsum(-1)
        return problem._replace(query_decay=total, key_decay=total)
    # one number per head, so L is a line
    queries, keys = problem.query_position, problem.key_position
    at_queries, at_keys = (log_decay * (position[:, None] + 1) for position in (queries, keys))
    return problem._replace(query_decay=at_queries, key_decay=at_keys)


def check_gates(log_decay: Tensor, q: Tensor) -> None:
    """Refuse a decay per token that is no tensor of real numbers where q is."""
    check_tensor("log_decay", log_decay)
    if not log_decay.dtype.is_floating_point:
        raise ValueError(f"log_decay must be real, got {log_decay.dtype}")
    if log_decay.device != q.device:
        raise ValueError(
            f"log_decay must be on the device of q, {q.device}, got {log_decay.device}"
        )


def decaying_by_token(problem: Problem, log_decay: Tensor, q: Tensor, k: Tensor) -> Problem:
    """The problem with a decay per token, `[B, H, T]` or `[B, H_kv, T]`."""
    batch, heads, queries = q.shape[:3]
    check_gates(log_decay, q)
    if queries != k.shape[2]:
        raise ValueError(f"log_decay needs as many queries as keys, got {queries} and {k.shape[2]}")
    sizes = (batch, heads, queries), (batch, k.shape[1], queries)
    if log_decay.shape not in sizes:
        raise ValueError(
            f"log_decay must be [batch, heads, length] = {list(sizes[0])}, "
            f"got {list(log_decay.shape)}"
        )
    if not log_decay.is_cuda:  # a GPU asserts it where the gates are summed
        require_all(log_decay <= 0, GATE_RULE, log_decay)
    if problem.query_start != 0:
        raise ValueError(
            f"log_decay needs query i where key i stands, query_start=0, got {problem.query_start}"
        )
    return problem._replace(gates=for_each_query_head(log_decay, heads // log_decay.shape[1]))


def _per_head(values: Tensor, q: Tensor) -> Tensor:
    """One value per head, or per key head, as float64 `[H, 1]` for the heads of q."""
    values = values.to(device=q.device, dtype=torch.float64)
    return values.repeat_interleave(q.shape[1] // values.shape[0])[:, None]


def _for_heads(name: str, values: float | Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A number, or one per head of q or of k, as float64 `[1, 1]` or `[H, 1]` where q is."""
    if not isinstance(values, Tensor):  # filled in on the device, which a graph can capture
        return torch.full((1, 1), values, dtype=torch.float64, device=q.device)
    if values.dim() == 0:
        return values.to(device=q.device, dtype=torch.float64).reshape(1, 1)
    # `in` finds no symbol of a graph
    if values.dim() != 1 or not any(values.shape[0] == x.shape[1] for x in (q, k)):
        shapes = per_head_shapes(q.shape[1], k.shape[1])
        raise ValueError(
            f"{name} must be a number or one per head {shapes}, got {list(values.shape)}"
        )
    return _per_head(values, q)
