"""Calls on a Hopper GPU repeated in C++, where Python takes longer than the kernels.

A call runs as ever while a tape notes its launches; the next one like it is replayed by
`host.cpp`, and so is its backward. This needs a build (`native.py`).
"""

import functools
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosformer.memo import KINDS
from cosformer.ops.autograd import Saved, gradients
from cosformer.ops.hopper import aligned, watching
from cosformer.ops.problem import LONGEST, Asked, Given, Grads
from cosformer.ops.replay.native import loaded_for
from cosformer.ops.replay.tape import Tape
from cosformer.runtime import eager, recorded

PROGRAMS = 256
MOST_KEPT = 1 << 21  # bytes of ψ and L that a program keeps

_programs: dict[Any, Any] = {}  # False for calls that cannot be replayed
_lock = threading.Lock()


def replayed(
    ordinary: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]
) -> Tensor:
    """What `ordinary` returns for these, by a program where one is kept."""
    if torch.compiler.is_compiling() or (host := loaded_for(q)) is None:
        return ordinary(q, k, v, arguments)
    kinds = tuple(map(type, arguments))  # True equals 1
    if not KINDS.issuperset(kinds) or (like := host.key_of(q, k, v)) is None:
        return ordinary(q, k, v, arguments)
    key = (ordinary, like, arguments, kinds)
    program = _programs.get(key)
    if program is None:
        return _remembered(host, key, ordinary, q, k, v, arguments)
    found = None if program is False else host.replay(program, q, k, v)
    return ordinary(q, k, v, arguments) if found is None else found


def _remembered(
    host: Any,
    key: Any,
    ordinary: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: tuple[Any, ...],
) -> Tensor:
    """An ordinary call, and a program for the next one if launches alone make it up."""
    captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured or not eager(q, k, v):
        return ordinary(q, k, v, arguments)
    tape = Tape((q, k, v))
    with watching(tape):
        out = ordinary(q, k, v, arguments)
    program = None
    short = max(q.shape[2], k.shape[2]) <= LONGEST
    if short and sum(x.nbytes for x in tape.constants) <= MOST_KEPT and tape.given is not None:
        program = _program(host, tape, functools.partial(_backward, host, tape.given))
    with _lock:
        while len(_programs) >= PROGRAMS:
            _programs.pop(next(iter(_programs)))
        _programs[key] = False if program is None else program
    return out


def _backward(
    host: Any,
    given: Given,
    saved: list[Tensor],
    grad: Tensor | None,
    grad_total: Tensor | None,
    asked: list[bool],
) -> tuple[list[Tensor], Any]:
    """Those gradients of q, k and v that are asked for, and a program for the next ones or None.

    `given` is what the first call was given; its q, k and v are not those of this one.
    """
    q, k, v, out, total, *kept = saved
    whole = Saved(
        q, k, v, given.decay, given.state, *given.constants,
        out, total, None, kept[0] if kept else None,
    )  # fmt: skip
    # a program takes no decay or state that learns
    of = functools.partial(gradients, whole, given.options)

    def found(grad: Tensor | None) -> list[Tensor]:
        by_name = of(Grads(grad, grad_total, None), Asked(*asked))
        return [x for x in by_name if x is not None]

    if grad is None or grad_total is not None or recorded() or not eager(q, k, grad):
        return found(grad), None
    straight = aligned(grad)
    tape = Tape((*saved, straight))
    with watching(tape):
        results = found(straight)
    return results, _program(host, tape, None, copied=straight is not grad)


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
