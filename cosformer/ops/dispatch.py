"""Which implementation computes a problem: `choose` is a pure function of the call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cosformer.check import check_choice
from cosformer.ops.autograd import attend, given_for
from cosformer.ops.problem import (
    PROBLEMS,
    WEIGHTS,
    Placement,
    Problem,
    build,
    check_decays_there,
    check_placement,
    decaying_by_token,
)
from cosformer.ops.raised import raised
from cosformer.ops.reference import reference
from cosformer.ops.unequal import in_pieces
from cosformer.runtime import eager, full_precision, on_device_of

IMPLEMENTATIONS = ("reference", "chunked", "triton", "hopper")
IMPLS = ("auto", *IMPLEMENTATIONS)


def choose(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str:
    """What `impl="auto"` stands for.

    | tensors                              | implementation                               |
    |--------------------------------------|----------------------------------------------|
    | on a CPU, or float64                 | `chunked`                                    |
    | on a Hopper GPU, as `hopper` needs   | `hopper`                                     |
    | on any CUDA GPU, as `triton` needs   | `triton`                                     |
    | on any other device, or else         | `chunked`                                    |

    `why_not` says what an implementation needs. Inside a graph, a transform or a mode it is not
    known where tensors will lie: there `auto` stands for `kernels`, which chooses between hopper
    and triton when it runs.
    """
    if not q.is_cuda:
        return "chunked"
    if not eager(q, k, v):
        return "chunked" if why_not("triton", q, k, v, problem) else "kernels"
    return next((x for x in ("hopper", "triton") if not why_not(x, q, k, v, problem)), "chunked")


def why_not(impl: str, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    """What an implementation needs and does not get; None if it can compute the problem."""
    if impl == "hopper":
        from cosformer.ops import hopper

        return hopper.why_not(q, k, v, problem)
    if impl == "triton":
        from cosformer.ops import triton

        return triton.why_not(q, k, v, problem)
    return None


def placed(
    q: Tensor,
    k: Tensor,
    placement: Placement,
    theta: Callable[[], Tensor],
    *,
    own_horizons: bool = False,
    decays: str = "",
    weight: str,
    **about: Any,
) -> Problem:
    """The problem at checked positions, without its decays and mask; see `build`.

    `own_horizons`: whether the horizon of each packed sequence is its length. `decays` are the
    names of the arguments that ask for a decay.
    """
    check_placement(q, k, placement)
    if decays:
        check_decays_there(q, k, placement, decays)
    bounds = placement.cu_seqlens
    if bounds is not None:
        from cosformer.ops import hopper

        if hopper.places(q, k, bounds, weight):
            angle = None if own_horizons else theta()
            packed = hopper.place_packed(bounds, q.shape[2], angle, WEIGHTS[weight])
            return build(q, k, placement, packed.theta, packed, weight=weight, **about)
    return build(q, k, placement, theta(), weight=weight, **about)


def kept_problem(q: Tensor, k: Tensor, given: Any, make: Callable[[], Problem]) -> Problem:
    """The problem of a call without a state, for checked tensors.

    `make` makes it without mask and gates: once for calls whose other arguments are the same.
    """
    fixed = given._replace(key_mask=None, log_decay=None, impl="")
    values = (*q.shape[1:3], *k.shape[1:3], given.log_decay is None, *fixed)
    return with_tensors(PROBLEMS.recall_for(q, values, make), q, k, given)


def with_tensors(problem: Problem, q: Tensor, k: Tensor, given: Any) -> Problem:
    """The problem with the mask and the gates of `given`, which differ from call to call."""
    if given.log_decay is not None:
        problem = decaying_by_token(problem, given.log_decay, q, k)
    return problem if given.key_mask is None else problem._replace(key_mask=given.key_mask)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    state: Tensor | None = None,
    *,
    impl: str = "auto",
    keep_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, T, V]`, and the state `[B, H, R, D, V(+1)]` after the keys.

    The state may be None unless one came in or `keep_state` asks for it.
    """
    if impl not in IMPLS:
        check_choice("impl", impl, IMPLS)
    if problem.weight == "raised_cosine" and impl != "reference":
        return raised(compute, q, k, v, problem, state, impl)
    chosen = choose(q, k, v, problem) if impl == "auto" else impl
    if impl != "auto" and (reason := why_not(impl, q, k, v, problem)):
        raise ValueError(f"impl={impl!r} needs {reason}: use impl='auto'")
    with full_precision(q), on_device_of(q):
        if chosen == "reference":
            return reference(q, k, v, problem, state)
        if problem.causal and (problem.query_start != 0 or q.shape[2] != k.shape[2]):
            return in_pieces(compute, q, k, v, problem, impl)
        keep_state = keep_state or state is not None
        return attend(given_for(q, k, v, problem, state, impl=chosen, keep_state=keep_state))
