"""Patterns through PyTorch's FlexAttention: a kernel on CUDA that skips blocks without a pair."""

import copy
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.mechanisms.compiled import run_compiled
from cosformer.mechanisms.padding import to_multiple
from cosformer.mechanisms.patterns.parts import Part, Sizes, as_before, in_order
from cosformer.mechanisms.sdpa import joined
from cosformer.memo import Memo
from cosformer.runtime import untraced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # what the kernel skips by
TILE = 64  # what it multiplies at a time, for as many columns of 16 bits

OTHERS = "'blocked' or 'reference'"  # implementations that do what this one cannot
NARROWEST = 16  # columns of q or v for which PyTorch has a kernel

LONGEST = 2**23  # numbers in lists that are kept, which are quadratic: 262,144 tokens, 32 MB


class Laid(NamedTuple):
    """A part as the kernel takes it: queries and keys in slots, and blocks of these."""

    part: Part
    blocks: "BlockMask"
    i: Tensor | None  # positions of queries by slot, where they do not follow each other
    j: Tensor | None  # positions of keys by slot; -1 for a slot without a key


def _is_short(laid: tuple[Laid, ...]) -> bool:
    """Whether the lists of blocks are short enough to be kept."""
    lists = (y for x in laid for y in (x.blocks.kv_indices, x.blocks.q_indices))
    return sum(x.numel() for x in lists if x is not None) <= LONGEST


_laid: Memo[tuple[Laid, ...]] = Memo(_is_short)  # long ones take longer to make than the kernel


def flex_pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sizes: Sizes,
    parts: Callable[[Sizes, torch.device], tuple[Part, ...]],
    settings: Callable[[], Hashable],
) -> Tensor:
    """softmax(q kᵀ/√d) v over the pairs of disjoint parts, kept for calls of the same `settings`.

    Off CUDA nothing is compiled and PyTorch computes every score: good for a check, no more.
    """
    require_flex(q, k, v)

    def make() -> tuple[Laid, ...]:
        return tuple(lay(part, sizes, q.device) for part in parts(sizes, q.device))

    laid = _laid.recall((settings(), sizes), q.device, make) if untraced() else make()
    found = [_attend(q, k, v, x, sizes, key_mask, with_log=len(laid) > 1) for x in laid]
    out = found[0][0]
    if len(found) > 1:
        out = run_compiled(joined, *zip(*found, strict=True), on=q)
    return differentiated_once(out)


def flex_serves(q: Tensor, v: Tensor) -> bool:
    """Whether PyTorch has kernels for q and v of this type and width."""
    return q.is_cuda and q.dtype != torch.float64 and min(q.shape[3], v.shape[3]) >= NARROWEST


def require_flex(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k and v that PyTorch has no kernels or no gradients for."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if recorded and not q.is_cuda:
        raise ValueError(
            f"impl must be {OTHERS} on {q.device.type}, where PyTorch's FlexAttention has no "
            "gradients, got 'flex'"
        )
    if q.is_cuda and not flex_serves(q, v):
        raise ValueError(
            f"impl must be {OTHERS} unless q and v have {NARROWEST} columns and 32 bits or less, "
            f"got 'flex' for {q.shape[3]} and {v.shape[3]} in {q.dtype}"
        )


def differentiated_once(out: Tensor) -> Tensor:
    """`out`, with an error for second derivatives: PyTorch might silently leave them out."""

    def refuse(grad: Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(f"impl must be {OTHERS} for a second derivative, got 'flex'")

    if out.requires_grad and untraced():
        out.register_hook(refuse)
    return out


def lay(part: Part, sizes: Sizes, device: torch.device) -> Laid:
    """The slots of a part, and which blocks of them meet."""
    lists = blocks_of(part, sizes)
    i = j = None
    queries, keys = sizes.queries, sizes.keys
    part = part._replace(lists=())
    if part.keys is not None:
        part = part._replace(keys=torch.tensor(part.keys, device=device))
    if part.keys is not None or part.stride is not None:
        after = torch.arange(1, keys + 1, dtype=torch.int32, device=device)[:, None]
        j = _of_keys(after, part)[:, 0] - 1
        keys = len(j)
    if part.stride is not None:
        at = torch.arange(queries, dtype=torch.int32, device=device)[:, None]
        i = in_order(at, part, False)[:, 0] + sizes.start
        queries = len(i)
    return Laid(part, listed(lists, queries, keys, device), i, j)


def blocks_of(part: Part, sizes: Sizes) -> list[list[int]]:
    """The numbers of the key blocks that every `BLOCK` queries look at."""
    queries, keys = sizes.queries, sizes.keys
    rows, columns = part.query_block, part.key_block
    if part.stride is not None:
        rows, columns = -(-queries // part.stride), -(-keys // part.stride)
        queries, keys = rows * part.stride, columns * part.stride
    elif part.keys is not None:
        keys = len(part.keys)
    lists = []
    for first in range(0, queries, BLOCK):
        wanted: set[int] = set()
        for row in range(first // rows, -(-min(first + BLOCK, queries) // rows)):
            for column in part.lists[row]:
                end = min((column + 1) * columns, keys)
                wanted.update(range(column * columns // BLOCK, -(-end // BLOCK)))
        lists.append(sorted(wanted))
    return lists


def _attend(
    q: Tensor, k: Tensor, v: Tensor, laid: Laid, sizes: Sizes, mask: Tensor | None, with_log: bool
) -> tuple[Tensor, Tensor | None]:
    """The output of one part, and log Σ e^s `[B, H, T]` if it is asked for."""
    part, _, i, j = laid
    kept, start, causal = part.kept, sizes.start, sizes.causal
    real = None if mask is None else _of_keys(mask[..., None], part)[..., 0]

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query + start if i is None else i[query]
        where = key if j is None else j[key]
        found = where >= 0 if kept is None else kept(at, where)
        if j is not None:
            found = found & (where >= 0)
        if causal:
            found = found & (where <= at)
        return found if real is None else found & real[b, key]

    blocks = with_mask(laid.blocks, mask_mod)
    rows = in_order(q, part, False)
    keys, values = _of_keys(k, part), _of_keys(v, part)
    out, log_total = run_compiled(attend_blocks, rows, keys, values, blocks, with_log, on=q)
    if part.stride is None:
        return out, log_total
    if log_total is not None:
        log_total = as_before(log_total[..., None], part, q.shape[2])[..., 0]
    return as_before(out, part, q.shape[2]), log_total


def _of_keys(x: Tensor, part: Part) -> Tensor:
    """A tensor of keys, `[..., S, D]`, in slots; chosen keys are filled up to whole blocks."""
    x = in_order(x, part, True)
    return x if part.keys is None else to_multiple(x, BLOCK)


def listed(lists: list[list[int]], queries: int, keys: int, device: torch.device) -> "BlockMask":
    """Blocks of keys for each block of queries, and PyTorch's lists the other way round."""
    from torch.nn.attention.flex_attention import BlockMask

    widest = max([0, *map(len, lists)])
    rows = [[*blocks, *[0] * (widest - len(blocks))] for blocks in lists]
    counts = torch.tensor([len(blocks) for blocks in lists], dtype=torch.int32, device=device)
    indices = torch.tensor(rows, dtype=torch.int32, device=device)
    indices = F.pad(indices, (0, -(-keys // BLOCK) - widest))
    return BlockMask.from_kv_blocks(
        counts[None, None], indices[None, None], BLOCK_SIZE=BLOCK, seq_lengths=(queries, keys)
    )


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: "BlockMask", with_log: bool
) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ/√d) v over the pairs of blocks, and log Σ e^s `[B, H, T]` if asked for."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    options: dict[str, Any] = {
        "block_mask": blocks,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": _how(q, k),
    }
    if not with_log:
        return flex_attention(q, k, v, **options), None
    out, more = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return out, more.lse


def _how(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Options for the kernels: PyTorch's own tiles for 64 columns leave no registers for a mask."""
    # Else fewer than 128 queries go to a decoding kernel, of which PyTorch finds no version.
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if q.shape[2] % BLOCK == 0 and k.shape[2] % BLOCK == 0:
        options["IS_DIVISIBLE"] = True  # where lengths change, PyTorch would not ask
    if q.element_size() <= 2 and q.shape[3] == TILE:
        options |= {"fwd_BLOCK_M": BLOCK, "fwd_BLOCK_N": TILE, "bwd_num_warps": 4}
        options |= {"bwd_BLOCK_M1": TILE // 2, "bwd_BLOCK_N1": TILE}
        options |= {"bwd_BLOCK_M2": TILE, "bwd_BLOCK_N2": TILE // 2}
    return options


def with_mask(blocks: "BlockMask", mask_mod: Any) -> "BlockMask":
    """Blocks, which may be kept, with the mask function of this call."""
    if untraced():
        blocks = copy.copy(blocks)
        blocks.mask_mod = mask_mod
        return blocks
    return type(blocks).from_kv_blocks(  # a graph may lose what is assigned
        blocks.kv_num_blocks,
        blocks.kv_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=blocks.seq_lengths,
    )
