"""The horizon: the distance at which cosine weights reach zero.

No length may pass it, unless a decay has made every weight vanish before it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cosformer.check import check_number, check_number_or_tensor
from cosformer.ops.problem.heads import per_head_shapes
from cosformer.runtime import mapped_over, readable

Horizon = float | Tensor
"""One number, or one per head `[H]`."""


def read_horizon(
    horizon: float | Sequence[float] | Tensor | None, heads: int, key_heads: int
) -> Horizon | None:
    """The option of a module: None, a float, or a float64 tensor on the CPU, the module's own.

    It is part of how a module is made, like its width, and of no checkpoint: a cast of the module
    would round it.
    """
    if horizon is None:
        return None
    if isinstance(horizon, Sequence) and not isinstance(horizon, str):
        for n, number in enumerate(horizon):
            check_number(f"horizon[{n}]", number)
        horizon = torch.tensor(horizon, dtype=torch.float64, device="cpu")
    check_number_or_tensor("horizon", horizon)
    if isinstance(horizon, Tensor):
        horizon = horizon.to(dtype=torch.float64, device="cpu", copy=True)
    return check_horizon(horizon, heads, key_heads)


def check_horizon(horizon: Horizon, heads: int, key_heads: int) -> Horizon:
    """A positive number, or a tensor of them with one per head (or per key head)."""
    check_number_or_tensor("horizon", horizon)
    if mapped_over(horizon):
        raise ValueError("horizon cannot be mapped over by vmap: the host compares its values")
    if isinstance(horizon, Tensor) and horizon.requires_grad and torch.is_grad_enabled():
        raise ValueError("horizon must not require a gradient: none is computed for it")
    if torch.compiler.is_compiling() and isinstance(horizon, Tensor) and not horizon.dim():
        horizon = horizon.expand(key_heads)  # a graph cannot make a number of it
    if isinstance(horizon, Tensor) and horizon.dim():
        if horizon.dim() != 1 or horizon.shape[0] not in (heads, key_heads):
            raise ValueError(
                f"horizon must be a number or one per head {per_head_shapes(heads, key_heads)}, "
                f"got {list(horizon.shape)}"
            )
        if torch.compiler.is_compiling():
            torch._assert_async((horizon > 0).all(), "horizon must be above 0")
        elif readable(horizon) and not bool((horizon > 0).all()):
            raise ValueError(f"horizon must be above 0, got {horizon.tolist()}")
        return horizon
    number = float(horizon)
    if not number > 0:
        raise ValueError(f"horizon must be above 0, got {number:g}")
    return number


def whole_limit(horizon: Horizon) -> int:
    """The largest position a stream may reach."""
    return int(min(_least(horizon), 2.0**62))


def vanishing_decay(horizon: float) -> float:
    """The largest γ whose weights vanish before the horizon: γ^horizon is at most 2⁻²⁴.

    Beside a weight of 1 that is half a unit in the last place of float32, so keys beyond the
    horizon, where the cosine is negative, cannot be seen. It is 1 for an infinite horizon.
    """
    return float(2 ** (-24 / horizon))


def vanishes(decay: float | Sequence[float] | Tensor | None, horizon: Horizon) -> bool:
    """Whether decays let a sequence pass the horizon: each is at most `vanishing_decay`.

    Decays count by number only: a tensor may be learned, and a look at it would wait for a GPU.
    """
    if decay is None or isinstance(decay, Tensor):
        return False
    if isinstance(horizon, Tensor) and not readable(horizon):
        return False
    if isinstance(horizon, torch.SymInt):  # the length itself, which no length can pass
        return False
    most = max((0.0, *decay)) if isinstance(decay, Sequence) else decay
    return most <= vanishing_decay(_least(horizon))


def check_length(length: int | Tensor, horizon: Horizon, position: Tensor | None = None) -> None:
    """Refuse to go past the horizon, where cosine weights turn negative."""
    remedy = (
        "raise horizon, or use weight='raised_cosine', horizon=math.inf or a decay given as a "
        "number of at most 2^(-24/horizon)"
    )
    if torch.compiler.is_compiling() and any(
        isinstance(x, Tensor) for x in (length, horizon, position)
    ):
        end = length if position is None else length + position.max()
        limit = horizon.min() if isinstance(horizon, Tensor) else horizon
        torch._assert_async(torch.as_tensor(end <= limit), f"past the horizon: {remedy}")
        return
    for name, x in (("cu_seqlens", length), ("the position of a stream", position)):
        if mapped_over(x):
            raise ValueError(f"{name} cannot be mapped over by vmap where a horizon limits it")
    limit = _least(horizon)
    if position is None:
        if length > limit:
            raise ValueError(
                f"horizon must be at least the sequence length {length}, got {limit:.12g}: "
                f"{remedy} = {_shown(vanishing_decay(limit))}"
            )
        return
    if position.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(position.max() + length <= limit, f"past the horizon: {remedy}")
        return
    if position.is_meta:
        return
    start = int(position.max()) if position.numel() else 0
    if start + length > limit:
        raise ValueError(
            f"the stream stands at position {start}, {length} more would pass its horizon "
            f"{limit:.12g}: {remedy} = {_shown(vanishing_decay(limit))}"
        )


def _shown(decay: float) -> str:
    """A decay in six digits, rounded down, so that typing the digits gives no larger decay."""
    return f"{math.floor(1e6 * decay) / 1e6:g}"


def _least(horizon: Horizon) -> float:
    return float(horizon.min()) if isinstance(horizon, Tensor) else horizon


def written(numbers: float | Sequence[float] | Tensor) -> object:
    """Numbers as an error names them: a tensor's own print has 4 digits and hides differences."""
    return numbers.tolist() if isinstance(numbers, Tensor) and readable(numbers) else numbers


def same_numbers(one: float | Tensor, other: float | Tensor, name: str) -> bool:
    """Whether numbers, one or one per head, are equal; `name` is for the device's error."""
    if one is other:
        return True
    if not isinstance(one, Tensor):
        if isinstance(other, Tensor):
            return same_numbers(other, one, name)
        return math.isclose(one, other, rel_tol=1e-12)
    other = torch.as_tensor(other, dtype=torch.float64, device=one.device)
    if other.dim() and one.shape != other.shape:
        return False
    same = (one == other).all()
    if readable(same):
        return bool(same)
    torch._assert_async(same, f"{name} must be the state's")
    return True
