"""What a candidate is given: queries, keys and values, and what else its cell has."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """The tensors of one call. A candidate takes of them what it needs."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, H_kv, T, D]
    v: Tensor  # [B, H_kv, T, D]
    gates: Tensor  # [B, H_kv, T], float32 or above: the log of each token's decay
    gradient: Tensor  # of the output, [B, H, T, D]
    causal: bool
    cu_seqlens: Tensor | None = None  # where packed sequences begin and end, in a batch of one


def draw(
    shape: Sequence[int], count: int, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> list[Tensor]:
    """`count` normal tensors, drawn where they are used: a billion numbers take long on a CPU."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = (torch.randn(*shape, generator=generator, device=device) for _ in range(count))
    return [x.to(dtype) for x in drawn]


def draw_inputs(
    shape: Sequence[int],
    *,
    causal: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    key_heads: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Inputs:
    """Inputs of the shape `[B, H, T, D]`; `lengths` are those of sequences that are packed."""
    q, k, v, gradient = draw(shape, 4, dtype=dtype, device=device, seed=seed)
    k, v = (x[:, :key_heads].contiguous() for x in (k, v))
    precise = torch.promote_types(dtype, torch.float32)
    (x,) = draw(k.shape[:3], 1, dtype=precise, device=device, seed=seed + 1)
    bounds = None
    if lengths is not None:
        bounds = torch.tensor([0, *lengths], device=q.device).cumsum(0)
    return Inputs(q, k, v, -0.1 * x.square(), gradient, causal, bounds)


def as_drawn(inputs: Inputs) -> Inputs:
    """The inputs as they are."""
    return inputs


def token_major(inputs: Inputs) -> Inputs:
    """The inputs, each with its tokens before its heads in memory."""
    return inputs._replace(
        q=tokens_first(inputs.q),
        k=tokens_first(inputs.k),
        v=tokens_first(inputs.v),
        gates=tokens_first(inputs.gates),
        gradient=tokens_first(inputs.gradient),
    )


def tokens_first(x: Tensor) -> Tensor:
    """The same `[B, H, T, …]`, in memory as `[B, T, H, …]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def gates_per_column(inputs: Inputs) -> Inputs:
    """Token-major, and with a gate for each column of a key: `[B, H, T, D]`."""
    gates = inputs.gates[..., None].expand(inputs.k.shape)
    return token_major(inputs._replace(gates=gates))
