"""Nyströmformer ("Nyströmformer: A Nyström-Based Algorithm for …", Xiong et al., 2021)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.mechanisms.traits import Cost
from cosformer.mechanisms.whole import Whole
from cosformer.ops.check import check_whole

SPAN = 1024
"""Tokens at a time on a CPU: their convolution stays in its cache, where memory is used again."""


class Nystromformer(Whole):
    """Softmax through landmarks, the means of stretches of equal length (to within a token)."""

    traits = replace(Whole.traits, causal="no", normalised=False, fused=True)
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
        width = max(q.shape[3], v.shape[3])  # one for all, or PyTorch stores the scores
        mixed = middle @ _attend(marks, k, v, width, 1.0)
        span = max(SPAN, self.kernel) if q.device.type == "cpu" else q.shape[2]
        outs = [_attend(rows, keys, mixed, width, self.width**-0.5) for rows in q.split(span, 2)]
        if self.kernel:
            near = with_neighbours(v.split(span, 2), self.kernel // 2)
            outs = [self._convolve(x).add_(out) for x, out in zip(near, outs, strict=True)]
        return torch.cat(outs, 2)

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        marks, keys = self._landmarks(q, k)
        left = (q / math.sqrt(self.width) @ keys.mT).softmax(-1)
        middle = pseudo_inverse((marks @ keys.mT).softmax(-1), self.iterations)
        dense = left @ middle @ (marks @ k.mT).softmax(-1)
        if not self.kernel:
            return dense
        unit = torch.eye(q.shape[2], dtype=q.dtype, device=q.device)
        (near,) = with_neighbours([unit.expand(*q.shape[:2], -1, -1)], self.kernel // 2)
        return dense + self._convolve(near)

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
        """Means of stretches of q/√d and of k, `[B, H, m, D]`."""
        length = q.shape[2]
        count = min(self.landmarks, length)
        ends = [-(-n * length // count) for n in range(count + 1)]
        sizes = [after - before for before, after in pairwise(ends)]
        marks, keys = (torch.stack([t.mean(2) for t in x.split(sizes, 2)], 2) for x in (q, k))
        return marks / math.sqrt(self.width), keys

    def _convolve(self, v: Tensor) -> Tensor:
        """Each head's own weights over neighbouring tokens, alike for its channels."""
        weight = self.conv.to(v.dtype)[:, None, :, None]  # [H 1 kernel 1]
        return F.conv2d(v, weight, groups=self.heads)


def _attend(q: Tensor, k: Tensor, v: Tensor, width: int, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v."""
    q, k, wide = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, wide, scale=scale)[..., : v.shape[3]]


def with_neighbours(pieces: Sequence[Tensor], reach: int) -> Iterator[Tensor]:
    """Each piece `[B, H, span, D]` between `reach` tokens of those beside it, zeros at the ends.

    No piece but the last is shorter than `reach`.
    """
    for n, piece in enumerate(pieces):
        nothing = piece[:, :, :0]
        before = pieces[n - 1][:, :, pieces[n - 1].shape[2] - reach :] if n else nothing
        after = pieces[n + 1][:, :, :reach] if n + 1 < len(pieces) else nothing
        missing = (reach - before.shape[2], reach - after.shape[2])
        yield F.pad(torch.cat([before, piece, after], 2), (0, 0, *missing))


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Z ← ¼ Z (13 − AZ (15 − AZ (7 − AZ))) from Aᵀ/(‖A‖₁‖A‖∞), both norms of each matrix alone."""
    ones, most = (a.abs().sum(dim, keepdim=True).amax((-1, -2), keepdim=True) for dim in (-2, -1))
    z = a.mT / (ones * most)
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * unit - az @ (15 * unit - az @ (7 * unit - az)))
    return z
