"""The delta rule: a memory in which a key's new value replaces its old one."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_choice, check_positive
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.linear.decay import FORGETFUL, log_gate
from cosformer.mechanisms.linear.delta_launch import delta
from cosformer.mechanisms.linear.delta_rule import CHUNK_LENGTH, units
from cosformer.mechanisms.request import NO_CONTROLS, Controls, Request, unit_values
from cosformer.mechanisms.traits import Cost
from cosformer.runtime import compute_dtype, full_precision, renewed

FEATURES = ("identity", "relu")


class Memory(NamedTuple):
    """The state of a stream: the value that it holds for every direction of keys."""

    value: Tensor  # [B, H_kv, D, V], float32 or above
    owner: str  # the class of the mechanism


class Delta(Mechanism):
    """The delta rule: what the memory holds for a key moves towards the key's new value."""

    traits = replace(FORGETFUL, controls=("beta",))
    state_type = Memory
    source = "Schlag et al., ICML 2021; Yang et al., NeurIPS 2024"
    formula = (
        "S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, out_t = S_tᵀ q_t/√d; "
        "q and k of norm 1, β = sigmoid(beta)"
    )

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, features: str = "identity"
    ) -> None:
        """`features`: what q and k are mapped by before they get norm 1, `identity` or `relu`. With
        `relu`, cosFormer's own map, no two keys are opposed."""
        super().__init__(heads, width, key_heads=key_heads)
        self.features = check_choice("features", features, FEATURES)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        return self.advance(q, k, v, self.empty_state(k, v), request)[0]

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        return self.attend(q, k, unit_values(k), request)

    def empty_state(self, k: Tensor, v: Tensor) -> Memory:
        shape = (k.shape[0], k.shape[1], k.shape[3], v.shape[3])
        zeros = torch.zeros(shape, dtype=compute_dtype(k.dtype), device=k.device)
        return Memory(zeros, self.owner)

    def check_state(self, state: Any, k: Tensor, v: Tensor) -> None:
        super().check_state(state, k, v)
        wanted = (k.shape[0], k.shape[1], k.shape[3], v.shape[3])
        if state.value.shape != wanted:
            raise ValueError(f"state must hold {list(wanted)}, got {list(state.value.shape)}")

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, Memory]:
        dtype = compute_dtype(torch.promote_types(q.dtype, state.value.dtype))
        out, memory = delta(
            *self._mapped(q, k), v, *self._given(request, dtype), state.value.to(dtype)
        )
        return out, renewed(state, value=memory)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, controls: Controls = NO_CONTROLS
    ) -> tuple[Tensor, Memory]:
        """S ← e^g S + β k (v − (e^g S)ᵀk)ᵀ, out = Sᵀq."""
        dtype = compute_dtype(torch.promote_types(q.dtype, state.value.dtype))
        with full_precision(q):
            beta, log_decay = self._given(Request(True, None, 0, controls), dtype)
            queries, keys = units(*self._mapped(q, k), dtype)  # [B, H, 1, D], [B, H_kv, 1, D]
            memory = state.value.to(dtype).mul_(log_decay[..., None].exp())
            missing = beta[..., None] * (v.to(dtype) - keys @ memory)  # [B, H_kv, 1, V]
            memory += keys.mT @ missing
            out = queries[:, :, 0].unflatten(1, (self.key_heads, -1)) @ memory
        return out.flatten(1, 2)[:, :, None].to(q.dtype), renewed(state, value=memory)

    def state_size(self, length: int) -> int:
        return self.key_heads * self.width * self.value_width

    def cost(self, length: int) -> Cost:
        tokens, width, chunk = self.heads * length, self.width, CHUNK_LENGTH
        operations = tokens * (8 * width**2 + 8 * chunk * width + 2 * chunk * 2 * width)
        between = tokens * (4 * width + 3 * chunk)  # what the chunks of a pass hand on
        return Cost(operations, 4 * (self.numbers(length) + between))

    def log_decay(self, request: Request) -> Tensor:
        """g `[B, H_kv, S]`: the logarithm of what the memory keeps at each token."""
        beta = request.controls["beta"]
        return torch.zeros_like(beta, dtype=compute_dtype(beta.dtype))

    def _mapped(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q.relu(), k.relu()) if self.features == "relu" else (q, k)

    def _given(self, request: Request, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """β and g of every token."""
        return request.controls["beta"].to(dtype).sigmoid(), self.log_decay(request).to(dtype)


class GatedDelta(Delta):
    """The delta rule with a gate that forgets everything a little."""

    traits = replace(FORGETFUL, controls=("beta", "gate"))
    source = "Yang, Kautz and Hatamizadeh, ICLR 2025"
    formula = (
        "S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, out_t = S_tᵀ q_t/√d; "
        "q and k of norm 1, β = sigmoid(beta), α = sigmoid(gate)^(1/τ)"
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        features: str = "identity",
        temperature: float = 16.0,
    ) -> None:
        """`features`: as in `delta`. `temperature` τ: the larger, the longer the memory."""
        super().__init__(heads, width, key_heads=key_heads, features=features)
        self.temperature = check_positive("temperature", temperature)

    def log_decay(self, request: Request) -> Tensor:
        return log_gate(request, "gate", self.temperature)
