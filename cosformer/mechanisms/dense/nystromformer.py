"""Nyströmformer ("Nyströmformer: A Nyström-Based Algorithm for …", Xiong et al., 2021)."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms.sdpa import by_products
from cosformer.mechanisms.traits import Cost
from cosformer.mechanisms.whole import Whole
from cosformer.runtime import compute_dtype


class Nystromformer(Whole):
    """Softmax through landmarks, the means of stretches of equal length (to within a token)."""

    traits = replace(Whole.traits, normalised=False)
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
        marks, keys = self._landmarks(q, k)
        middle = pseudo_inverse((marks @ keys.mT).softmax(-1), self.iterations)
        marks, keys = marks.to(q.dtype), keys.to(q.dtype)
        mixed = middle @ by_products(marks, k, v, 1.0).to(middle.dtype)
        out = by_products(q, keys, mixed.to(q.dtype), self.width**-0.5)
        return out + self._convolve(v) if self.kernel else out

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        marks, keys = self._landmarks(q, k)
        left = (q / math.sqrt(self.width) @ keys.mT).softmax(-1)
        middle = pseudo_inverse((marks @ keys.mT).softmax(-1), self.iterations)
        dense = left @ middle @ (marks @ k.mT).softmax(-1)
        if not self.kernel:
            return dense
        unit = torch.eye(q.shape[2], dtype=q.dtype, device=q.device)
        return dense + self._convolve(unit.expand(*q.shape[:2], -1, -1))

    def cost(self, length: int) -> Cost:
        width, count = self.width, min(self.landmarks, length)
        scores = 2 * length * count * (4 * width + 5) + 4 * length * count * width
        inverse = 8 * self.iterations * count**3
        conv = 2 * length * self.kernel * width
        numbers = self.numbers(length) + 2 * self.heads * length * count
        return Cost(self.heads * (scores + inverse + conv), 4 * numbers)

    def _landmarks(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Means of stretches of q/√d and of k, `[B, H, m, D]`, in float32 at least."""
        marks, keys = (means(x, min(self.landmarks, x.shape[2])) for x in (q, k))
        return marks / math.sqrt(self.width), keys

    def _convolve(self, v: Tensor) -> Tensor:
        """Σ_j conv_hj v_(t+j): each head's own weights over neighbouring tokens."""
        weight, reach = self.conv.to(v.dtype)[:, None, :, None], self.kernel // 2  # [H 1 kernel 1]
        return F.conv2d(F.pad(v, (0, 0, reach, reach)), weight, groups=self.heads)


def means(x: Tensor, count: int) -> Tensor:
    """Means `[B, H, count, D]` of stretches of tokens, the last ones longer by one if need be."""
    size, longer = x.shape[2] // count, x.shape[2] % count  # a graph has no divmod
    if longer:
        counts = count - longer, longer
        parts = x.split([counts[0] * size, longer * (size + 1)], 2)
        return torch.cat([means(*part) for part in zip(parts, counts, strict=True)], 2)
    return x.unflatten(2, (count, size)).sum(3, dtype=compute_dtype(x.dtype)) / size


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Z ← ¼ Z (13 − AZ (15 − AZ (7 − AZ))) from Aᵀ/(‖A‖₁‖A‖∞), both norms of each matrix alone."""
    ones, most = (a.abs().sum(dim, keepdim=True).amax((-1, -2), keepdim=True) for dim in (-2, -1))
    z = a.mT / (ones * most)
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * unit - az @ (15 * unit - az @ (7 * unit - az)))
    return z
