"""Problems that follow from lengths and numbers alone, kept for the next call.

Positions, angles and ψ take a dozen small launches on a GPU: more time on the host than short
attention takes on the device.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cosformer.ops.problem import Problem, basis, compute_dtype

ENTRIES = 32


class Numbers(tuple[float, ...]):
    """One for every head: unlike a tensor, they tell problems apart."""


KINDS = {bool, int, float, str, type(None), Numbers}
PLAIN = (Tensor, Parameter)
LONGEST = 1 << 16  # positions: above it a call takes longer than making them

_kept: dict[Any, Problem] = {}
_lock = threading.Lock()
_captured: dict[int, Problem] = {}  # a CUDA graph reads their memory for as long as it lives


def eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether operations run here and now on these: no tracer, mode, transform or subclass."""
    plain = type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
    return plain and not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    )


def remembered(values: tuple[Any, ...], q: Tensor, make: Callable[[], Problem]) -> Problem:
    """What `make` returns, with ψ; made once for the same values, device and stream.

    Only numbers and names tell problems apart: with a tensor among the values nothing is kept.
    """
    kinds = tuple(map(type, values))
    if not KINDS.issuperset(kinds) or q.is_meta or not eager(q, q, q):
        return make()
    alike = (values, kinds, compute_dtype(q.dtype), q.device)  # kinds: True equals 1
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        # Whatever stream made it has finished: a capture begins with all of them at rest.
        found = next((kept for key, kept in list(_kept.items()) if key[0] == alike), None)
        if found is None:
            return make()
        _captured[id(found)] = found
        return found
    stream = torch._C._cuda_getCurrentRawStream(q.device.index) if q.is_cuda else 0
    found = _kept.get((alike, stream))
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = with_basis(make(), compute_dtype(q.dtype))
        if max(found.query_position.numel(), found.key_position.numel()) <= LONGEST:
            with _lock:
                while len(_kept) >= ENTRIES:
                    _kept.pop(next(iter(_kept)))
                _kept[alike, stream] = found
    return found


def with_basis(problem: Problem, dtype: torch.dtype) -> Problem:
    """The problem with ψ at its queries and keys, one tensor where both stand alike."""
    turn = (problem.theta, problem.weight, dtype)
    at_queries = basis(problem.query_position, *turn)
    same = (
        not torch.compiler.is_compiling()  # dynamo takes no tensor twice
        and problem.query_start == 0
        and problem.query_position.shape == problem.key_position.shape
    )
    at_keys = at_queries if same else basis(problem.key_position, *turn)
    return problem._replace(query_basis=at_queries, key_basis=at_keys)
