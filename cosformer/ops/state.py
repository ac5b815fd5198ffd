"""The memory of a stream, whose size does not grow with its length."""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from cosformer.check import check_bool, check_index, check_number, check_tensor, check_whole
from cosformer.ops.problem import (
    WEIGHTS,
    Horizon,
    Rates,
    as_kept,
    as_numbers,
    check_horizon,
    kind_within,
    same_numbers,
    total_gate,
    vanishes,
    written,
)
from cosformer.runtime import readable, renewed

KINDS = {states: name for name, states in WEIGHTS.items()}


class State(NamedTuple):
    """What a stream remembers: sums over all keys so far, in float32 or above.

    R is 2 for cosine weights (Σ cos θj k⁺v and Σ sin θj k⁺v), 3 for raised cosine (Σ k⁺v, and the
    two with 2θ), 1 for none. Under a decay each term has shrunk since its token, up to the last
    one. Two stretches of one sequence merge by `+`.
    """

    key_value: Tensor  # [B, H, R, D, V]
    key_sum: Tensor  # [B, H, R, D]; width 0 where nothing is divided
    position: Tensor  # [] or [B], int64: how many tokens came before
    horizon: Horizon | None  # a number or [H]; None for what only `linear_attention` goes on with
    decay: float | Tensor = 1.0  # γ, a number or [H]
    log_decay: float | Tensor = 0.0  # the sum of each token's own log γ, [B, H] float64; 0.0 where
    # tokens have none
    endless: bool = False  # whether γ makes weights vanish before the horizon, so it may be passed

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        key_width: int,
        value_width: int,
        *,
        horizon: Horizon,
        decay: Rates | None = None,
        per_token: bool = False,
        weight: str = "cosine",
        position: int | Tensor = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "State":
        """The state of a stream before its first token.

        `heads` is the number of key heads; `position` is the position of the first token.

        `horizon`, `decay` and `weight` are as in `attention_with_state`. A stream that is
        `per_token` takes a `log_decay` with every token, and no `decay`.

        >>> State.empty(1, 8, 64, 64, horizon=4096).key_value.shape
        torch.Size([1, 8, 2, 64, 64])
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype of a state must be float32 or float64, got {dtype}")
        least = {"batch": 0, "heads": 1, "key_width": 1, "value_width": 1}
        for name, size in zip(least, (batch, heads, key_width, value_width), strict=True):
            if not isinstance(size, torch.SymInt):
                check_whole(name, size, least[name])
        horizon = check_horizon(horizon, heads, heads)
        states = WEIGHTS[kind_within(horizon, weight)]
        check_bool("per_token", per_token)
        if per_token and decay is not None:
            raise ValueError("decay and per_token=True must not both be given: name one of them")
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
        key_value = torch.zeros(*shape, value_width, dtype=dtype, device=device)
        rates = None if decay is None else as_numbers(decay, "decay")
        return cls(
            key_value,
            torch.zeros(*shape, dtype=dtype, device=device),
            start.clone(),
            horizon.clone() if isinstance(horizon, Tensor) else horizon,
            as_kept(rates, "decay", key_value),
            no_tokens_yet(key_value) if per_token else 0.0,
            vanishes(rates, horizon),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a step changes in place."""
        sums = (self.key_value, self.key_sum, self.position)
        return (*sums, self.log_decay) if isinstance(self.log_decay, Tensor) else sums

    @property
    def per_token(self) -> bool:
        """Whether each token of the stream has a decay of its own."""
        return isinstance(self.log_decay, Tensor)

    @property
    def rate(self) -> Tensor | None:
        """γ as float64 `[1, H or 1]` where the sums are; None for the number 1."""
        device = self.key_value.device
        if isinstance(self.decay, Tensor):
            return self.decay.to(device, torch.float64).reshape(1, -1)
        if self.decay == 1:
            return None
        return torch.full((1, 1), self.decay, dtype=torch.float64, device=device)

    @property
    def weight(self) -> str:
        """The name of the weights this state was made for."""
        return KINDS[self.key_value.shape[2]]

    @property
    def is_limited(self) -> bool:
        """Whether the stream must end at its horizon."""
        return self.weight == "cosine" and not self.endless

    def __add__(self, other: object) -> "State":
        """Merge two stretches of one sequence, each summed from an empty state at its own position.

        Under a decay the stretch that ends first shrinks by what lies between its end and that of
        the other. Of a decay per token only that of tokens in the sums is known, so the later
        stretch must then start where the earlier one ends. The order of the operands is free.
        """
        if not isinstance(other, State):
            return NotImplemented
        for mine, theirs in (
            (self.key_value, other.key_value),
            (self.key_sum, other.key_sum),
        ):
            if mine.shape != theirs.shape:
                raise ValueError(
                    "states must have one shape to add, got "
                    f"{list(mine.shape)} and {list(theirs.shape)}"
                )
            if mine.device != theirs.device:
                raise ValueError(
                    f"states must be on one device to add, got {mine.device} and {theirs.device}"
                )
        if self.horizon is None or other.horizon is None:
            if self.horizon is not other.horizon or self.weight != "plain":
                raise ValueError(
                    "states with a cosine add if features are relu's, as in attention: "
                    "go on with the stream instead"
                )
        elif not same_numbers(self.horizon, other.horizon, "horizon"):
            raise ValueError(
                "states must have one horizon to add, "
                f"got {written(self.horizon)} and {written(other.horizon)}"
            )
        if not same_numbers(self.decay, other.decay, "decay"):
            raise ValueError(
                "states must have one decay to add, "
                f"got {written(self.decay)} and {written(other.decay)}"
            )
        if self.per_token != other.per_token:
            raise ValueError("states must both have a decay per token to add, or neither")
        one, another = self._shrunk(other), other._shrunk(self)
        return State(
            one.key_value + another.key_value,
            one.key_sum + another.key_sum,
            torch.maximum(self.position, other.position),
            self.horizon,
            self.decay,
            self.log_decay + other.log_decay,
            self.endless and other.endless,
        )

    def __mul__(self, other: object) -> NoReturn:  # a tuple would repeat its members
        raise TypeError("a State has no product: only states of one sequence add, by +")

    def __rmul__(self, other: object) -> NoReturn:
        self.__mul__(other)

    def _shrunk(self, other: "State") -> "State":
        """This state decayed up to the end of the other stretch, if that ends later."""
        rate, gates = self.rate, other.log_decay
        if rate is None and not isinstance(gates, Tensor):
            return self
        behind = (other.position - self.position).clamp(min=0).reshape(-1, 1)  # [b, 1]
        logarithm = torch.zeros_like(behind, dtype=torch.float64)
        if rate is not None:
            logarithm = logarithm + behind * rate.log()
        if isinstance(gates, Tensor):
            logarithm = logarithm + gates.where(behind > 0, 0)
        left = logarithm.exp().to(self.key_value.dtype)[..., None, None]  # [b, h, 1, 1]
        return self._replace(
            key_value=self.key_value * left[..., None], key_sum=self.key_sum * left
        )


def no_tokens_yet(sums: Tensor) -> Tensor:
    """The total decay per token of no tokens, `[B, H]`, for sums `[B, H, …]`."""
    return torch.zeros(sums.shape[:2], dtype=torch.float64, device=sums.device)


def join(state: State) -> Tensor:
    """Both sums of a state in one tensor `[B, H, R, D, V + 1]`, as implementations take them."""
    if not state.key_sum.shape[-1]:
        return state.key_value
    return torch.cat([state.key_value, state.key_sum[..., None]], -1)


def at_least(state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens raised to float64 where the state is: a state never loses precision."""
    if state.key_value.dtype == torch.float64:
        return q.double(), k.double(), v.double()
    return q, k, v


def split(sums: Tensor, state: State, tokens: int, log_decay: Tensor | None) -> State:
    """The inverse of `join`: `state` with new sums, after so many more tokens.

    `sums` is `[B, H, R, D, V(+1)]`; `log_decay` `[B, H, T]` is that of the new tokens.
    """
    if state.key_sum.shape[-1]:
        key_value, key_sum = sums[..., :-1], sums[..., -1]
    else:
        key_value, key_sum = sums, sums.new_empty(*sums.shape[:3], 0)
    total = state.log_decay
    if log_decay is not None:
        total = total + total_gate(log_decay, sums.dtype)
    position = state.position + tokens
    return renewed(state, key_value=key_value, key_sum=key_sum, position=position, log_decay=total)


def check_continues(
    state: State,
    k: Tensor,
    v: Tensor,
    horizon: Horizon | None,
    weight: str | None,
    decay: Rates | None = None,
) -> Horizon:
    """Refuse a state that does not fit these tokens or these arguments; return its horizon."""
    check_state_shape(state, k, k.shape[3], v.shape[3])
    if state.horizon is None or not state.key_sum.shape[-1]:
        raise ValueError(
            "state must come from attention: go on with linear_attention_with_state, "
            "under the weights and the feature map that it was made with"
        )
    if horizon is not None:
        named = check_horizon(horizon, k.shape[1], k.shape[1])
        if not same_numbers(named, state.horizon, "horizon"):
            raise ValueError(
                f"horizon must be the state's {written(state.horizon)}, got {written(horizon)}"
            )
    if weight is not None and kind_within(state.horizon, weight) != state.weight:
        raise ValueError(f"weight must be the state's {state.weight!r}, got {weight!r}")
    if decay is not None and state.per_token:
        raise ValueError(f"decay must be None: the state decays per token, got {decay}")
    if decay is not None and not same_numbers(state.decay, as_kept(decay, "decay", k), "decay"):
        raise ValueError(f"decay must be the state's {written(state.decay)}, got {written(decay)}")
    return state.horizon


def check_gates_go_on(state: State, log_decay: Tensor | None, k: Tensor) -> None:
    """Refuse a decay per token if the stream began without one, and the lack of it otherwise."""
    if log_decay is None:
        if state.per_token:
            raise ValueError("log_decay must be given: the stream began with a decay per token")
        return
    check_tensor("log_decay", log_decay)
    if not state.per_token:
        raise ValueError(
            "log_decay must be None: the stream began without a decay per token "
            "(State.empty(…, per_token=True) begins one with it)"
        )
    if log_decay.shape != k.shape[:3]:
        raise ValueError(
            f"log_decay must be one per key head [batch, key heads, length] = {list(k.shape[:3])} "
            f"in a stream, got {list(log_decay.shape)}"
        )


def check_state_shape(state: Any, k: Tensor, key_width: int, value_width: int) -> None:
    """Refuse a state of other widths than these, or of another batch, heads or device than k."""
    if not isinstance(state, State):
        raise TypeError(f"state must be a State, got {type(state).__name__}")
    shape = state.key_value.shape
    wanted = (k.shape[0], k.shape[1], shape[2], key_width, value_width)
    if shape != wanted:
        raise ValueError(
            f"state must hold [batch, key heads, {shape[2]}, key width, value width] = "
            f"{list(wanted)}, got {list(shape)}"
        )
    if state.key_value.device != k.device:
        raise ValueError(
            f"state must be on the device of k, {k.device}, got {state.key_value.device}"
        )
