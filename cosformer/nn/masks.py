"""The masks of nn.MultiheadAttention, read for linear attention."""

import torch
from torch import Tensor, nn

from cosformer.check import check_tensor
from cosformer.runtime import readable


def read_attn_mask(attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> bool:
    """Whether attention is causal; an error for a mask that linear attention cannot apply.

    Reading a mask takes queries · keys comparisons; ``is_causal`` without a mask takes none.
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    if is_causal and queries != keys:
        raise ValueError(
            "is_causal=True needs as many queries as keys, "
            f"got {queries} and {keys}; use cosformer.attention with query_start instead"
        )
    if attn_mask is None:
        return is_causal
    _check_dtype("attn_mask", attn_mask)
    shapes = ((queries, keys), (batch * heads, queries, keys))
    if tuple(attn_mask.shape) not in shapes:
        raise ValueError(
            f"attn_mask must have shape {shapes[0]} or {shapes[1]}, got {tuple(attn_mask.shape)}"
        )
    if is_causal and (torch.compiler.is_compiling() or attn_mask.is_meta):
        return True  # there are no values to read; nn.MultiheadAttention trusts the hint too
    if attn_mask.is_meta:
        raise ValueError(
            "attn_mask must hold values where is_causal=True does not stand beside it, "
            "got a meta tensor"
        )
    if queries == keys:
        make = nn.Transformer.generate_square_subsequent_mask
        if bool((attn_mask == make(keys, device=attn_mask.device, dtype=attn_mask.dtype)).all()):
            return True
    if not is_causal and not bool(attn_mask.any()):
        return False
    raise ValueError(
        "attn_mask must block exactly the future (square, True or -inf above the diagonal, "
        "False or 0 elsewhere) or, with is_causal=False, nothing, because linear attention has "
        f"no single weights to mask; got another {attn_mask.dtype} mask of shape "
        f"{tuple(attn_mask.shape)}, is_causal={is_causal}. Write -inf where a large negative "
        "number such as -1e9 stands for it; use key_padding_mask for padding, "
        "cosformer.attention(cu_seqlens=...) for packed sequences, and nn.MultiheadAttention "
        "(cosformer.convert(skip=...)) for any other mask"
    )


def read_key_padding_mask(
    key_padding_mask: Tensor | None, keys: Tensor, *, batched: bool
) -> tuple[Tensor | None, Tensor]:
    """The op's key mask [B, S] (True = real token), and the keys [B, H, S, D] to use with it.

    A float mask is added to the scores of softmax attention, that is, it multiplies the weight of
    a key by exp(mask). Scaling the key does the same here, exactly, because relu(a k) = a relu(k).
    """
    if key_padding_mask is None:
        return None, keys
    _check_dtype("key_padding_mask", key_padding_mask)
    batch, _, length, _ = keys.shape
    shape = (batch, length) if batched else (length,)
    if tuple(key_padding_mask.shape) != shape:
        raise ValueError(
            f"key_padding_mask must have shape {shape}, got {tuple(key_padding_mask.shape)}"
        )
    if key_padding_mask.device != keys.device:
        raise ValueError(
            f"key_padding_mask must be on the device of the inputs, {keys.device}, "
            f"got {key_padding_mask.device}"
        )
    mask = key_padding_mask.reshape(batch, length)
    if mask.dtype == torch.bool:
        return ~mask, keys
    scale = mask.exp().to(keys.dtype)
    if readable(scale) and not bool(scale.isfinite().all()):
        worst = mask[~scale.isfinite()][0].item()
        raise ValueError(
            "key_padding_mask must be -inf (ignore) or a number whose exponential is finite in "
            f"{keys.dtype}, got {worst:g}"
        )
    return mask != -torch.inf, keys * scale[:, None, :, None]


def _check_dtype(name: str, mask: Tensor) -> None:
    check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be of a bool or floating type, got {mask.dtype}")
