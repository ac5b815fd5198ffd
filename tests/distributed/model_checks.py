"""Checks of layers and models that every rank runs: their stretch against the whole sequence."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_checks import close, even, mine, uneven
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cosformer import distributed
from cosformer.models import ModelConfig, create_model, recommended
from cosformer.nn import AttentionLayer

F64 = torch.float64


def agrees(model: nn.Module, inputs: torch.Tensor, cut=even, mask=None, **options: Any) -> None:
    """Output and gradients of inputs and parameters are those of one process."""
    lengths = cut(inputs.shape[1])
    whole, parts = model, copy.deepcopy(model)
    assert distributed.split(parts, lengths=None if cut is even else lengths) is parts
    leaf = inputs.clone().requires_grad_(inputs.is_floating_point())
    part = mine(inputs, lengths, 1).clone().requires_grad_(inputs.is_floating_point())
    given = {} if mask is None else {"key_mask": mask}
    own = {name: mine(x, lengths, 1) for name, x in given.items()}
    wanted, out = whole(leaf, **given, **options), parts(part, **own, **options)
    real = torch.ones(inputs.shape[:2], dtype=torch.bool) if mask is None else mask
    wanted, out = (
        torch.where(rows[..., None], x, 0)
        for rows, x in ((real, wanted), (mine(real, lengths, 1), out))
    )
    close(out, mine(wanted, lengths, 1), "out")
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted.backward(grad)
    out.backward(mine(grad, lengths, 1))
    if inputs.is_floating_point():
        close(part.grad, mine(leaf.grad, lengths, 1), "inputs")
    for (name, one), other in zip(parts.named_parameters(), whole.parameters(), strict=True):
        assert one.grad is not None, name
        dist.all_reduce(one.grad)
        close(one.grad, other.grad, name)
    distributed.unsplit(parts)
    close(parts(inputs, **given, **options), whole(inputs, **given, **options), "unsplit")


def layer_agrees(mechanism: str, *, cut=even, causal=True, masked=False, **made: Any) -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(16, 4, mechanism=mechanism, dtype=F64, **made)
    x = torch.randn(2, 24, 16, dtype=F64)
    mask = torch.arange(48).view(2, 24) % 5 != 1 if masked else None
    agrees(layer, x, cut, mask, causal=causal)


def model_agrees(*, cut=even, padded=False, **fields: Any) -> None:
    torch.manual_seed(0)
    small = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 11, "max_length": 32}
    model = create_model(ModelConfig(**small | fields)).double()
    for parameter in model.parameters():  # gates begin with weights of 0
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(11, (2, 24))
    mask = torch.arange(24) < torch.tensor([[17], [24]]) if padded else None
    agrees(model, tokens, cut, mask)


def long_enough(length: int) -> list[int]:
    """Uneven, with as many tokens on each rank as a convolution of 5 asks for."""
    ranks = dist.get_world_size()
    return [4] * (ranks - 1) + [length - 4 * (ranks - 1)]


LAYERS: dict[str, dict[str, Any]] = {
    "cosformer": {},
    "cosformer, as the length": {"options": {"horizon": None}},
    "cosformer, decay": {"options": {"decay": "multiscale"}, "num_kv_heads": 2},
    "cosformer-multiscale, learned": {"options": {"learned": True}, "cut": uneven},
    "cosformer-gated": {"gate": True, "qk_norm": True, "masked": True, "cut": uneven},
    "linear, rotary": {"positions": "rotary", "masked": True},
    "linear, learned positions": {"positions": "learned", "max_length": 24},
    "relu, sinusoidal": {"positions": "sinusoidal", "cut": uneven},
    "spe": {}, "hedgehog": {}, "based": {}, "rfa": {}, "leaky-relu": {}, "transnormer": {},
    "softmax": {"positions": "rotary"},
    "softmax, grouped": {"num_kv_heads": 2, "masked": True, "cut": uneven},
}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    "retention": {}, "gated-linear": {"masked": True}, "rfa-gated": {},
    "cosformer, convolution": {"conv": 4, "cut": long_enough, "masked": True},
    "cosformer-gated, convolution": {"conv": 5, "conv_on": "input"},
}  # fmt: skip
FULL: dict[str, dict[str, Any]] = {
    "cosformer, convolution": {"conv": 5, "cut": long_enough, "masked": True},
    "cosformer-multiscale, convolution": {"conv": 3, "conv_on": "input"},
}
MODELS: dict[str, dict[str, Any]] = {
    "lm": {},
    "lm, recommended": recommended("lm"),
    "lm, learned positions": {"positions": "learned", "cut": uneven},
    "lm, padded": {"padded": True, "positions": "sinusoidal"},
    "lm, hybrid": {"mechanism": "cosformer-gated softmax", "positions": "auto", "conv": 4},
    "mlm": {"kind": "masked-lm", "positions": "learned", "padded": True},
    "mlm, recommended": {"kind": "masked-lm", "padded": True, **recommended("mlm")},
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    fields = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 11} | recommended("lm")
    return create_model(ModelConfig(**fields)).double()


def data_parallel_wrappers_agree() -> None:
    """DDP takes the mean over ranks: of losses that are means over as many tokens each."""
    whole, tokens = small_model(), torch.randint(11, (2, 25))
    lengths = even(24)
    wrapped = nn.parallel.DistributedDataParallel(distributed.split(copy.deepcopy(whole)))
    inputs, targets = (mine(x, lengths, 1) for x in (tokens[:, :-1], tokens[:, 1:]))
    loss = F.cross_entropy(wrapped(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    F.cross_entropy(whole(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for (name, one), other in zip(whole.named_parameters(), wrapped.parameters(), strict=True):
        close(other.grad, one.grad, name)


def activations_may_be_made_again() -> None:
    """By torch's checkpoint, in the backward pass: every rank exchanges its states again."""
    model = distributed.split(small_model())
    tokens = mine(torch.randint(11, (2, 24)), even(24), 1)
    found = []
    for run in (model, partial(checkpoint, model, use_reentrant=False)):
        model.zero_grad()
        run(tokens).square().sum().backward()
        found.append([x.grad.clone() for x in model.parameters()])
    for one, other in zip(*found, strict=True):
        close(one, other, "gradient")


def refused(mechanism: str, message: str, causal: bool = True) -> None:
    layer = distributed.split(AttentionLayer(16, 4, mechanism=mechanism))
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 6, 16), causal=causal)


def padding_must_be_last() -> None:
    """… or every rank says so."""
    model = create_model(ModelConfig(kind="masked-lm", layers=1, width=16, heads=2))
    distributed.split(model)
    tokens, rank = torch.zeros(2, 6, dtype=torch.long), dist.get_rank()
    inside = torch.ones(2, 6, dtype=torch.bool)
    inside[1, 2] = rank != 0
    before = torch.ones(2, 6, dtype=torch.bool)
    before[1, 5] = rank != 0
    for mask in (inside, before):
        with pytest.raises(ValueError, match=r"key_mask must have padding behind .* in row 1"):
            model(tokens, mask)


def short_stretches_are_refused() -> None:
    layer = distributed.split(AttentionLayer(16, 4, conv=4))
    with pytest.raises(ValueError, match="every rank must have at least the 3 tokens"):
        layer(torch.randn(1, 2, 16), causal=True)


def _checks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for causal, tables in ((True, (LAYERS, CAUSAL)), (False, (LAYERS, FULL))):
        for name, options in (pair for table in tables for pair in table.items()):
            kind = name.partition(",")[0]
            found[f"layer, {name}, causal={causal}"] = partial(
                layer_agrees, kind, causal=causal, **options
            )
    for name, options in MODELS.items():
        found[f"model, {name}"] = partial(model_agrees, **options)
    for name in ("performer", "delta", "rope-linear", "local"):
        found[f"{name} is refused"] = partial(refused, name, f"{name} cannot attend over ranks")
    found["data parallel wrappers"] = data_parallel_wrappers_agree
    found["checkpointed"] = activations_may_be_made_again
    found["padding"] = padding_must_be_last
    found["short stretches"] = short_stretches_are_refused
    return found


CHECKS = _checks()
