"""A short convolution along the tokens, each column by itself, that streams."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_tensor
from cosformer.mechanisms import Split


class ShortConvolution(nn.Conv1d):
    """out_t = bias + Σ_n weight_n ⊙ x_{t − reach + n}, over `width` neighbouring tokens.

    Causal: the last `width` tokens, reach = width − 1. Otherwise as many on either side, reach =
    (width − 1)/2, for which the width must be odd. Tokens before the first, after the last and
    behind a key_mask count as zeros. The weights begin as those of nn.Conv1d do: begun as the
    identity, a model learns worse.
    """

    def __init__(self, columns: int, width: int, **made: Any) -> None:
        super().__init__(columns, columns, width, groups=columns, **made)
        self.columns, self.width = columns, width

    def empty_state(self, batch: int) -> Tensor:
        """What a stream remembers, the last inputs `[B, width − 1, columns]`, before the first."""
        return self.weight.new_zeros(batch, self.width - 1, self.columns)

    def check_state(self, state: Any, batch: int) -> None:
        """Refuse a state that is not of so many streams through such a convolution."""
        check_tensor("state.conv", state)
        if list(state.shape) != [batch, self.width - 1, self.columns]:
            raise ValueError(
                f"state.conv must be {[batch, self.width - 1, self.columns]}, the last inputs of "
                f"the convolution, got {list(state.shape)}"
            )

    def check_centred(self) -> None:
        """Refuse to look at both sides by a width that has no middle."""
        if self.width % 2 == 0:
            raise ValueError(
                f"conv must be odd without causal=True, to be centred, got {self.width}: "
                f"make it {self.width + 1}"
            )

    def forward(  # type: ignore[override]  # nn.Conv1d has no mask and no state
        self,
        x: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None = None,
        before: Tensor | None = None,
        split: Split | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x `[B, T, columns]` convolved, and the last inputs, for the next tokens of a stream.

        before: the inputs before x in a stream, from `empty_state` or the last call; None: x is a
            whole sequence.
        split: the ranks of which each has a stretch of the sequence.
        """
        if not causal:
            self.check_centred()
        if key_mask is not None:
            x = torch.where(key_mask[..., None], x, 0)
        around = self.width - 1
        left = around if causal else around // 2
        if before is not None:
            padded = torch.cat([before, x], 1)
        elif split is None or not around:
            padded = F.pad(x, (0, 0, left, around - left))
        else:
            earlier, later = split.neighbours(x, left, around - left)
            padded = torch.cat([earlier, x, later], 1)
        out, length = cast(Tensor, self.bias), x.shape[1]
        for n, weight in enumerate(self.weight[:, 0].unbind(1)):  # less memory than F.conv1d
            out = torch.addcmul(out, padded[:, n : n + length], weight)
        # A copy: a view would keep all tokens of a long prompt in memory.
        last = None if before is None else padded[:, length:].clone()
        return out.to(x.dtype), last  # autocast has rounded x, not the weights
