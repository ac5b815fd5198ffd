"""Checks of the op that every rank runs: the stretches of a rank against the whole sequence."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import handed_on
from torch import Tensor

import cosformer
from cosformer import distributed
from cosformer.runtime import HAS_TRITON

F64 = torch.float64


def tokens(batch=2, heads=2, length=24, *, key_heads=None, width=4, value_width=3):
    """q, k, v of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    key_heads = heads if key_heads is None else key_heads
    shapes = (heads, width), (key_heads, width), (key_heads, value_width)
    q, k, v = (
        torch.randn(batch, count, length, columns, generator=generator, dtype=F64)
        for count, columns in shapes
    )
    return q + 0.5, k + 0.5, v


def even(length: int) -> list[int]:
    return [length // dist.get_world_size()] * dist.get_world_size()


def uneven(length: int) -> list[int]:
    """Ranks with few tokens, none and many."""
    ranks = dist.get_world_size()
    few = [3, 0, 5][: ranks - 1]
    return [*few, length - sum(few)]


def mine(x: Tensor, lengths: list[int], dim: int = 2) -> Tensor:
    """This rank's stretch of whole sequences."""
    return x.split(lengths, dim)[dist.get_rank()]


def gates(k: Tensor, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -0.3 * torch.rand(k.shape[:3], generator=generator, dtype=F64)


def agrees(
    op: str = "attention",
    *,
    cut=even,
    sizes: dict[str, Any] | None = None,
    gated: bool = False,
    learned: str = "",
    masked: bool = False,
    second: bool = False,
    **options: Any,
) -> None:
    """Output and gradients are those of one process that has all tokens, by the formula."""
    q, k, v = tokens(**(sizes or {}))
    lengths = cut(q.shape[2])
    along: dict[str, Tensor] = {}  # what has tokens beside q, k and v
    if gated:
        along["log_decay"] = gates(k)
    if masked:
        along["key_mask"] = torch.arange(k.shape[0] * k.shape[2]).view(k.shape[0], -1) % 5 != 1
        v = v.masked_fill(~along["key_mask"][:, None, :, None], math.nan)
    grad = torch.randn(
        *q.shape[:3], v.shape[3], generator=torch.Generator().manual_seed(1)
    ).double()
    rates = {}
    if learned:
        rates[learned] = torch.linspace(0.6, 0.95, k.shape[1], dtype=F64)
    named = {"lengths": lengths} if cut is not even else {}

    def run(function, take, **more):
        leaves = {name: take(x, 2) for name, x in zip("qkv", (q, k, v), strict=True)}
        leaves |= {name: take(x, 2 - (name == "key_mask")) for name, x in along.items()}
        leaves = {name: x.detach().clone() for name, x in (leaves | rates).items()}
        inputs = [x.requires_grad_() for x in leaves.values() if x.is_floating_point()]
        out = function(**leaves, **options, **more)
        found = torch.autograd.grad(out, inputs, take(grad, 2), create_graph=second)
        if second:
            shares = len(rates)  # of a rank: the square of their sum is none of theirs
            squares = sum(x.square().sum() for x in found[: len(found) - shares])
            found += torch.autograd.grad(squares, inputs)
        names = [name for name, x in leaves.items() if x.is_floating_point()]
        return out.detach(), list(zip(names * 2, found, strict=False))

    whole, wanted = run(
        getattr(cosformer, op), lambda x, dim: x, impl="chunked" if second else "reference"
    )
    part, found = run(getattr(distributed, op), lambda x, dim: mine(x, lengths, dim), **named)
    close(part, mine(whole, lengths), "out")
    for (name, one), (_, other) in zip(found, wanted, strict=True):
        if name in rates:
            one = one.clone()
            dist.all_reduce(one)
            close(one, other, name)
        else:
            close(one, mine(other, lengths), name)


def close(found: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


PACKED = torch.tensor([0, 1, 2, 9, 9, 22, 24])
ONE_LONG = torch.tensor([0, 2, 23, 24])
MANY = torch.tensor([0, 2, 3, 5, 6, 8, 11, 12, 14, 17, 18, 20, 21, 24])
GROUPED = {"heads": 4, "key_heads": 2}
ALONE = {"batch": 1}


def cases() -> dict[str, Any]:
    """The name of a case -> the options of `agrees`."""
    found: dict[str, Any] = {}
    for causal in (False, True):
        ways = {
            "plain": {},
            "horizon": {"horizon": 30.0},
            "horizons": {"horizon": torch.tensor([30.0, 50.0])},
            "no cosine": {"horizon": math.inf},
            "uneven": {"cut": uneven},
            "masked": {"masked": True},
            "grouped": {"sizes": GROUPED},
            "raised": {"weight": "raised_cosine", "horizon": 9.0},
            "decay": {"decay": 0.8},
            "decays": {"decay": [0.7, 1.0], "horizon": 40.0, "cut": uneven},
            "learned decay": {"learned": "decay", "sizes": GROUPED},
            "gates": {"gated": True},
            "one head, decay": {"decay": 0.8, "sizes": {"batch": 1, "heads": 1}},
            "gates, all at once": {
                "gated": True, "masked": True, "sizes": GROUPED, "cut": uneven, "horizon": 24,
            },
            "raised with gates": {"gated": True, "weight": "raised_cosine", "horizon": 7.0},
            "raised, short": {"weight": "raised_cosine", "horizon": 0.75},
            "past the horizon": {"decay": 0.05, "horizon": 6.0},
        }  # fmt: skip
        for name, bounds in (("packed", PACKED), ("one long", ONE_LONG), ("many", MANY)):
            packed = {"cu_seqlens": bounds, "sizes": ALONE}
            ways[name] = packed
            ways[f"{name}, uneven, gates"] = packed | {"cut": uneven, "gated": True}
            ways[f"{name}, learned, masked"] = packed | {
                "sizes": GROUPED | ALONE, "learned": "decay", "masked": True, "horizon": 25.0,
            }  # fmt: skip
            ways[f"{name}, raised"] = packed | {"weight": "raised_cosine", "horizon": 9.0}
        family = {
            "1+elu": {"feature_map": "1+elu"},
            "function": {"feature_map": torch.square, "masked": True},
            "signed": {"rule": "signed", "theta": 0.02},
            "not divided": {"normaliser": "none", "scale": 0.5, "gamma": [0.9, 0.5]},
            "gates and gamma": {"gated": True, "learned": "gamma", "normaliser": "none"},
            "packed, not divided": {"normaliser": "none", "cu_seqlens": PACKED, "sizes": ALONE},
            "raised, not divided": {
                "normaliser": "none", "raised": True, "theta": 0.1, "gated": True, "scale": 2.0,
            },
        }  # fmt: skip
        second = {
            "second derivatives": {"second": True, "gated": True},
            "second derivatives, learned": {"second": True, "learned": "decay"},
            "second derivatives, plain": {"second": True},
        }
        way = "causal" if causal else "full"
        for name, options in (ways | second).items():
            found[f"{way}, {name}"] = {**options, "causal": causal}
        for name, options in family.items():
            found[f"{way}, linear, {name}"] = {
                **options,
                "causal": causal,
                "op": "linear_attention",
            }
    return found


def other_lengths_raise(causal: bool) -> None:
    """… on every rank, so that none of them waits for ever."""
    length = 5 + (dist.get_rank() == 0)
    told = [6] + [5] * (dist.get_world_size() - 1)
    with pytest.raises(ValueError, match="lengths must be how many tokens each rank has") as caught:
        distributed.attention(*tokens(length=length), causal=causal)
    assert str(told) in str(caught.value)


def pairs_of_ranks_have_sequences_of_their_own() -> None:
    """A group need not be all ranks."""
    numbers = range(dist.get_world_size())
    pairs = [dist.new_group(list(numbers[n : n + 2])) for n in numbers[::2]]
    pair, place = divmod(dist.get_rank(), 2)
    whole = tokens(length=10 + 2 * pair)
    parts = [x.chunk(2, 2)[place] for x in whole]
    for options in ({"causal": True, "decay": 0.9}, {"causal": False}):
        out = distributed.attention(*parts, **options, group=pairs[pair])
        close(out, cosformer.attention(*whole, **options).chunk(2, 2)[place], str(options))


def what_is_handed_on_has_one_size(causal: bool) -> None:
    """However long a sequence is, a rank hands on at most a state a hop, of which there are few."""
    ranks, sizes, operation = dist.get_world_size(), [], dist.P2POp

    def counted(kind, tensor, *where):
        if kind is dist.isend:
            sizes.append(tensor.nbytes)
        return operation(kind, tensor, *where)

    header, state = 8 * 2, 8 * 2 * 2 * 2 * 4 * (3 + 1)
    directions, hops = 1 if causal else 2, 1 + math.ceil(math.log2(ranks - 1)) if ranks > 2 else 1
    dist.P2POp = counted
    try:
        for length in (8, 512):
            parts = [mine(x, even(ranks * length)) for x in tokens(length=ranks * length)]
            distributed.attention(*parts, causal=causal, decay=0.9)
            assert set(sizes) <= {header + state}
            assert len(sizes) <= directions * hops
            sizes.clear()
    finally:
        dist.P2POp = operation


def kernels_agree(causal: bool, decay: float | None) -> None:
    """Those of Triton sum keys to states and read states, in float32."""
    whole = tokens(width=16, value_width=16)
    parts = [mine(x, even(24)).float().requires_grad_() for x in whole]
    leaves = [x.clone().requires_grad_() for x in whole]
    out = distributed.attention(*parts, causal=causal, decay=decay, impl="triton")
    wanted = cosformer.attention(*leaves, causal=causal, decay=decay)
    torch.testing.assert_close(out, mine(wanted, even(24)).float(), rtol=1e-4, atol=1e-5)
    out.sum().backward()
    wanted.sum().backward()
    for part, leaf in zip(parts, leaves, strict=True):
        grad = mine(leaf.grad, even(24)).float()
        torch.testing.assert_close(part.grad, grad, rtol=1e-4, atol=1e-5)


CHECKS = {name: partial(agrees, **options) for name, options in cases().items()}
CHECKS |= {f"other lengths, {x}": partial(other_lengths_raise, x) for x in (True, False)}
CHECKS |= {
    f"sizes, causal={causal}": partial(handed_on, partial(what_is_handed_on_has_one_size, causal))
    for causal in (True, False)
}
CHECKS["pairs of ranks"] = pairs_of_ranks_have_sequences_of_their_own
CHECKS |= {
    f"kernels, causal={causal}, decay={decay}": partial(kernels_agree, causal, decay)
    for causal in (True, False)
    for decay in (None, 0.9)
    if HAS_TRITON
}
