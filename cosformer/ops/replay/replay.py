"""Calls on a Hopper GPU repeated in C++, where Python takes longer than the kernels.

A call runs as ever while a tape notes its launches; the next one like it is replayed by
`host.cpp`, and so is its backward. This needs a build (`native.py`).
"""

import functools
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.autograd.function import _Attention
from cosformer.ops.hopper.passes import aligned
from cosformer.ops.problem.memo import KINDS, LONGEST
from cosformer.ops.replay.native import loaded_for
from cosformer.ops.replay.tape import Tape, taping
from cosformer.runtime import eager, recorded

PROGRAMS = 256
MOST_KEPT = 1 << 21  # bytes of ψ and L that a program keeps

_programs: dict[Any, Any] = {}  # False for calls that cannot be replayed
_lock = threading.Lock()


def replayed(
    ordinary: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> Tensor:
    """What `ordinary` returns for these, by a program where one is kept."""
    if torch.compiler.is_compiling() or (host := loaded_for(q)) is None:
        return ordinary(q, k, v, *options)
    kinds = tuple(map(type, options))  # True equals 1
    if not KINDS.issuperset(kinds) or (like := host.key_of(q, k, v)) is None:
        return ordinary(q, k, v, *options)
    key = (ordinary, like, options, kinds)
    program = _programs.get(key)
    if program is None:
        return _remembered(host, key, ordinary, q, k, v, *options)
    found = None if program is False else host.replay(program, q, k, v)
    return ordinary(q, k, v, *options) if found is None else found


def _remembered(
    host: Any, key: Any, ordinary: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor,
    *options: Any,
) -> Tensor:  # fmt: skip
    """An ordinary call, and a program for the next one if launches alone make it up."""
    captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured or not eager(q, k, v):
        return ordinary(q, k, v, *options)
    with taping(q, k, v) as tape:
        out = ordinary(q, k, v, *options)
    program = None
    short = max(q.shape[2], k.shape[2]) <= LONGEST
    if short and sum(x.nbytes for x in tape.constants) <= MOST_KEPT:
        program = _program(host, tape, functools.partial(_backward, host, tape.arguments[3:-1]))
    with _lock:
        while len(_programs) >= PROGRAMS:
            _programs.pop(next(iter(_programs)))
        _programs[key] = False if program is None else program
    return out


def _backward(
    host: Any, given: tuple[Any, ...], saved: list[Tensor], grad: Tensor | None,
    grad_total: Tensor | None, asked: list[bool],
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Those gradients of q, k and v that are asked for, and a program for the next ones or None.

    `given` is what `hopper.forward` got beside q, k and v.
    """
    q, k, v, out, total, *kept = saved
    *tensors, causal, feature_map, rule, eps, scale = given
    context = SimpleNamespace(
        saved_tensors=(q, k, v, *tensors, None, None, out, total, None, *kept),
        needs_input_grad=(*asked, False, False),  # a program takes no decay or state that learns
        causal=causal, feature_map=feature_map, rule=rule, eps=eps, scale=scale, kernels=True,
    )  # fmt: skip

    def gradients(grad: Tensor | None) -> list[Tensor]:
        found = _Attention.backward(context, grad, grad_total, None)[:3]
        return [x for x in found if x is not None]

    if grad is None or grad_total is not None or recorded() or not eager(q, k, grad):
        return gradients(grad), None
    whole = aligned(grad)
    with taping(*saved, whole) as tape:
        found = gradients(whole)
    return found, _program(host, tape, None, copied=whole is not grad)


def _program(host: Any, tape: Tape, fallback: Any, *, copied: bool = False) -> Any:
    """The tape as `host.cpp` plays it; None where it cannot."""
    results = tape.results()
    if results is None:
        return None
    steps = []
    for (launch, pointers, numbers, fresh), done in zip(tape.steps, tape.done(), strict=True):
        function, columns, rows, _, threads, _, _, shared = launch.shape
        fixed = (pointer if n is None else 0 for pointer, n in zip(pointers, numbers, strict=True))
        arguments = struct.pack(f"{len(pointers)}Q", *fixed) + launch.tail
        places = [(8 * at, n) for at, n in enumerate(numbers) if n is not None]
        shape = (function.value or 0, columns, rows, threads, shared)
        steps.append(host.Step(*shape, arguments, launch.offsets, places, fresh, done))
    stream = torch._C._cuda_getCurrentRawStream(tape.allocated[0].device.index)
    return host.program(steps, tape.allocated, tape.constants, results, stream, copied, fallback)
