"""Sparse Transformer ("Generating Long Sequences with Sparse Transformers", Child et al., 2019)."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cosformer.check import check_whole
from cosformer.mechanisms.patterns.local import block_for
from cosformer.mechanisms.patterns.masked import Masked
from cosformer.mechanisms.patterns.parts import Kept, Part, Sizes, columns, neighbours
from cosformer.mechanisms.traits import Traits


class SparseFixed(Masked):
    """A query sees its own block, and the last few tokens of every block."""

    traits = Traits(causal="exact", cross=False, state="cache", positions="absolute", growth="n²")
    source = "Child et al., 2019 (fixed; a head sees the union)"
    formula = (
        "out_i = Σ_j softmax_j(q_i·k_j / √d) v_j over ⌊j/stride⌋ = ⌊i/stride⌋ "
        "or j mod stride ≥ stride − summary"
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        stride: int = 128,
        summary: int = 32,
        impl: str = "auto",
    ) -> None:
        """n · (stride + n · summary/stride) pairs: n√n only where the stride is about √n."""
        super().__init__(heads, width, key_heads=key_heads, impl=impl)
        self.stride = check_whole("stride", stride, 1)
        self.summary = check_whole("summary", summary, 1)
        if summary > stride:
            raise ValueError(f"summary must be at most stride={stride}, got {summary}")

    def pattern(self, keys: int, device: torch.device) -> Kept:
        stride, plain = self.stride, self.stride - self.summary
        return lambda i, j: (i // stride == j // stride) | (j % stride >= plain)

    def parts(self, sizes: Sizes, device: torch.device) -> tuple[Part, ...]:
        stride = min(self.stride, reach(sizes))
        plain = stride - min(stride, self.summary)
        own = neighbours(
            lambda first, last: [(first // stride * stride, -(-last // stride) * stride)],
            sizes,
            stride,
            lambda i, j: (i // stride == j // stride) & (j % stride < plain),
        )
        summaries = [j for j in range(plain, sizes.keys) if j % stride >= plain]
        return (own, columns(summaries, sizes)) if summaries else (own,)

    def pairs(self, length: int) -> int:
        return length * min(length, self.stride + length * self.summary // self.stride)


class SparseStrided(Masked):
    """A query sees its neighbours, and every stride-th token."""

    traits = Traits(causal="exact", state="cache", positions="relative", growth="n√n")
    source = "Child et al., 2019 (strided; a head sees the union)"
    formula = (
        "out_i = Σ_j softmax_j(q_i·k_j / √d) v_j over |i − j| < stride or (i − j) mod stride = 0"
    )
    stream_option = "stride"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        stride: int | None = None,
        impl: str = "auto",
    ) -> None:
        """`stride=None` is the root of the length of each call; a stream needs a number."""
        super().__init__(heads, width, key_heads=key_heads, impl=impl)
        self.stride = None if stride is None else check_whole("stride", stride, 1)
        if stride is not None:
            self.traits = replace(self.traits, growth="n²")  # n · (2 stride + n/stride)

    def stride_for(self, keys: int) -> int:
        return self.stride or max(1, round(math.sqrt(keys)))

    def pattern(self, keys: int, device: torch.device) -> Kept:
        stride = self.stride_for(keys)
        return lambda i, j: (i - j < stride) & (j - i < stride) | ((i - j) % stride == 0)

    def parts(self, sizes: Sizes, device: torch.device) -> tuple[Part, ...]:
        stride = min(self.stride_for(sizes.keys), reach(sizes))
        near = neighbours(
            lambda first, last: [(first - stride + 1, last + stride - 1)],
            sizes,
            block_for(stride),
            lambda i, j: (i - j < stride) & (j - i < stride),
        )
        classes = tuple(((sizes.start + residue) % stride,) for residue in range(stride))

        def alike(i: Tensor, j: Tensor) -> Tensor:
            return (i % stride == j % stride) & (i != j)

        return near, Part(stride, stride, classes, alike, stride)

    def empty_state(self, k: Tensor, v: Tensor) -> Any:
        if self.stride is None:
            raise ValueError(
                "stride must be a number for a stream, got None: make it with one, as stride=128"
            )
        return super().empty_state(k, v)

    def pairs(self, length: int) -> int:
        stride = self.stride_for(length)
        return length * min(length, 2 * stride - 1 + length // stride)


def reach(sizes: Sizes) -> int:
    """A stride beyond every distance of a query and a key: a longer one has the same pairs."""
    return max(1, sizes.keys, sizes.start + sizes.queries) - min(sizes.start, 0)
