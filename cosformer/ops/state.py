"""The constant-size memory of a stream."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_index, check_number
from cosformer.ops.problem import WEIGHTS, Horizon, check_horizon, check_weight, same_horizon
from cosformer.runtime import readable

KINDS = {states: name for name, states in WEIGHTS.items()}


class State(NamedTuple):
    """What a stream remembers: sums over all keys so far, in float32 or above.

    R is 2 for cosine weights (Σ cos θj k⁺v and Σ sin θj k⁺v), 3 for raised cosine (Σ k⁺v, and the
    two with 2θ), 1 for none. Two stretches of one sequence merge by `+`.
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
            check_index("position", position)
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
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a step changes in place."""
        return self.key_value, self.key_sum, self.position

    @property
    def weight(self) -> str:
        """The name of the weights this state was made for."""
        return KINDS[self.key_value.shape[2]]

    def __add__(self, other: object) -> "State":
        """Merge two stretches of one sequence, each summed at its own positions."""
        if not isinstance(other, State):
            return NotImplemented
        if self.horizon is None or other.horizon is None:
            raise ValueError(
                "states add where weights do not decay and features are relu's, as in attention: "
                "go on with the stream instead"
            )
        for mine, theirs in (
            (self.key_value, other.key_value),
            (self.key_sum, other.key_sum),
        ):
            if mine.shape != theirs.shape:
                raise ValueError(
                    "states must have one shape to add, got "
                    f"{list(mine.shape)} and {list(theirs.shape)}"
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
