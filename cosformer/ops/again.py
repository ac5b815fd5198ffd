"""Calls on a GPU that are like an earlier one: what was checked and prepared then serves again.

Checking a call in Python takes longer than short sequences take on a Hopper GPU.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosformer.memo import KINDS
from cosformer.ops.autograd import Repeated, given_for
from cosformer.ops.dispatch import choose, why_not
from cosformer.ops.problem import LONGEST, Problem
from cosformer.runtime import eager

CALLS = 256
MOST_KEPT = 1 << 21  # bytes of ψ and L for one call: what has longer ones takes longer than Python

_calls: dict[Any, Repeated | None] = {}  # None for calls that are made up of more than one pass
_lock = threading.Lock()


def attend_again(
    ordinary: Callable[..., Tensor],
    problem_of: Callable[..., Problem],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Any,
) -> Tensor:
    """What `ordinary` returns for these; `problem_of` makes their problem.

    Two calls are alike if their tensors have the same shapes, strides, dtypes, device and
    alignment, and their arguments are the same numbers and names. Gates are such a tensor.
    """
    gates = arguments.log_decay
    fixed = arguments if gates is None else arguments._replace(log_decay=None)
    kinds = tuple(map(type, fixed))  # True equals 1
    tensors = (q, k, v) if gates is None else (q, k, v, gates)
    if not KINDS.issuperset(kinds) or not eager(*tensors) or torch.is_autocast_enabled("cuda"):
        return ordinary(q, k, v, arguments)
    device = q.device
    if torch.cuda.current_device() != device.index or torch.cuda.is_current_stream_capturing():
        return ordinary(q, k, v, arguments)
    key = (
        ordinary, fixed, kinds, device, torch._C._cuda_getCurrentRawStream(device.index),
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        gates is None or (gates.shape, gates.stride(), gates.dtype, gates.device),
    )  # fmt: skip
    found = _calls.get(key)
    if found is not None:
        return found(q, k, v, gates)
    out = ordinary(q, k, v, arguments)  # which checks them
    if key not in _calls:
        found = _one_pass(q, k, v, problem_of(q, k, arguments), arguments)
        with _lock:
            while len(_calls) >= CALLS:
                _calls.pop(next(iter(_calls)))
            _calls[key] = found
    return out


def _one_pass(q: Tensor, k: Tensor, v: Tensor, problem: Problem, arguments: Any) -> Repeated | None:
    """The call as one pass of the kernels for Hopper; None if it needs more than one pass."""
    impl, by_token = arguments.impl, problem.gates is not None
    if by_token and (problem.gates is not arguments.log_decay or problem.query_decay is not None):
        return None  # what a call makes of its gates is more than their sums
    chosen = choose(q, k, v, problem) if impl == "auto" else impl
    unlike = problem.weight == "raised_cosine" or max(q.shape[2], k.shape[2]) > LONGEST
    if chosen != "hopper" or unlike or why_not("hopper", q, k, v, problem):
        return None
    given = given_for(q, k, v, problem, None, impl=chosen, keep_state=False)
    decay = None if by_token else given.decay
    learned = decay is not None and decay.requires_grad
    if given.q is not q or given.k is not k or learned:
        return None
    if sum(x.nbytes for x in (decay, *given.constants) if x is not None) > MOST_KEPT:
        return None
    return Repeated(decay, given.constants, given.options)
