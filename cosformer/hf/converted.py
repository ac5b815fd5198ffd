"""Models of Transformers' whose attention was replaced layer by layer, and trained to fit.

`cosformer.conversion` makes them. Their `config.json` says what attention each layer has, in the
field `quantization_config`: of all that `from_pretrained` reads, this alone lets a package change
modules of any model before their weights are loaded.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import cosformer.ops as ops
from cosformer.check import check_choice, check_mapping, check_positive, check_whole
from cosformer.hf.attention import MULTISCALE_HORIZON, attend, is_causal
from cosformer.hf.cache import CARRIED, stream_of

IMPLEMENTATION = METHOD = "cosformer-converted"
"""The name of the attention function, and of the way to load, under which Transformers has them."""
EXACT = "softmax"
REPLACEMENTS = ("cosformer-multiscale", "cosformer")
KINDS = (*REPLACEMENTS, EXACT)
"""What a layer's attention may be."""
WIDEST = 256
"""The most features that the op has kernels for."""


class ConvertedConfig(QuantizationConfigMixin):
    """What `config.json` says of a converted model."""

    quant_method: Any

    def __init__(
        self,
        layers: Mapping[str, str],
        sizes: Sequence[int],
        features: int = 0,
        horizon: float = MULTISCALE_HORIZON,
        quant_method: str = METHOD,
    ) -> None:
        """What each layer is.

        Args:
            layers: the name of every attention layer, as `encoder.layer.0.attention.self` -> its
                attention: cosformer-multiscale, cosformer or softmax.
            sizes: heads, key heads and the width of a head.
            features: the width of the learned feature map of each head; 0: there is none.
            horizon: of all layers that are not softmax.
            quant_method: by which Transformers finds this class.
        """
        check_mapping("layers", layers)
        for kind in layers.values():
            check_choice("attention of a layer", kind, KINDS)
        if not 0 <= check_whole("features", features, 0) <= WIDEST:
            raise ValueError(f"features must be at most {WIDEST}, got {features}")
        if len(sizes) != 3:
            raise ValueError(f"sizes must be heads, key heads and the width of a head, got {sizes}")
        self.sizes = [check_whole("sizes", number, 1) for number in sizes]
        self.layers, self.features = dict(layers), features
        self.horizon, self.quant_method = check_positive("horizon", horizon), quant_method


class ConvertedHeads(nn.Module):
    """What a converted layer has beside its old projections.

    A feature map for each head, phi(x) = relu(x W + b), and, of `cosformer-multiscale`, a decay for
    each head that can be learned. W begins as [1, -1, random columns], cut to the width: of one
    width it is the identity, of two widths no sign is lost to relu. Decays all begin as the slowest
    of `multiscale_decays`, because softmax, which is to be matched, has none.
    """

    def __init__(
        self, kind: str, heads: int, key_heads: int, width: int, *, features: int, horizon: float
    ) -> None:
        super().__init__()
        if 0 < features < width:
            raise ValueError(f"features must be 0 or at least a head's {width}, got {features}")
        self.kind, self.horizon, self.features = kind, float(horizon), features
        self.losses: list[Tensor] | None = None
        if features:
            eye, others = torch.eye(width), max(features - 2 * width, 0)
            begin = torch.cat([eye, -eye, torch.randn(width, others) / width**0.5], 1)
            self.query_map, self.key_map = (
                nn.Parameter(begin[:, :features].repeat(count, 1, 1))
                for count in (heads, key_heads)
            )
            self.query_bias, self.key_bias = (
                nn.Parameter(torch.zeros(count, 1, features)) for count in (heads, key_heads)
            )
        if kind == "cosformer-multiscale":
            most, (slowest,) = ops.vanishing_decay(self.horizon), ops.multiscale_decays(1)
            if slowest >= most:
                raise ValueError(
                    "horizon must be one before which the decays of cosformer-multiscale vanish, "
                    f"as {MULTISCALE_HORIZON}, got {horizon:g}"
                )
            rates = torch.full((key_heads,), slowest / most, dtype=torch.float64)
            self.decay_logit = nn.Parameter(rates.logit().float())

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What relu is taken of: `[B, H, T, D]` -> `[B, H, T, features]`, and keys alike."""
        if not self.features:
            return q, k
        stream = stream_of(k)
        q, k = q @ self.query_map + self.query_bias, k @ self.key_map + self.key_bias
        if stream is not None:
            setattr(k, CARRIED, stream)
        return q, k

    @property
    def weights(self) -> dict[str, Any]:
        """The horizon, and the decay of each head, which stays below 2^(-24/horizon)."""
        if self.kind == "cosformer":
            return {"horizon": self.horizon}
        most = ops.vanishing_decay(self.horizon)
        return {"horizon": self.horizon, "decay": most * self.decay_logit.double().sigmoid()}


def converted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """The attention function of converted models: each layer's own, softmax where it has none.

    Arguments and results are those of `cosformer_attention`.
    """
    heads: ConvertedHeads | None = getattr(module, "cosformer", None)

    def linear(heads: ConvertedHeads) -> Tensor:
        q, k = heads(query, key)
        mask, weights = attention_mask, heads.weights
        return attend(IMPLEMENTATION, module, q, k, value, mask, weights, given)[0]

    if heads is not None and heads.losses is None:
        return linear(heads), None
    exact = _softmax(module, query, key, value, attention_mask, given)
    if heads is not None and heads.losses is not None:
        with torch.enable_grad():
            error = relative_error(linear(heads).flatten(2), exact.flatten(2), attention_mask)
        heads.losses.append(error)
    return exact, None


def relative_error(own: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """Σ (own − wanted)² / Σ wanted² over the real tokens of `[B, T, width]`; mask `[B, T]`."""
    real = 1.0 if mask is None else mask[..., None].to(wanted.dtype)
    return ((own - wanted).square() * real).sum() / (wanted.square() * real).sum()


@contextlib.contextmanager
def matching(model: nn.Module, *, but: str | None = None) -> Iterator[dict[str, list[Tensor]]]:
    """Within the block every layer computes softmax, and what its replacement would have missed.

    Yields layer -> its errors, one a call: Σ (own − softmax)² / Σ softmax², with gradients for what
    `ConvertedHeads` has. The layer `but` alone is its replacement.
    """
    found = {name: heads for name, heads in heads_of(model).items() if name != but}
    losses: dict[str, list[Tensor]] = {name: [] for name in found}
    for name, heads in found.items():
        heads.losses = losses[name]
    try:
        yield losses
    finally:
        for heads in found.values():
            heads.losses = None


def heads_of(model: nn.Module) -> dict[str, ConvertedHeads]:
    """The name of each converted layer -> what it has."""
    return {
        name.removesuffix(".cosformer"): module
        for name, module in model.named_modules()
        if isinstance(module, ConvertedHeads)
    }


def find_layers(model: PreTrainedModel) -> tuple[list[str], tuple[int, int, int]]:
    """The layers of a model that compute attention, by name and in the order in which they do.

    Returns:
        The names, and the sizes that they share: heads, key heads and the width of a head. From now
        on the model attends by `converted_attention`, which is softmax as long as nothing is
        replaced.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, tuple[int, int, int]] = {}

    def record(module: nn.Module, q: Tensor, k: Tensor, *rest: Any, **given: Any) -> Any:
        if module in names:  # another thread may call another model
            found[names[module]] = (q.shape[1], k.shape[1], q.shape[3])
        return converted_attention(module, q, k, *rest, **given)

    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model must be an encoder or a decoder, got {type(model).__name__}, which is both"
        )
    model.set_attn_implementation(IMPLEMENTATION)
    AttentionInterface.register(IMPLEMENTATION, record)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device))
    finally:
        AttentionInterface.register(IMPLEMENTATION, converted_attention)
    if len(sizes := set(found.values())) != 1:
        raise ValueError(
            "model must have layers of one size that call Transformers' attention functions "
            f"(AttentionInterface), got {type(model).__name__} with {len(sizes)} sizes"
        )
    return list(found), sizes.pop()


def replace_attention(model: PreTrainedModel, plan: ConvertedConfig) -> None:
    """Give the layers of a model the attention that the plan says, and its config the plan."""
    modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    for name, kind in plan.layers.items():
        # a head above the model that was converted puts a prefix before its names
        known = [
            each for each in (name, prefix + name, name.removeprefix(prefix)) if each in modules
        ]
        if not known:
            raise ValueError(f"layers must name modules of the model, got {name!r}")
        if kind != EXACT:
            heads = ConvertedHeads(kind, *plan.sizes, features=plan.features, horizon=plan.horizon)
            modules[known[0]].add_module("cosformer", heads.to(model.device, model.dtype))
    model.set_attn_implementation(IMPLEMENTATION)
    model.config.quantization_config = plan


class ConvertedLoader(HfQuantizer):
    """How `from_pretrained` makes a converted model: modules are added, then weights are loaded."""

    quantization_config: ConvertedConfig

    def __init__(self, quantization_config: ConvertedConfig, **_: Any) -> None:
        # weights that are not "pre-quantized" get the dtype that `from_pretrained` is asked for
        super().__init__(quantization_config, pre_quantized=False)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        replace_attention(model, self.quantization_config)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> Any:
        """Nothing is quantized: all numbers are as in any model, and can be trained."""
        plan = model.config.quantization_config
        self.remove_quantization_config(model)
        model.config.quantization_config = plan
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _softmax(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: dict[str, Any]
) -> Tensor:
    """PyTorch's attention under the masks that the linear layers understand."""
    if stream_of(k) is not None:
        raise ValueError(
            "past_key_values must be a DynamicCache for a model some of whose layers are softmax, "
            "which need all keys, got a CosformerCache"
        )
    if given.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q must be None for a model some of whose layers are softmax: give "
            f"position_ids that begin again, got boundaries {list(given['cu_seq_lens_q'].shape)}"
        )
    causal, (queries, keys) = is_causal(module, given), (q.shape[2], k.shape[2])
    allowed = None
    if mask is not None:
        is_packed = mask.dtype != torch.bool  # numbers of packed sequences
        allowed = (
            mask[:, None, :, None] == mask[:, None, None] if is_packed else mask[:, None, None]
        )
    if causal and queries > 1 and (allowed is not None or queries != keys):
        past = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        allowed = past if allowed is None else past & allowed
    options = {name: given[name] for name in ("dropout", "scaling") if name in given}
    whole = causal and allowed is None and queries > 1
    out, _ = sdpa_attention_forward(module, q, k, v, allowed, is_causal=whole, **options)
    return out
