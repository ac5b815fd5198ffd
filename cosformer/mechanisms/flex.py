"""Patterns through PyTorch's FlexAttention: a kernel on CUDA that skips blocks without a pair."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cosformer.mechanisms.blocked import Kept, Ranges, neighbours

BLOCK = 128  # what the kernel skips by


def flex_pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    ranges: Ranges,
    *,
    causal: bool,
    key_mask: Tensor | None,
    start: int,
) -> Tensor:
    """softmax(q kᵀ/√d) v over the pairs that `kept` keeps, all of which lie in `ranges`.

    Off CUDA nothing is compiled and PyTorch computes every score: good for a check, no more.
    """
    from torch.nn.attention.flex_attention import BlockMask

    lists = neighbours(
        ranges,
        queries=q.shape[2],
        keys=k.shape[2],
        query_block=BLOCK,
        key_block=BLOCK,
        causal=causal,
        start=start,
    )
    longest = -(-k.shape[2] // BLOCK)
    table = torch.tensor([[*blocks, *[0] * (longest - len(blocks))] for blocks in lists])
    counts = torch.tensor([len(blocks) for blocks in lists])

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = kept(query + start, key)
        if causal:
            found = found & (key <= query + start)
        return found if key_mask is None else found & key_mask[b, key]

    block_mask = BlockMask.from_kv_blocks(
        counts[None, None].to(q.device, torch.int32),
        table[None, None].to(q.device, torch.int32),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(q.shape[2], k.shape[2]),
    )
    attend = _compiled() if q.is_cuda else _plain()
    return attend(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


def _plain() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(_plain())
