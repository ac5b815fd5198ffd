"""The constant-size memory of a stream."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_number, check_number_or_tensor, check_place
from cosformer.ops.problem.problem import WEIGHTS
from cosformer.runtime import readable

Horizon = float | Tensor


class State(NamedTuple):
    """What a stream remembers: sums over all keys so far, in float32 or above.

    R is 2 for cosine weights (Σ cos θj k⁺v and Σ sin θj k⁺v), 3 for raised cosine, 1 for none.
    Two stretches of one sequence merge by `+`.
    """

    key_value: Tensor  # [B, H, R, D, V]
    key_sum: Tensor  # [B, H, R, D]; width 0 where nothing is divided
    position: Tensor  # [] or [B], int64: how many tokens came before
    horizon: Horizon | None  # a number or [H]; None for what only `linear_attention` goes on with

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        key_width: int,
        value_width: int,
        *,
        horizon: Horizon,
        weight: str = "cosine",
        position: int | Tensor = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "State":
        """Nothing seen yet. `heads` counts key heads; `position` is where the stream starts.

        >>> State.empty(1, 8, 64, 64, horizon=4096).key_value.shape
        torch.Size([1, 8, 2, 64, 64])
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype of a state must be float32 or float64, got {dtype}")
        sizes = {"batch": (batch, 0), "heads": (heads, 1)}
        sizes |= {"key_width": (key_width, 1), "value_width": (value_width, 1)}
        for name, (size, least) in sizes.items():
            if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
                raise TypeError(f"{name} must be an int, got {type(size).__name__}")
            if size < least:
                raise ValueError(f"{name} must be at least {least}, got {size}")
        horizon = check_horizon(horizon, heads, heads)
        states = WEIGHTS[check_weight(weight)]
        if not isinstance(position, Tensor):
            check_number("position", position, "a whole number or a tensor")
            check_place("position", position)
        start = torch.as_tensor(position, device=device)
        if start.is_floating_point() or start.is_complex() or start.dtype == torch.bool:
            raise TypeError(f"position must be whole, got {position}")
        start = start.to(torch.int64)
        if readable(start) and bool((start < 0).any()):
            raise ValueError(f"position must not be negative, got {start.tolist()}")
        if start.dim() > 1 or (start.dim() == 1 and start.shape[0] != batch):
            raise ValueError(
                f"position must be one number or one per stream [{batch}], got {list(start.shape)}"
            )
        shape = (batch, heads, states, key_width)
        return cls(
            torch.zeros(*shape, value_width, dtype=dtype, device=device),
            torch.zeros(*shape, dtype=dtype, device=device),
            start.clone(),
            horizon.clone() if isinstance(horizon, Tensor) else horizon,
        )

    @property
    def weight(self) -> str:
        """The name of the weights this state was made for."""
        return next(name for name, states in WEIGHTS.items() if states == self.key_value.shape[2])

    def __add__(self, other: object) -> "State":
        """Merge two stretches of one sequence, each summed at its own positions."""
        if not isinstance(other, State):
            return NotImplemented
        if self.horizon is None or other.horizon is None:
            raise ValueError(
                "states add where weights do not decay and features are relu's, as in attention: "
                "go on with the stream instead"
            )
        if self.key_value.shape != other.key_value.shape:
            raise ValueError(
                "states must have one shape to add, got "
                f"{list(self.key_value.shape)} and {list(other.key_value.shape)}"
            )
        if not same_horizon(self.horizon, other.horizon):
            raise ValueError(
                f"states must have one horizon to add, got {self.horizon} and {other.horizon}"
            )
        return State(
            self.key_value + other.key_value,
            self.key_sum + other.key_sum,
            torch.maximum(self.position, other.position),
            self.horizon,
        )


def join(state: State) -> Tensor:
    """Both sums as one `[B, H, R, D, V + 1]`, as the implementations take them."""
    if not state.key_sum.shape[-1]:
        return state.key_value
    return torch.cat([state.key_value, state.key_sum[..., None]], -1)


def at_least(state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens raised to float64 where the state is: a state never loses precision."""
    if state.key_value.dtype == torch.float64:
        return q.double(), k.double(), v.double()
    return q, k, v


def split(sums: Tensor, position: Tensor, horizon: Horizon | None, *, divided: bool) -> State:
    """The inverse of `join`."""
    if not divided:
        return State(sums, sums.new_empty(*sums.shape[:3], 0), position, horizon)
    return State(sums[..., :-1], sums[..., -1], position, horizon)


def check_weight(weight: str) -> str:
    names = [name for name in WEIGHTS if name != "plain"]
    if weight not in names:
        raise ValueError(f"weight must be one of {', '.join(names)}, got {weight!r}")
    return weight


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
    if isinstance(horizon, Tensor) and horizon.requires_grad and torch.is_grad_enabled():
        raise ValueError("horizon must not require a gradient: none is computed for it")
    if isinstance(horizon, Tensor) and horizon.dim():
        if horizon.dim() != 1 or horizon.shape[0] not in (heads, key_heads):
            sizes = " or ".join(f"[{size}]" for size in sorted({heads, key_heads}))
            raise ValueError(
                f"horizon must be a number or one per head {sizes}, got {list(horizon.shape)}"
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
    least = float(horizon.min()) if isinstance(horizon, Tensor) else horizon
    return int(min(least, 2.0**62))


class PastHorizonError(ValueError):
    """Tokens beyond the distance at which cosine weights turn negative."""


def check_length(length: int | Tensor, horizon: Horizon, position: Tensor | None = None) -> None:
    """Refuse to go past the horizon, where cosine weights turn negative."""
    remedy = "raise horizon, or use weight='raised_cosine' for an endless stream"
    if torch.compiler.is_compiling() and any(
        isinstance(x, Tensor) for x in (length, horizon, position)
    ):
        end = length if position is None else length + position.max()
        limit = horizon.min() if isinstance(horizon, Tensor) else horizon
        torch._assert_async(torch.as_tensor(end <= limit), f"past the horizon: {remedy}")
        return
    limit = float(horizon.min()) if isinstance(horizon, Tensor) else horizon
    if position is None:
        if length > limit:
            raise PastHorizonError(
                f"horizon must be at least the sequence length {length}, got {limit:g}: {remedy}"
            )
        return
    if position.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(position.max() + length <= limit, f"past the horizon: {remedy}")
        return
    if position.is_meta:
        return
    start = int(position.max()) if position.numel() else 0
    if start + length > limit:
        raise PastHorizonError(
            f"the stream stands at position {start}, {length} more would pass its horizon "
            f"{limit:g}: {remedy}"
        )


def check_continues(
    state: State, k: Tensor, v: Tensor, horizon: Horizon | None, weight: str | None
) -> Horizon:
    """A state that fits these tokens, under the horizon and weight it was made for; its horizon."""
    check_state_shape(state, k, v)
    if state.horizon is None or state.weight == "plain" or not state.key_sum.shape[-1]:
        raise ValueError(
            "state must come from attention: go on with linear_attention_with_state, "
            "under the weights and the feature map that it was made with"
        )
    if horizon is not None:
        named = check_horizon(horizon, k.shape[1], k.shape[1])
        if not same_horizon(named, state.horizon):
            raise ValueError(f"horizon must be the state's {state.horizon}, got {horizon}")
    if weight is not None and check_weight(weight) != state.weight:
        raise ValueError(f"weight must be the state's {state.weight!r}, got {weight!r}")
    return state.horizon


def check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(f"state must be a State, got {type(state).__name__}")


def check_state_shape(state: State, k: Tensor, v: Tensor) -> None:
    """A state for these keys and values `[B, H_kv, S, ·]`."""
    check_state(state)
    shape = state.key_value.shape
    wanted = (k.shape[0], k.shape[1], shape[2], k.shape[3], v.shape[3])
    if shape != wanted:
        raise ValueError(
            f"state must hold [batch, key heads, {shape[2]}, key width, value width] = "
            f"{list(wanted)}, got {list(shape)}"
        )
    if state.key_value.device != k.device:
        raise ValueError(
            f"state must be on the device of k, {k.device}, got {state.key_value.device}"
        )


def same_horizon(one: Horizon, other: Horizon) -> bool:
    """Whether they are equal; where the host may not look, the device asserts it."""
    if one is other:
        return True
    if not isinstance(one, Tensor):
        if isinstance(other, Tensor):
            return same_horizon(other, one)
        return math.isclose(one, other, rel_tol=1e-12)
    other = torch.as_tensor(other, dtype=torch.float64, device=one.device)
    if one.shape != other.shape:
        return False
    same = (one == other).all()
    if readable(same):
        return bool(same)
    torch._assert_async(same, "horizon must be the state's")
    return True
