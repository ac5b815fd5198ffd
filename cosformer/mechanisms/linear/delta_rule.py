"""The delta rule in chunks: exact, linear in the length, all products within a chunk at once.

S_t = e^(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ and out_t = S_tᵀ q_t. With S_0 the memory
before a chunk and G the sums of g, S_t = e^(G_t) S_0 + Σ_{j≤t} e^(G_t−G_j) k_j u_jᵀ, where u solves

    (I + strictly lower part of β_i e^(G_i−G_j) k_i·k_j) u = β (v − e^G k S_0)
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.mechanisms.padding import to_multiple
from cosformer.ops.problem import least_gate, running_sum
from cosformer.runtime import full_precision, recomputed

CHUNK_LENGTH = 64
SEGMENT_LENGTH = 16 * CHUNK_LENGTH


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, V]` and the memory after these tokens, in float32 or float64.

    Args:
        q, k, v: `[B, H, T, D]`, `[B, H_kv, T, D]`, `[B, H_kv, T, V]`; keys no longer than 1.
        beta, log_decay: `[B, H_kv, T]`, β in 0 … 1 and g ≤ 0.
        memory: S `[B, H_kv, D, V]`, whose dtype is that of the computation.
    """
    length = k.shape[2]
    if not length:  # zeros with a gradient
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return (q @ k.mT @ v).to(memory.dtype), memory
    tokens = (q, k, v, beta, log_decay)
    if length <= SEGMENT_LENGTH:
        return _segment(*tokens, memory)
    outs = []
    for parts in zip(*(x.split(SEGMENT_LENGTH, 2) for x in tokens), strict=True):
        # what the backward pass needs of a segment is ten times its tokens
        out, memory = recomputed(_segment, *parts, memory)
        outs.append(out)
    return torch.cat(outs, 2), memory


def units(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of norm 1, those of q over √d."""
    q, k = (F.normalize(x.to(dtype), dim=-1) for x in (q, k))
    return q / math.sqrt(q.shape[-1]), k


def _segment(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    length = k.shape[2]
    with full_precision(q):
        q, k, v, beta, log_decay = (
            _chunks(x.to(memory.dtype), min(CHUNK_LENGTH, length))
            for x in (q, k, v, beta[..., None], log_decay[..., None])
        )
        decay, fading = fade(log_decay[..., 0])
        since = decay.exp().to(k.dtype)[..., None]  # what is left of S_0
        scaled = torch.cat([v, since * k], -1) * beta
        mixing = strict(k, beta, fading)
        solved = torch.linalg.solve_triangular(mixing, scaled, upper=False, unitriangular=True)
        own, answered = solved.split([v.shape[-1], k.shape[-1]], -1)
        q = q.unflatten(1, (k.shape[1], -1))  # [B, H_kv, groups, n, C, D]
        score = q @ k[:, :, None].mT * fading[:, :, None]
        read = q * since[:, :, None]
        write = k * (decay[..., -1:] - decay).exp().to(k.dtype)[..., None]
        kept = since[..., -1:, :]
        outs = []
        # unbind: the gradient of an index into all chunks would be as large as all of them
        chunks = (x.unbind(2) for x in (own, answered, write, kept))
        reads = (x.unbind(3) for x in (read, score))
        for own_n, answered_n, write_n, kept_n, read_n, score_n in zip(
            *chunks, *reads, strict=True
        ):
            new = own_n - answered_n @ memory  # u
            outs.append(read_n @ memory[:, :, None] + score_n @ new[:, :, None])
            memory = kept_n * memory + write_n.mT @ new
        out = torch.stack(outs, 3).flatten(1, 2).flatten(2, 3)  # [B, H, n·C, V]
    return out[:, :, :length], memory


def fade(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """G `[…, C]` in float64 and, in the dtype of g, e^(G_i−G_j) for j ≤ i, else 0, `[…, C, C]`."""
    decay = running_sum(log_decay, least_gate(log_decay.dtype))
    difference = (decay[..., :, None] - decay[..., None, :]).to(log_decay.dtype)
    future = torch.ones(decay.shape[-1:] * 2, dtype=torch.bool, device=decay.device).triu(1)
    return decay, difference.masked_fill(future, -torch.inf).exp()


def strict(k: Tensor, beta: Tensor, fading: Tensor) -> Tensor:
    """The strictly lower part of β_i e^(G_i−G_j) k_i·k_j; a unit diagonal is understood."""
    return (beta * (k @ k.mT) * fading).tril(-1)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """`[B, H, T, ·]` as `[B, H, n, C, ·]`; padding is zeros, which the memory passes unchanged."""
    return to_multiple(x, chunk).unflatten(2, (-1, chunk))
