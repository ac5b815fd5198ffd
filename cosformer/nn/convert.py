"""Put cosFormer attention into an existing model, in place of every nn.MultiheadAttention."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from cosformer.nn.drop_in import CosformerAttention
from cosformer.ops import Rates


def convert(
    model: nn.Module,
    *,
    horizon: float | Sequence[float] | Tensor | None = None,
    decay: Rates | str | None = None,
    weight: str = "cosine",
    positions: str = "index",
    eps: float = 1e-6,
    impl: str = "auto",
    skip: Iterable[str] = (),
) -> list[str]:
    """Turn every ``nn.MultiheadAttention`` of a model into a :class:`CosformerAttention`.

    Returns the qualified names of the layers it turned ("" is the model itself; a shared layer has
    several). The layers are changed in place: parameters, hooks, dtype, device, training mode and
    every reference to them stay, so optimisers, tied weights and checkpoints keep working. The
    eval-time fast path of ``nn.TransformerEncoder`` is switched off where it would bypass them.

    * horizon, decay, weight, positions, eps, impl: as in :class:`CosformerAttention`. The cross
      attention of an ``nn.TransformerDecoderLayer`` gets no decay, because cross attention has
      none.
    * skip: glob patterns of qualified names to leave alone, e.g. ``["*.multihead_attn"]`` keeps
      softmax in the cross attention of ``nn.Transformer``.

    A subclass of ``nn.MultiheadAttention`` (parametrised and quantisable ones too) raises unless
    skipped, for its own behaviour would be lost; so does a layer with ``add_bias_kv`` or
    ``add_zero_attn``, and a model without any attention to convert. The model is then unchanged.
    Code that calls ``F.multi_head_attention_forward`` itself cannot be seen and stays softmax.

    >>> model = nn.Transformer(64, 4, batch_first=True)
    >>> len(convert(model, horizon=512))  # six encoder layers, six decoder layers of two
    18
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    named = _find_attention(model, _patterns(skip))
    options = {"horizon": horizon, "decay": decay, "weight": weight}
    options |= {"positions": positions, "eps": eps, "impl": impl}
    modules = list(model.modules())
    cross = {x.multihead_attn for x in modules if isinstance(x, nn.TransformerDecoderLayer)}
    twins = {
        layer: _twin(layer, names[0], options | ({"decay": None} if layer in cross else {}))
        for layer, names in named.items()
    }
    for layer, twin in twins.items():
        _become(layer, twin, options)
    for module in modules:
        if isinstance(module, nn.TransformerEncoder) and not twins.keys().isdisjoint(
            module.modules()
        ):
            module.use_nested_tensor = False  # nested tensors serve only the softmax fast path
    return [name for names in named.values() for name in names]


def _patterns(skip: Iterable[str]) -> list[str]:
    wanted = "skip must be a glob pattern or several"
    if not isinstance(skip, Iterable):
        raise TypeError(f"{wanted}, got {skip!r}")
    patterns = [skip] if isinstance(skip, str) else list(skip)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{wanted}, got {pattern!r} among them")
    return patterns


def _find_attention(
    model: nn.Module, skip: Sequence[str]
) -> dict[nn.MultiheadAttention, list[str]]:
    """The layers to turn, each with all its names; raise where one cannot be turned."""
    found: dict[nn.MultiheadAttention, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            found.setdefault(module, []).append(name)
    if not found:
        raise ValueError("model must contain an nn.MultiheadAttention, got none in it")
    every_name = [name for names in found.values() for name in names]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in every_name):
            raise ValueError(
                f"skip must match attention layers of the model, got {pattern!r}; "
                f"their names are {every_name}"
            )
    kept = {
        layer: names
        for layer, names in found.items()
        if not any(fnmatchcase(name, pattern) for name in names for pattern in skip)
    }
    for layer, names in kept.items():
        if type(layer) is not nn.MultiheadAttention or "forward" in vars(layer):
            raise ValueError(
                f"{names[0] or 'model'} must be a plain nn.MultiheadAttention to be converted, got "
                f"{type(layer).__name__} with behaviour of its own; leave it alone with skip"
            )
    return kept


def _twin(
    layer: nn.MultiheadAttention, name: str, options: Mapping[str, Any]
) -> CosformerAttention:
    """A CosformerAttention like this layer, without storage, made to check all options."""
    try:
        return CosformerAttention(
            layer.embed_dim,
            layer.num_heads,
            layer.dropout,
            add_bias_kv=layer.bias_k is not None,
            add_zero_attn=layer.add_zero_attn,
            kdim=layer.kdim,
            vdim=layer.vdim,
            batch_first=layer.batch_first,
            device="meta",
            **options,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name or 'model'} cannot be converted: {error}") from error


def _become(layer: nn.Module, twin: CosformerAttention, options: Iterable[str]) -> None:
    """Change the class in place: parents, optimisers and hooks hold on to this very object."""
    for only_softmax in ("bias_k", "bias_v", "add_zero_attn", "_qkv_same_embed_dim"):
        layer.__dict__.pop(only_softmax, None)
    layer.__class__ = CosformerAttention
    for option in ("num_kv_heads", "value_dim", *options):
        setattr(layer, option, getattr(twin, option))
