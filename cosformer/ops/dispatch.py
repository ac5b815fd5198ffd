"""Which code computes a problem."""

from torch import Tensor

from cosformer.check import check_choice
from cosformer.ops.autograd.function import chunked, fused
from cosformer.ops.problem.problem import Problem
from cosformer.ops.reference import reference
from cosformer.runtime import HAS_TRITON, full_precision, on_device_of

IMPLEMENTATIONS = {"reference": reference, "chunked": chunked, "triton": fused}


def auto_impl(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str:
    """What `impl="auto"` stands for: kernels where they can serve, else plain torch."""
    if q.is_cuda and why_not_triton(q, k, v, problem) is None:
        return "triton"
    return "chunked"


def why_not_triton(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    from cosformer.ops.triton.operators import unsupported

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
