"""Patterns through PyTorch's FlexAttention: a kernel on CUDA that skips blocks without a pair."""

import copy
from collections.abc import Hashable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.mechanisms.blocked import Kept, Ranges, neighbours
from cosformer.ops.memo import Memo, untraced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # what the kernel skips by
KERNELS = 64  # one for each pattern, with and without causality, mask and changing lengths

LONGEST = 2**20  # numbers of a table that is kept, which is quadratic: 131,072 tokens

_lists: "Memo[BlockMask]" = Memo()  # of long sequences they take longer than the kernel


def flex_pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    ranges: Ranges,
    *,
    alike: Hashable,
    causal: bool,
    key_mask: Tensor | None,
    start: int,
) -> Tensor:
    """softmax(q kᵀ/√d) v over the pairs that `kept` keeps, all of which lie in `ranges`.

    `alike` tells the ranges of one pattern from those of another.

    Off CUDA nothing is compiled and PyTorch computes every score: good for a check, no more.
    """
    mask = block_mask(
        kept,
        ranges,
        q.shape[2],
        k.shape[2],
        alike=alike,
        causal=causal,
        key_mask=key_mask,
        start=start,
        device=q.device,
    )
    options: dict[str, Any] = {
        "block_mask": mask,
        "enable_gqa": q.shape[1] != k.shape[1],
        # Else fewer than 128 queries go to a decoding kernel, of which PyTorch finds no version.
        "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True},
    }
    if not q.is_cuda or torch.compiler.is_compiling():  # an outer graph compiles it itself
        return _plain()(q, k, v, **options)
    with torch._dynamo.config.patch(recompile_limit=KERNELS):
        return _compiled()(q, k, v, **options)


def block_mask(
    kept: Kept,
    ranges: Ranges,
    queries: int,
    keys: int,
    *,
    alike: Hashable,
    causal: bool,
    key_mask: Tensor | None,
    start: int,
    device: torch.device,
) -> "BlockMask":
    """The blocks that `ranges` touch, by lists: PyTorch's own way goes through all n² pairs.

    The lists are kept for patterns that are `alike`, as far as lengths are the same.
    """

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = kept(query + start, key)
        if causal:
            found = found & (key <= query + start)
        return found if key_mask is None else found & key_mask[b, key]

    def make(mask_mod: Any = None) -> "BlockMask":
        lists = neighbours(
            ranges,
            queries=queries,
            keys=keys,
            query_block=BLOCK,
            key_block=BLOCK,
            causal=causal,
            start=start,
        )
        return _listed(lists, queries, keys, device, mask_mod)

    if not untraced():
        return make(mask_mod)
    found = copy.copy(_lists.recall((alike, queries, keys, causal, start), device, make, _is_short))
    found.mask_mod = mask_mod
    return found


def _is_short(mask: "BlockMask") -> bool:
    return mask.kv_indices.numel() <= LONGEST


def _listed(
    lists: tuple[tuple[int, ...], ...],
    queries: int,
    keys: int,
    device: torch.device,
    mask_mod: Any,
) -> "BlockMask":
    """These key blocks for each block of queries, and PyTorch's lists the other way round."""
    from torch.nn.attention.flex_attention import BlockMask

    widest = max(map(len, lists), default=0)
    rows = [[*blocks, *[0] * (widest - len(blocks))] for blocks in lists]
    counts = torch.tensor([len(blocks) for blocks in lists], dtype=torch.int32, device=device)
    table = torch.tensor(rows, dtype=torch.int32, device=device)
    table = F.pad(table, (0, -(-keys // BLOCK) - widest))
    return BlockMask.from_kv_blocks(
        counts[None, None],
        table[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


def _plain() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(_plain(), fullgraph=True)  # never every score: it would say so
