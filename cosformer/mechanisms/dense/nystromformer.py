"""Nyströmformer ("Nyströmformer: A Nyström-Based Algorithm for …", Xiong et al., 2021)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms.sdpa import few_keys, few_queries
from cosformer.mechanisms.traits import Cost
from cosformer.mechanisms.whole import Whole
from cosformer.runtime import compute_dtype

SPAN = 1024
"""Tokens at a time on a CPU: their convolution stays in its cache, where memory is used again."""


class Nystromformer(Whole):
    """Softmax through landmarks, the means of stretches of equal length (to within a token)."""

    traits = replace(Whole.traits, causal="no", normalised=False, second_derivative=False)
    source = "Xiong et al., AAAI 2021"
    formula = (
        "out = softmax(Q K̃ᵀ/√d) softmax(Q̃ K̃ᵀ/√d)⁺ softmax(Q̃ Kᵀ/√d) V + conv(V), "
        "Q̃, K̃ means of stretches; ⁺ by iteration"
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        landmarks: int = 64,
        iterations: int = 6,
        kernel: int = 33,
    ) -> None:
        """`kernel`: tokens that the depth-wise convolution of the values spans; 0 for none."""
        super().__init__(heads, width, key_heads=key_heads)
        self.landmarks = check_whole("landmarks", landmarks, 1)
        self.iterations = check_whole("iterations", iterations, 0)
        self.kernel = check_whole("kernel", kernel, 0)
        if kernel and kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, or 0 for no convolution, got {kernel}")
        self.conv = nn.Parameter((2 * torch.rand(heads, kernel) - 1) / math.sqrt(max(kernel, 1)))

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Scores stay inside of PyTorch's attention, and what else is long in spans of tokens."""
        marks, keys = self._landmarks(q, k)
        middle = pseudo_inverse((marks @ keys.mT).softmax(-1), self.iterations)
        marks, keys = marks.to(q.dtype), keys.to(q.dtype)
        mixed = middle @ few_queries(marks, k, v, 1.0).to(middle.dtype)
        span = max(SPAN, self.kernel) if q.device.type == "cpu" else q.shape[2]
        outs = [few_keys(x, keys, mixed, self.width**-0.5) for x in q.split(span, 2)]
        if self.kernel:
            near = with_neighbours(v.split(span, 2), self.kernel // 2)
            outs = [self._convolve(*x).add_(out) for x, out in zip(near, outs, strict=True)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        marks, keys = self._landmarks(q, k)
        left = (q / math.sqrt(self.width) @ keys.mT).softmax(-1)
        middle = pseudo_inverse((marks @ keys.mT).softmax(-1), self.iterations)
        dense = left @ middle @ (marks @ k.mT).softmax(-1)
        if not self.kernel:
            return dense
        unit = torch.eye(q.shape[2], dtype=q.dtype, device=q.device)
        (near,) = with_neighbours([unit.expand(*q.shape[:2], -1, -1)], self.kernel // 2)
        return dense + self._convolve(*near)

    def cost(self, length: int) -> Cost:
        width, count = self.width, min(self.landmarks, length)
        scores = 2 * length * count * (4 * width + 5) + 4 * length * count * width
        inverse = 8 * self.iterations * count**3
        conv = 2 * length * self.kernel * width
        numbers = (
            2 * (self.heads + self.key_heads) * length * width + 2 * self.heads * length * count
        )
        return Cost(self.heads * (scores + inverse + conv), 4 * numbers)

    def _landmarks(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Means of stretches of q/√d and of k, `[B, H, m, D]`, in float32 at least."""
        marks, keys = (means(x, min(self.landmarks, x.shape[2])) for x in (q, k))
        return marks / math.sqrt(self.width), keys

    def _convolve(self, v: Tensor, missing: tuple[int, int]) -> Tensor:
        """Each head's own weights over neighbouring tokens, alike for its channels."""
        return banded(v, self.conv.to(compute_dtype(v.dtype)), missing)


def means(x: Tensor, count: int) -> Tensor:
    """Of so many stretches of tokens `[B, H, T, D]`, the last ones longer by one where need be."""
    size, longer = x.shape[2] // count, x.shape[2] % count  # a graph has no divmod
    if longer:
        counts = count - longer, longer
        parts = x.split([counts[0] * size, longer * (size + 1)], 2)
        return torch.cat([means(*part) for part in zip(parts, counts, strict=True)], 2)
    return x.unflatten(2, (count, size)).sum(3, dtype=compute_dtype(x.dtype)) / size


def banded(x: Tensor, weight: Tensor, missing: tuple[int, int]) -> Tensor:
    """Σ_j weight_hj x_(t+j) as products of a banded matrix and blocks of tokens.

    A convolution by head has slow gradients on a GPU, and is no faster on a CPU.

    Args:
        x: `[B, H, T + kernel − 1, D]`, less the zeros that are missing before and behind it.
        weight: `[H, kernel]`.
    """
    reach = weight.shape[1] - 1
    block, length = max(2 * reach, 16), x.shape[2] + sum(missing) - reach
    blocks, before = -(-length // block), missing[0]
    padded = F.pad(x, (0, 0, before, (blocks + 1) * block - before - x.shape[2]))
    parts = padded.unflatten(2, (-1, block)).transpose(2, 3)  # [B H block blocks+1 D]
    near = torch.cat([parts[:, :, :, :-1], parts[:, :, :reach, 1:]], 2)
    # a row and a 0 more, again and again: cut to rows of this length, each is one further right
    row = F.pad(weight, (0, block))[:, None].expand(-1, block, -1).flatten(1)
    band = row[:, : block * (block + reach)].unflatten(1, (block, -1)).to(x.dtype)
    out = (band @ near.flatten(3)).unflatten(3, near.shape[3:])
    return out.transpose(2, 3).flatten(2, 3)[:, :, :length]


def with_neighbours(
    pieces: Sequence[Tensor], reach: int
) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """Each piece `[B, H, span, D]` between `reach` tokens of those beside it, and what is missing.

    No piece but the last is shorter than `reach`.
    """
    for n, piece in enumerate(pieces):
        before = [pieces[n - 1][:, :, pieces[n - 1].shape[2] - reach :]] if n else []
        after = [x[:, :, :reach] for x in pieces[n + 1 : n + 2]]
        present = [sum(x.shape[2] for x in side) for side in (before, after)]
        parts = [*before, piece, *after]
        near = piece if len(parts) == 1 else torch.cat(parts, 2)
        yield near, (reach - present[0], reach - present[1])


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Z ← ¼ Z (13 − AZ (15 − AZ (7 − AZ))) from Aᵀ/(‖A‖₁‖A‖∞), both norms of each matrix alone."""
    ones, most = (a.abs().sum(dim, keepdim=True).amax((-1, -2), keepdim=True) for dim in (-2, -1))
    z = a.mT / (ones * most)
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * unit - az @ (15 * unit - az @ (7 * unit - az)))
    return z
