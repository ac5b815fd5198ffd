"""Which code computes a problem."""

from torch import Tensor

from cosformer.ops.check import check_choice
from cosformer.ops.chunked import chunked
from cosformer.ops.problem import Problem, full_precision
from cosformer.ops.reference import reference

IMPLEMENTATIONS = {"reference": reference, "chunked": chunked}


def auto_impl(device: str) -> str:
    """What `impl="auto"` stands for on a device type. An explicit choice never falls back."""
    return "chunked"


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
    chosen = auto_impl(q.device.type) if impl == "auto" else impl
    with full_precision(q):
        return IMPLEMENTATIONS[chosen](q, k, v, problem, state)
