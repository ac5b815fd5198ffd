"""One token of many streams by one small kernel, and a step captured as a CUDA graph."""

import struct

import torch
from torch import Tensor

from cosformer.ops.state import State
from cosformer.ops.triton.tiles import padded


def fused_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    theta: Tensor | float,
    slots: Tensor | None,
    eps: float,
    *,
    limit: int | None,
) -> Tensor:
    """`step` on checked tensors `[B, H, 1, ·]`. `limit`: a horizon that the device must check.

    One launch: a program has all columns of a head, so nobody else reads the key sums it changes.
    `theta` as a number spares the launch that a tensor of it takes.
    """
    from cosformer.ops.triton.kernels.step import step_kernel

    key_value, key_sum, position, _ = state
    batch, heads, _, width = k.shape
    value_width = v.shape[3]
    out = q.new_empty(batch, q.shape[1], 1, value_width)
    turn = theta.reshape(-1).contiguous() if isinstance(theta, Tensor) else _bits(theta)
    turns = turn.numel() if isinstance(turn, Tensor) else 0
    apart = position.stride(0) if position.dim() else 0
    rows = padded(width)
    columns = min(padded(value_width), max(32, 4096 // rows))
    if not batch:
        if slots is None:
            position.add_(1)
        return out
    step_kernel[(batch * heads,)](
        q, k, v, out, key_value, key_sum, position, turn, position if slots is None else slots,
        0 if limit is None else limit, heads, q.shape[1] // heads, eps,
        apart, int(turns > 1),
        *_without_length(q), *_without_length(k), *_without_length(v), *_without_length(out),
        *key_value.stride(), *key_sum.stride(),
        K=width, V=value_width, BLOCK_K=rows, BLOCK_V=columns, R=key_value.shape[2],
        RAISED=state.weight == "raised_cosine", SLOTS=slots is not None,
        SHARED=slots is None and not apart, CHECKED=limit is not None, NUMBER=not turns,
        # 16 cells of a state per thread: all its loads are in flight at once, and the registers
        # still leave room for a second program, whose loads overlap the stores of the first.
        num_warps=min(8, max(1, rows * columns // 512)),
    )  # fmt: skip
    return out


def _without_length(rows: Tensor) -> tuple[int, int, int]:
    batch, head, _, lane = rows.stride()
    return batch, head, lane


def _bits(number: float) -> int:
    """A float64 as an integer: Triton would round a float argument to float32."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


class StepGraph:
    """`step` on tensors of one shape, captured once and replayed: no host work between kernels.

    >>> state = State.empty(8, 16, 64, 64, horizon=4096, device="cuda")       # doctest: +SKIP
    >>> graph = StepGraph(*torch.randn(3, 8, 16, 1, 64, device="cuda"), state)  # doctest: +SKIP
    >>> out = graph(q, k, v)                                                    # doctest: +SKIP

    Inputs are copied into the tensors that were captured, and `out` is the captured output: the
    next call overwrites it. Past the horizon the device stops with an error, as in any graph.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        slots: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        from cosformer.ops.step import step

        if not q.is_cuda:
            raise ValueError(f"q must be on a CUDA device, got {q.device.type}")
        self.state = state  # a replay writes to its memory
        q, k, v = self.inputs = (q.detach().clone(), k.detach().clone(), v.detach().clone())
        self.slots = None if slots is None else slots.clone()
        saved = [x.clone() for x in state[:3]]
        with torch.no_grad(), torch.cuda.device(q.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles the kernels, which a capture may not
                step(q, k, v, state, slots=self.slots, eps=eps)
            torch.cuda.current_stream().wait_stream(side)
            for now, before in zip(state[:3], saved, strict=True):
                now.copy_(before)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = step(q, k, v, state, slots=self.slots, eps=eps)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor | None = None) -> Tensor:
        """The next token; `slots` only if the graph was captured with some."""
        if (slots is None) != (self.slots is None):
            raise ValueError("slots must be given with every call, or not at all, as when captured")
        for mine, given in zip(self.inputs, (q, k, v), strict=True):
            for what in ("shape", "dtype", "device"):
                wanted, found = getattr(mine, what), getattr(given, what)
                if wanted != found:
                    raise ValueError(f"{what} must be that captured, {wanted}, got {found}")
            mine.copy_(given.detach())
        if slots is not None and self.slots is not None:
            self.slots.copy_(slots)
        self.graph.replay()
        return self.out
