"""Which code computes a problem."""

from importlib.util import find_spec

import torch
from torch import Tensor

from cosformer.check import check_choice
from cosformer.ops.chunked import chunked, fused
from cosformer.ops.memo import eager
from cosformer.ops.problem import Problem, full_precision, on_device_of
from cosformer.ops.reference import reference

HAS_TRITON = find_spec("triton") is not None
ROOM = 180 * 2**10
"""Bytes of shared memory that a program takes, at most: on Hopper there are 228 · 2¹⁰."""
IMPLEMENTATIONS = {"reference": reference, "chunked": chunked, "triton": fused}


def auto_impl(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str:
    """What `impl="auto"` stands for: kernels where they can serve, else plain torch."""
    if q.is_cuda and why_not_triton(q, k, v, problem) is None:
        return "triton"
    return "chunked"


def why_not_triton(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    from cosformer.ops.fused import unsupported

    if not HAS_TRITON:
        return "the package triton"
    return unsupported(q, k, v, problem)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    state: Tensor | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, T, V]`, and the state `[B, H, R, D, V(+1)]` after the keys if one came in."""
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    chosen = auto_impl(q, k, v, problem) if impl == "auto" else impl
    if impl == "triton" and (reason := why_not_triton(q, k, v, problem)):
        raise ValueError(f"impl='triton' needs {reason}: use impl='chunked'")
    with full_precision(q), on_device_of(q):
        return IMPLEMENTATIONS[chosen](q, k, v, problem, state)


def kernels_serve(x: Tensor) -> bool:
    """Whether kernels that are no operators of torch may serve x: on a GPU, here and now."""
    there = HAS_TRITON and x.is_cuda and x.dtype != torch.float64
    return there and x.numel() > 0 and eager(x, x, x)


def has_room(x: Tensor) -> bool:
    """Whether the largest programs fit where x is; they do under Triton's interpreter."""
    if not x.is_cuda:
        return True
    return torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor > ROOM
