"""Nyströmformer ("Nyströmformer: A Nyström-Based Algorithm for …", Xiong et al., 2021)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.mechanisms.traits import Cost, Traits
from cosformer.mechanisms.whole import Whole
from cosformer.ops.check import check_whole


class Nystromformer(Whole):
    """Softmax through landmarks, the means of stretches of equal length (to within a token)."""

    traits = Traits(causal="no", cross=False, positions="absolute", normalised=False)
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
        left, middle, right = self._factors(q, k)
        return left @ (middle @ (right @ v)) + self._convolve(v)

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        left, middle, right = self._factors(q, k)
        unit = torch.eye(q.shape[2], dtype=q.dtype, device=q.device)
        return left @ middle @ right + self._convolve(unit.expand(*q.shape[:2], -1, -1))

    def cost(self, length: int) -> Cost:
        width, count = self.width, min(self.landmarks, length)
        scores = 2 * length * count * (4 * width + 5) + 4 * length * count * width
        inverse = 8 * self.iterations * count**3
        conv = 2 * length * self.kernel * width
        numbers = (
            2 * (self.heads + self.key_heads) * length * width + 2 * self.heads * length * count
        )
        return Cost(self.heads * (scores + inverse + conv), 4 * numbers)

    def _factors(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = q.shape[2]
        count = min(self.landmarks, length)
        q = q / math.sqrt(self.width)
        stretch = torch.arange(length, device=q.device) * count // length
        mean = F.one_hot(stretch, count).to(q.dtype)  # [n m]
        mean = (mean / mean.sum(0)).mT
        marks, keys = mean @ q, mean @ k
        left, middle, right = q @ keys.mT, marks @ keys.mT, marks @ k.mT
        return (
            left.softmax(-1),
            pseudo_inverse(middle.softmax(-1), self.iterations),
            right.softmax(-1),
        )

    def _convolve(self, v: Tensor) -> Tensor:
        """Each head's own weights over neighbouring tokens, alike for its channels."""
        if not self.kernel:
            return torch.zeros_like(v)
        weight = self.conv.to(v.dtype)[:, None, :, None]  # [H 1 kernel 1]
        return F.conv2d(v, weight, padding=(self.kernel // 2, 0), groups=self.heads)


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Z ← ¼ Z (13 − AZ (15 − AZ (7 − AZ))) from Aᵀ/(‖A‖₁‖A‖∞), both norms of each matrix alone."""
    ones, most = (a.abs().sum(dim, keepdim=True).amax((-1, -2), keepdim=True) for dim in (-2, -1))
    z = a.mT / (ones * most)
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * unit - az @ (15 * unit - az @ (7 * unit - az)))
    return z
