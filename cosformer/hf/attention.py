"""Attention of any model of Transformers' by cosFormer: `attn_implementation="cosformer"`."""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils import output_capturing

import cosformer.ops as ops
from cosformer.check import require_all
from cosformer.hf.cache import stream_of

MULTISCALE_HORIZON = 65_536
"""The horizon of `cosformer-multiscale`, that of the mechanism of this name."""
REFUSED = {
    "sliding_window": "linear attention has no window",
    "softcap": "there are no softmax scores to cap",
    "s_aux": "there is no softmax to have sinks",
    "position_bias": "linear attention has no bias for single pairs of tokens",
    "head_mask": "it multiplies weights, which are never formed",
    "output_attentions": "weights are never formed; cosformer.attention_weights gives a window",
    "cache": "linear attention has no pages of keys",
}
"""Keyword arguments of attention that cannot be honoured -> why."""
PADDING = "[batch, length], 1 for real tokens"


def cosformer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """`attn_implementation="cosformer"`: the attention function that models of Transformers' call.

    The horizon is `config.cosformer_horizon`, if the config has it, or
    `config.max_position_embeddings`. `scaling` cancels from cosFormer's quotient.

    Args:
        module: the model's attention layer; its config and `is_causal` count.
        query: `[B, H, T, D]`.
        key: `[B, H_kv, S, D]`.
        value: `[B, H_kv, S, V]`.
        attention_mask: what `attention_mask_for` made.
        given: what the model passes on. `cu_seq_lens_q` are the boundaries of packed sequences.

    Returns:
        `[B, T, H, V]`, and None for the weights, which are never formed.
    """
    weights = {"horizon": _horizon(module, None)}
    return attend("cosformer", module, query, key, value, attention_mask, weights, given)


def multiscale_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """`attn_implementation="cosformer-multiscale"`: the same with a decay for each head.

    The decays are `cosformer.multiscale_decays`. They let any sequence pass the horizon, which is
    `config.cosformer_horizon` or 65,536.
    """
    decay = ops.multiscale_decays(key.shape[1])
    weights = {"horizon": _horizon(module, MULTISCALE_HORIZON), "decay": decay}
    name = "cosformer-multiscale"
    return attend(name, module, query, key, value, attention_mask, weights, given)


def attention_mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """The mask function beside the attention functions: what layers get as their attention_mask.

    Transformers passes more than is asked here, such as the dtype of a mask that is added.

    Returns:
        None where all tokens are real; the key mask `[B, S]` (bool, True = real token); or, where
        sequences are packed, the number of each token's sequence `[B, T]` (int64).
    """
    if config is not None and not _calls_functions(type(config).__module__):
        raise ValueError(
            "attn_implementation must not be a cosformer attention for a model that does not call "
            f"the attention functions of Transformers, got one of {type(config).__name__}"
        )
    if local_size is not None:
        raise ValueError(
            "sliding_window and attention_chunk_size must be None with a cosformer attention, "
            f"which has no window, got {local_size}"
        )
    plain = mask_function is bidirectional_mask_function or mask_function is causal_mask_function
    if use_vmap or (not plain and attention_mask is not None):
        raise ValueError(
            "or_mask_function, and_mask_function and block_sequence_ids must be None with a "
            "cosformer attention, which cannot apply a mask to single pairs of tokens"
        )
    if mask_function is not bidirectional_mask_function and (
        isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length
    ):
        raise ValueError(
            "past_key_values must be a CosformerCache or a DynamicCache with a cosformer "
            f"attention, got one of a fixed length of {kv_length} tokens"
        )
    if not plain:
        return _sequences(mask_function, batch_size, q_length, device)
    if attention_mask is None:
        return None
    key_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    if key_mask.shape != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask must be {PADDING}, for {batch_size} rows of {kv_offset + kv_length} "
            f"tokens, got {list(attention_mask.shape)}"
        )
    is_traced = torch.compiler.is_compiling()
    return None if not is_traced and bool(key_mask.all()) else key_mask


def _sequences(
    mask_function: Callable[..., Any], batch: int, length: int, device: torch.device | str | None
) -> Tensor:
    """The number of each token's packed sequence, from neighbours that do not see each other."""
    index, row = torch.arange(length, device=device), torch.arange(batch, device=device)[:, None]
    seen = mask_function(row, 0, index, (index - 1).clamp(min=0))
    ahead = mask_function(row, 0, index[:-1], index[1:])
    rule = "the mask must let no token see the next one with a cosformer attention that is causal"
    require_all(~ahead, rule, ahead)
    return (~seen).expand(batch, length).cumsum(-1)


def attend(
    name: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    weights: dict[str, Any],
    given: dict[str, Any],
) -> tuple[Tensor, None]:
    """What the attention functions return; `weights` are the horizon and the decay of the op."""
    _check(name, module, mask, given)
    causal = is_causal(module, given)
    across = getattr(module, "is_cross_attention", False) or getattr(module, "is_decoder", False)
    if not causal and (across or q.shape[2] != k.shape[2]):
        raise ValueError(
            f"attn_implementation must not be {name!r} for cross attention, of which a cache does "
            f"not know where queries stand, got {type(module).__name__} with {q.shape[2]} queries "
            f"and {k.shape[2]} keys"
        )
    packed = _boundaries(name, mask, given)
    key_mask = mask if mask is not None and mask.dtype == torch.bool else None
    if (stream := stream_of(k)) is not None:
        if packed is not None or not causal:
            raise ValueError(
                "past_key_values must not be a CosformerCache where attention is not causal or "
                f"sequences are packed, got is_causal={causal} and cu_seq_lens_q={packed}"
            )
        out = stream.attend(q, k, v, key_mask, weights)
    else:
        out = ops.attention(q, k, v, causal=causal, key_mask=key_mask, cu_seqlens=packed, **weights)
    return out.transpose(1, 2).contiguous(), None


def is_causal(module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether a layer's tokens see those before them alone: as the call says, else its module."""
    causal = given.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
        causal = causal and getattr(getattr(module, "config", None), "is_causal", True)
    return bool(causal)


def _check(name: str, module: nn.Module, mask: Tensor | None, given: dict[str, Any]) -> None:
    """Refuse what cannot be honoured, and warn of rotated queries."""
    if "attentions" in (_collected() or ()):
        given = {**given, "output_attentions": True}
    for option, reason in REFUSED.items():
        value = given.get(option)
        if value is not None and value is not False:
            shown = list(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(
                f"{option} must be None with attn_implementation={name!r}, because {reason}, "
                f"got {shown}"
            )
    if given.get("dropout"):
        raise ValueError(
            f"dropout of attention weights must be 0 with attn_implementation={name!r}, which "
            f"never forms them, got {given['dropout']}: set it to 0 in the config (attn_pdrop, "
            "attention_dropout or attention_probs_dropout_prob)"
        )
    if mask is not None and (mask.dim() != 2 or mask.is_floating_point()):
        raise ValueError(
            f"attention_mask must be {PADDING}, with attn_implementation={name!r}, which cannot "
            f"mask single pairs of tokens, got {mask.dtype} {list(mask.shape)}"
        )
    config = getattr(module, "config", None)
    if _rotates(config):
        _warn_of_rotation(name, getattr(config, "model_type", type(module).__name__))


def _collected() -> Any:
    """What the hooks of Transformers collect in this call; None: nothing."""
    collector = getattr(output_capturing, "_active_collector", None)
    return None if collector is None else collector.get()


def _boundaries(name: str, mask: Tensor | None, given: dict[str, Any]) -> Tensor | None:
    """The boundaries `[0, …, T]` of packed sequences; None where there is one in each row."""
    queries: Tensor | None = given.get("cu_seq_lens_q")
    keys: Tensor | None = given.get("cu_seq_lens_k")
    if keys is not queries and (queries is None or keys is None or len(keys) != len(queries)):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must be the same boundaries with attn_implementation="
            f"{name!r}, got {queries} and {keys}"
        )
    if queries is not None or mask is None or mask.dtype == torch.bool:
        return queries
    if torch.compiler.is_compiling():
        rule = "cu_seq_lens_q must be given for packed sequences under torch.compile"
        require_all(mask == 0, rule, mask)
        return None
    if len(mask) != 1:
        raise ValueError(
            "position_ids of packed sequences must have a batch of 1 with attn_implementation="
            f"{name!r}, got {len(mask)}: lay the rows end to end"
        )
    starts = mask[0].diff().nonzero().flatten() + 1
    return torch.nn.functional.pad(torch.cat([starts, starts.new_tensor([mask.shape[1]])]), (1, 0))


def _horizon(module: nn.Module, default: int | None) -> float:
    config = getattr(module, "config", None)
    own = getattr(config, "cosformer_horizon", None)
    longest = getattr(config, "max_position_embeddings", None)
    for found in (own, default, longest):
        if found is not None:
            return float(found)
    raise ValueError(
        "config.cosformer_horizon must be given where the config has no max_position_embeddings, "
        f"got None in {type(config).__name__}"
    )


def _rotates(config: Any) -> bool:
    """Whether the model's queries and keys come rotated by their positions."""
    is_named = getattr(config, "position_embedding_type", None) == "rotary"
    fields = ("rope_parameters", "rotary_dim")
    return is_named or any(getattr(config, field, None) for field in fields)


@torch.compiler.assume_constant_result
def _calls_functions(configs: str) -> bool:
    """Whether models with the configs of this module leave attention to a function that they are
    given. Others compute softmax themselves, and without the mask that they asked for."""
    models = sys.modules.get(configs.replace(".configuration_", ".modeling_"))
    if models is None or hasattr(models, "ALL_ATTENTION_FUNCTIONS"):
        return True
    own = (x for x in vars(models).values() if getattr(x, "__module__", "") == models.__name__)
    return not any(
        isinstance(x, type) and nn.Module in x.__bases__ and "Attention" in x.__name__ for x in own
    )


@torch.compiler.assume_constant_result  # a graph warns while it is made
def _warn_of_rotation(name: str, model_type: str) -> None:
    _warn_once(
        f"attn_implementation={name!r} takes queries and keys of {model_type} after they were "
        "rotated by their positions: relu of them depends on where a text begins, not on distances "
        "alone. Models without rotary positions have no such effect."
    )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
