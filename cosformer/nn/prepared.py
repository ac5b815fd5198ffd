"""Blocks made ready for single tokens: weights side by side, and no module between operations.

In a step of a model nothing is large: what costs is how many kernels a GPU starts, and how many
calls a CPU makes. A prepared block takes a row `[B, E]` of x through five products and kernels.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.nn.block import Block, FeedForward
from cosformer.nn.convolution import ShortConvolution
from cosformer.nn.layer import AttentionLayer, LayerState
from cosformer.nn.positions import Rotary
from cosformer.ops import (
    After,
    Clock,
    Layout,
    Linear,
    Norm,
    added_linear,
    convolve,
    normed_linear,
)
from cosformer.runtime import autocasts, compute_dtype, on_gpu

BlockStep = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(x `[B, E]`, what is still to be added to x) -> both after a block."""


class PreparedBlock:
    """A block with copies of its weights in the order in which a step reads them.

    The weights of the block itself must not change while this object is in use.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.plain = _is_plain(block)
        if not self.plain:
            return
        layer = block.attention
        self.layout = Layout.of(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.value_dim,
            gate=layer.gate is not None,
            controls=len(layer.controls),
            ones=_has_ones(layer),
        )
        self.projection = Linear.of(*_side_by_side(layer, self.layout))
        forward = block.feed_forward
        assert isinstance(forward, FeedForward)
        up, bias = forward.up.weight.detach(), forward.up.bias.detach()
        if forward.gate is not None:
            up = torch.cat([forward.gate.weight.detach(), up])
            bias = torch.cat([forward.gate.bias.detach(), bias])
        self.up = Linear.of(up, bias)

    def bind(self, state: LayerState, clock: Clock) -> BlockStep | None:
        """The step that changes such a state in place; None where the block must go its own way."""
        layer = self.block.attention
        if not self.plain or autocasts(layer.out_proj.weight):
            return None
        weight, eps = None, 0.0
        if layer.norm is not None:
            weight, known = layer.norm.weight, layer.norm.eps
            # torch means the number of the dtype in which it computes
            eps = torch.finfo(compute_dtype(weight.dtype)).eps if known is None else known
        base = layer.positions.base if isinstance(layer.positions, Rotary) else None
        after = After(weight, eps, layer.gate_kind)
        attend = layer.mechanism.prepared(state.mechanism, self.layout, after, clock, base)
        inputs, conv = state.conv, layer.conv
        if attend is None or inputs is None or conv is None:
            return None if attend is None else self._with(attend)
        taps = conv.weight.detach()[:, 0].T.to(compute_dtype(conv.weight.dtype)).contiguous()

        def convolved(rows: Tensor) -> Tensor:
            return attend(convolve(rows, inputs, taps, conv.bias))

        return self._with(convolved)

    def _with(self, attend: Callable[[Tensor], Tensor]) -> BlockStep:
        block, projection, up = self.block, self.projection, self.up
        first, second = norm_of(block.attention_norm), norm_of(block.feed_forward_norm)
        forward = block.feed_forward
        assert isinstance(forward, FeedForward)
        last = block.attention.out_proj
        output = Linear.of(last.weight, last.bias)
        down = Linear.of(forward.down.weight, forward.down.bias)
        glu = forward.gate is not None

        def step(x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor | None]:
            x, rows = normed_linear(x, added, first, projection)
            x, added = added_linear(x, attend(rows), output)
            x, inner = normed_linear(x, added, second, up, gelu=not glu)
            if glu:
                gate, inner = inner.chunk(2, -1)
                inner = F.silu(gate) * inner
            return added_linear(x, inner, down)

        return step


def norm_of(norm: nn.LayerNorm) -> Norm:
    """A layer norm as the ops take it."""
    return Norm(norm.weight, norm.bias, norm.eps)


def is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this class, without hooks and with the class's `forward`."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) is kind and not changed


def _is_plain(block: Block) -> bool:
    """Whether the layer has nothing but rotary positions between projections and mechanism.

    A module that was exchanged or hooked, as by adapters, must be called, and is not plain.
    """
    layer, forward = block.attention, block.feed_forward
    if not is_own(block, Block) or not is_own(forward, FeedForward):
        return False
    kinds: dict[type[nn.Module], list[nn.Module | None]] = {
        nn.Linear: [layer.out_proj, layer.gate, *layer.controls.values(), *forward.children()],
        nn.LayerNorm: [block.attention_norm, block.feed_forward_norm],
        nn.RMSNorm: [layer.norm],
        ShortConvolution: [layer.conv],
        AttentionLayer: [layer],
        type(layer.mechanism): [layer.mechanism],
    }
    owned = [each is None or is_own(each, kind) for kind, found in kinds.items() for each in found]
    extra = (layer.q_norm, layer.k_norm, block.cross)
    shared = layer.mechanism.traits.shared_qk or layer.in_proj_weight is None
    turned = isinstance(layer.positions, Rotary | None)
    if layer.conv is not None and (layer.conv_on != "qkv" or _has_ones(layer)):
        return False
    return all(owned) and turned and not shared and all(part is None for part in extra)


def _has_ones(layer: AttentionLayer) -> bool:
    """Whether a 1 follows the values of every head, as sums on a CPU want it."""
    return layer.mechanism.traits.state == "constant" and not on_gpu(layer.out_proj.weight)


def _side_by_side(layer: AttentionLayer, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """The weights and biases of all that a layer projects from its input, as the layout says."""
    assert layer.in_proj_weight is not None
    linears = [] if layer.gate is None else [layer.gate]
    linears += cast(list[nn.Linear], list(layer.controls.values()))
    parts: list[tuple[Tensor, Tensor | None]] = [(layer.in_proj_weight, layer.in_proj_bias)]
    parts += [(linear.weight, linear.bias) for linear in linears]
    with torch.no_grad():
        rows = []  # of weights, each with its bias behind it
        for weight, bias in parts:
            bias = weight.new_zeros(len(weight)) if bias is None else bias
            rows.append(torch.cat([weight, bias[:, None]], 1))
        if layout.ones:  # after the values of a head a row of zeros, whose bias is 1
            qk, v = rows[0].split([layout.v, len(rows[0]) - layout.v])
            v = F.pad(v.unflatten(0, (layout.key_heads, -1)), (0, 0, 0, 1))
            v[:, -1, -1] = 1
            rows[0] = torch.cat([qk, v.flatten(0, 1)])
        found = torch.cat(rows)
        found = F.pad(found, (0, 0, 0, layout.columns - len(found)))
        biased = layout.ones or any(bias is not None for _, bias in parts)
        return found[:, :-1].contiguous(), found[:, -1].contiguous() if biased else None
