"""Launches of the kernels in `sweep.cu`, prepared once for tensors of the same shapes.

A plan knows how a sequence is cut into segments, and keeps the arguments of every launch that do
not change from call to call.
"""

import functools
import math
import struct
import threading
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.hopper.nvrtc import Kernel, Launch, cubin
from cosformer.ops.hopper.roles import MAPS, RULES, Sweep, roles_of
from cosformer.ops.hopper.source import source
from cosformer.ops.problem import Given, per_head

CHUNK = 64
THREADS = 640
# `struct Params` of `sweep.cu`: first its pointers, then what `TAIL` packs, field by field.
POINTERS = 12
TAIL = struct.Struct("22q8i2f")
PLANS = 256  # kept at a time; the oldest goes first

PerRow = tuple[Tensor, Tensor]  # 1/D and δ, each `[B, H, T]`


@functools.cache
def choose_segments(
    programs: int, length: int, processors: int, *, extra: float = 0.0, weight: int = 192
) -> int:
    """The number of segments of a sequence with which a sweep ends earliest.

    A program occupies one multiprocessor. Its cost is the number of its rows, and `weight` more if
    it also loads or stores a state. A sequence that is cut takes a second, smaller sweep first,
    which sums the states: `extra` is its cost relative to a whole sweep.
    """
    best, least = 1, float("inf")
    for segments in range(1, max(1, min(64, length // (4 * CHUNK))) + 1):
        rounds = -(-programs * segments // processors)
        cost = rounds * (length / segments + weight * (segments > 1)) * (1 + extra * (segments > 1))
        if cost < 0.98 * least:
            best, least = segments, cost
    return best


class Plan:
    """All launches for tensors of one set of shapes and strides, each prepared on its first use."""

    def __init__(self, given: Given, dots: bool) -> None:
        q, k, v, options = given.q, given.k, given.v, given.options
        self.device, self.rule = q.device.index, RULES[options.rule]
        self.eps, self.scale = options.eps, options.scale
        self.sums = options.rule != "none"
        states = given.constants.query_basis.shape[3]
        self._state = (states, q.shape[3], v.shape[3] + self.sums)
        self._launches: dict[Any, Launch] = {}
        masked, decays = given.constants.key_mask is not None, given.decay is not None
        about = (states, MAPS[options.feature_map], self.rule, masked, decays, dots)
        self.roles = roles_of(q.shape[3], v.shape[3], *about)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count

        def rows(like: Tensor, blocks: int, extra: float = 0.0) -> int:
            """How many rows make a segment."""
            programs, length = like.shape[0] * like.shape[1] * blocks, like.shape[2]
            segments = choose_segments(programs, length, processors, extra=extra)
            return -(-length // (segments * CHUNK)) * CHUNK

        self.gather_queries, self.gather_keys = rows(q, _blocks(q)), rows(k, _blocks(v))
        self.read_queries, self.read_keys = rows(q, 1), rows(k, 1)
        self.causal_rows = rows(q, _blocks(v), extra=0.6)

    def states(self, like: Tensor, segments: int = 1) -> Tensor:
        """Memory for states `[B, H, segments, R, D, V(+1)]`, without `segments` if that is 1."""
        several = (segments,) if segments > 1 else ()
        return like.new_empty(*like.shape[:2], *several, *self._state, dtype=torch.float32)

    def dots(self, rows: Tensor) -> Tensor | None:
        """Memory for φ(row)·dφ(row) `[B, H, T, blocks]`; None if the decay needs no gradient."""
        if not self.roles.dq.DOTS:
            return None
        return rows.new_empty(*rows.shape[:3], _blocks(rows), dtype=torch.float32)

    def since(self, decay: Tensor) -> Tensor:
        """log₂ of the decay since each row's chunk began, `[b, h, T, 1]`, T in whole chunks."""
        batch, heads, length = decay.shape
        padded = -(-length // CHUNK) * CHUNK
        since = decay.new_empty(batch, heads, padded, 1, dtype=torch.float32)
        launch = self._launches.get("since")
        if launch is None:
            it = kernel("since", Sweep(64, 1), self.device)
            grid, tail = (batch * heads, -(-padded // 256)), struct.pack("2i", length, padded)
            launch = Launch(it, grid, 256, self.device, 2, tail, (0, 8, 16, 20))
            self._launches["since"] = launch
        launch(decay, since)
        return since

    def sweep(
        self, options: Sweep, x: Tensor, y: Tensor, z: Tensor, basis: Tensor | None, rows: int, *,
        out: Tensor | None = None, gate: Tensor | None = None, total: Tensor | None = None,
        by_row: PerRow | None = None, mask: Tensor | None = None,
        first: Tensor | None = None, last: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One launch of the sweep, whose segments have `rows` rows.

        Without `out` it only sums states. `first` is read, `last` is written: the states before
        and after each segment.
        """
        launch = self._launches.get(options)
        if launch is None:
            batch, heads, length, contracted = x.shape
            columns, segments = z.shape[3], -(-length // rows)
            blocks = 1 if options.PAIRED else _blocks(z)
            tail = TAIL.pack(
                *x.stride()[:3], *y.stride()[:3], *z.stride()[:3], *_strides(gate), *_strides(out),
                *per_head(basis), length, *_steps(first), *_steps(last),
                heads, length, rows, segments, blocks, contracted, columns,
                (contracted if options.TURNED else columns) + self.sums, self.eps, self.scale,
            )  # fmt: skip
            grid = (batch * heads * segments * blocks, 1)
            it = kernel("sweep", options, self.device)
            launch = Launch(it, grid, THREADS, self.device, POINTERS, tail)
            self._launches[options] = launch
        inverse, delta = by_row or (None, None)
        launch(x, y, z, gate, out, total, inverse, delta, basis, first, last, mask)

    def gather(
        self, options: Sweep, y: Tensor, z: Tensor, basis: Tensor | None, rows: int,
        start: Tensor | None, mask: Tensor | None, by_row: PerRow | None = None, *, causal: bool,
        total: bool = True, decay: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The state that each segment starts with, and the one after all of them if `total`."""
        segments = -(-y.shape[2] // rows)
        states = self.states(y, segments)
        self.sweep(options, y, y, z, basis, rows, last=states, mask=mask, by_row=by_row)
        if segments == 1 and start is None:
            return states, states
        last = self.states(y) if total else None
        key = ("edges", options)
        launch = self._launches.get(key)
        if launch is None:
            size = math.prod(self._state)
            steps = (0, 0) if decay is None else per_head(decay)
            whole = (*y.shape[1:3], rows, segments, causal, options.REVERSE)
            grid = (y.shape[0] * y.shape[1], -(-size // 256))
            it = kernel("edges", Sweep(64, 1, DECAY=options.DECAY), self.device)
            places = (*range(0, 7 * 8, 8), *range(56, 80, 4))
            tail = struct.pack("3q6i", size, *steps, *whole)
            launch = Launch(it, grid, 256, self.device, 4, tail, places)
            self._launches[key] = launch
        launch(states, start, last, decay)
        return states, last

    def prepare(self, grad: Tensor, out: Tensor, total: Tensor) -> PerRow:
        """1/D and δ = −dout·out·dD/dtotal of every row."""
        by_row = total.new_empty(total.shape), total.new_empty(total.shape)
        launch = self._launches.get("prepare")
        if launch is None:
            width, rows = out.shape[3], total.numel()
            wide = 64 if width <= 64 else 128
            steps = (*grad.stride()[:3], *out.stride()[:3], rows)
            tail = struct.pack("7q3if", *steps, *total.shape[1:], width, self.eps)
            it = kernel("prepare", Sweep(wide, 1, RULE=self.rule), self.device)
            places = (*range(0, 12 * 8, 8), 96, 100, 104, 108)
            grid = (-(-rows * wide // 2048), 1)
            launch = Launch(it, grid, 256, self.device, 5, tail, places)
            self._launches["prepare"] = launch
        launch(grad, out, total, *by_row)
        return by_row


_plans: dict[Any, Plan] = {}
_lock = threading.Lock()


def plan_of(given: Given, *others: Any, dots: bool = False) -> Plan:
    """The plan for these shapes and strides; `others` is all else that a launch depends on.

    With `dots` it also makes what the decay's gradient is made up of.
    """
    q, k, v, about = given.q, given.k, given.v, given.constants
    decays = None if given.decay is None else given.decay.shape
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), about.query_basis.shape,
        q.device, about.key_mask is None, given.state is None, decays, dots, given.options, others,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(given, dots)
        with _lock:
            while len(_plans) >= PLANS:
                _plans.pop(next(iter(_plans)))
            _plans[key] = plan
    return plan


@functools.cache
def kernel(name: str, options: Sweep, device: int) -> Kernel:
    """The kernel of that name in `sweep.cu`, compiled with these options."""
    flags = tuple(f"-D{key}={int(value)}" for key, value in options._asdict().items())
    shared = "shared_bytes" if name == "sweep" else ""
    with torch.cuda.device(device):
        return Kernel(cubin(source(), flags), name, device, shared=shared)


def _blocks(z: Tensor) -> int:
    """How many blocks of 64 columns z has."""
    return -(-z.shape[3] // 64)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _steps(states: Tensor | None) -> tuple[int, int]:
    """Strides of heads and segments in states; 0 for segments that share one state."""
    if states is None:
        return 0, 0
    one = math.prod(states.shape[-3:])  # not from strides, which are arbitrary for sizes of 1
    return (one, 0) if states.dim() == 5 else (states.shape[2] * one, one)
