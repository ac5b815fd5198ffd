"""Launches of the kernels in `sweep.cu`, prepared once for tensors of the same shapes.

A plan knows how a sequence is cut into segments, and keeps the arguments of every launch that do
not change from call to call.
"""

import functools
import math
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.ops.hopper.nvrtc import Code, Kernel, Launch, cubin
from cosformer.ops.hopper.roles import (
    MAPS,
    NONE,
    PER_HEAD,
    PER_TOKEN,
    RULES,
    Around,
    Gates,
    Packing,
    Roles,
    Sweep,
    roles_of,
)
from cosformer.ops.hopper.source import source
from cosformer.ops.problem import Given, per_head

CHUNK = 64
LEAST = 4 * CHUNK  # rows of a segment, and of a piece of one
MOST = 64  # segments, or pieces of them; `edges` in around.cu has memory for so many
THREADS = 640
# `struct Params` of `sweep.cu`: first its pointers, then what `TAIL` packs, field by field.
POINTERS = 14
TAIL = struct.Struct("24q11i2f4x")
PLANS = 256  # kept at a time; the oldest goes first
GATE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
SUMS = Gates(GATE=4, SUMMED=False)  # where L is given, and l is wanted
FILES = {Sweep: "sweep.cu", Around: "around.cu", Gates: "gates.cu", Packing: "packing.cu"}
BLOCK = 2048  # tokens that a block of `decay_gradient` goes through at once
CLUSTER = 8  # blocks that share a row of a decay's gradient, where rows are few

PerRow = tuple[Tensor, Tensor]  # 1/D and δ, each `[B, H, T]`
Dots = tuple[Tensor | None, Tensor | None]  # φ·dφ of q and of k `[B, H, T, blocks]`


Options = Sweep | Around | Gates | Packing


class Common(NamedTuple):
    """What every sweep of one call is given."""

    mask: Tensor | None  # [B, S], bytes
    decay: Tensor | None  # L [b, h, T] if even; else l [B, H, T], as `sum_gates` makes it
    bounds: Tensor | None  # of packed sequences, int32
    by_row: PerRow | None = None


class Cut(NamedTuple):
    """How a sequence is cut: into segments of `rows` rows; packed sequences are segments.

    Where a sweep begins its segments with states, each segment is summed in `pieces` pieces.
    """

    segments: int
    rows: int
    pieces: int = 1


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
    for segments in range(1, max(1, min(MOST, length // LEAST)) + 1):
        rounds = -(-programs * segments // processors)
        cost = rounds * (length / segments + weight * (segments > 1)) * (1 + extra * (segments > 1))
        if cost < 0.98 * least:
            best, least = segments, cost
    return best


@functools.cache
def choose_pieces(
    programs: int, length: int, processors: int, cut: Cut, *, weight: int = 192
) -> int:
    """The number of pieces of each segment with which the sums before a sweep end earliest.

    Nobody starts with the sum of the last segment, so two segments leave half of the processors
    idle while the first one is summed. A piece costs its rows, and `weight` more to store its
    state. Then `edges` reads and writes the states of all pieces, each in the time of 1.25 rows.
    """
    best, least = 1, float("inf")
    for pieces in _whole_pieces(length, cut):
        rounds = -(-programs * (cut.segments - 1) * pieces // processors)
        cost = rounds * (cut.rows // pieces + weight) + programs * cut.segments * pieces * 1.25
        if cost < 0.9 * least:
            best, least = pieces, cost
    return best


def _whole_pieces(length: int, cut: Cut) -> list[int]:
    """The numbers of pieces of whole chunks that end where segments end, also in the last one."""
    most = min(MOST // cut.segments, cut.rows // LEAST)
    return [
        pieces
        for pieces in range(1, max(1, most) + 1)
        if cut.rows % (pieces * CHUNK) == 0
        and -(-length // (cut.rows // pieces)) == cut.segments * pieces
    ]


class Plan:
    """All launches for tensors of one set of shapes and strides, each prepared on its first use."""

    def __init__(self, given: Given, dots: bool) -> None:
        q, k, v, options, about = given.q, given.k, given.v, given.options, given.constants
        self.device, self._where, self.rule = q.device.index, q.device, RULES[options.rule]
        self.eps, self.scale = options.eps, options.scale
        self.sums = options.rule != "none"
        self._batch, self._heads = q.shape[:2]
        states = about.query_basis.shape[3]
        self._state = (states, q.shape[3], v.shape[3] + self.sums)
        self._launches: dict[Any, Any] = {}
        self.packed = about.bounds is not None
        self._gated = options.gated
        self._decay = NONE if given.decay is None else PER_HEAD if options.even else PER_TOKEN
        self._may_be_strong = given.decay is not None and not options.mild
        self.shifted = options.causal or given.decay is not None  # segments begin with states
        kind = functools.partial(
            roles_of, width=q.shape[3], value_width=v.shape[3], states=states,
            phi=MAPS[options.feature_map], rule=self.rule, masked=about.key_mask is not None,
            decay=self._decay, packed=self.packed,
        )  # fmt: skip
        self.roles = kind(dots=dots)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count

        def cut(like: Tensor, blocks: int, extra: float = 0.0) -> Cut:
            if about.bounds is not None:
                return Cut(about.bounds.shape[0] - 1, 0)
            programs, length = self._batch * self._heads * blocks, like.shape[2]
            segments = choose_segments(programs, length, processors, extra=extra)
            rows = -(-length // (segments * CHUNK)) * CHUNK
            found = Cut(-(-length // rows), rows)
            if extra and found.segments > 1:
                found = found._replace(pieces=choose_pieces(programs, length, processors, found))
            return found

        self.gather_queries, self.gather_keys = cut(q, _blocks(q)), cut(k, _blocks(v))
        self.read_queries, self.read_keys = cut(q, 1), cut(k, 1)
        self.causal = cut(q, _blocks(v), extra=0.6)
        decay = given.decay
        self._around = Around(DECAY=self._decay)
        self._gates = Gates(3, SUMMED=False)
        if decay is not None:
            few = self._batch * self._heads < processors and decay.shape[2] > BLOCK
            kinds = Gates(GATE_TYPES[decay.dtype] if options.gated else 3, options.gated)
            self._gates = kinds._replace(CLUSTER=CLUSTER if few else 1)
        for each in self._needed(given, kind(dots=_learns(given.decay))):
            _compiling(each)  # side by side, and before they are asked for

    def _needed(self, given: Given, back: Roles) -> list[Options]:
        """The variants that a call will launch; those in `back` if anything learns."""
        causal, decays = given.options.causal, given.decay is not None
        ways = [back] if causal or not decays else [back, back.reversed()]
        found: list[Options] = [self._around] if self.is_cut else []
        if self._decay == PER_TOKEN:
            found.append(self._gates if self._gated else SUMS)
        if _learns(given.decay) and not self._gated:
            found.append(self._gates)
        learns = any(map(_learns, (given.q, given.k, given.v, given.decay)))
        if learns and self.sums:
            found.append(Around(_wide(given.v), self.rule))
        for roles in ways:
            if causal or decays:
                found += [roles.forward, *([roles.gather] if self.is_cut else [])]
                found += [roles.dq, roles.dk, roles.dv] if learns else []
                found += [roles.dk_gather] if learns and self.is_cut else []
            else:
                found += [roles.gather, roles.read]
                found += [roles.dq_read, roles.dk_gather, roles.dk_read, roles.dv_read] * learns
        return [variant for each in found for variant in self._variants(each)]

    def _variants(self, options: Options) -> list[Any]:
        """The variant for segments with a mild decay, and the one for others where they may be."""
        if isinstance(options, Sweep) and options.READ and self._may_be_strong:
            return [options, options._replace(STRONG=True)]
        return [options]

    @property
    def is_cut(self) -> bool:
        """Whether a causal sweep begins its segments with states that are summed before it."""
        return self.causal.segments > 1 and not self.packed

    def states(self, segments: int = 1) -> Tensor:
        """Memory for states `[B, H, segments, R, D, V(+1)]`, without `segments` if that is 1."""
        several = (segments,) if segments > 1 else ()
        shape = (self._batch, self._heads, *several, *self._state)
        return torch.empty(shape, dtype=torch.float32, device=self._where)

    def dots(self, rows: Tensor) -> Tensor | None:
        """Memory for φ(row)·dφ(row) `[B, H, T, blocks]`; None if the decay needs no gradient."""
        if not self.roles.dq.DOTS:
            return None
        shape = (self._batch, self._heads, rows.shape[2], _blocks(rows))
        return rows.new_empty(shape, dtype=torch.float32)

    def sweep(
        self, options: Sweep, x: Tensor, y: Tensor, z: Tensor, basis: Tensor, cut: Cut,
        common: Common, *, out: Tensor | None = None, gate: Tensor | None = None,
        total: Tensor | None = None, before: Tensor | None = None, first: Tensor | None = None,
        last: Tensor | None = None, skipped: int = 0,
    ) -> None:  # fmt: skip
        """One launch of the sweep.

        Without `out` it only sums states. `first` is read, `last` is written: the states before
        and after each segment. `before` is the total of a sweep that this one adds to. The first
        `skipped` segments are left out.
        """
        launches = self._launches.get((options, cut, skipped))
        if launches is None:
            contracted, columns, length = x.shape[3], z.shape[3], x.shape[2]
            blocks = 1 if options.PAIRED else _blocks(z)
            tail = TAIL.pack(
                *x.stride()[:3], *y.stride()[:3], *z.stride()[:3], *_strides(gate), *_strides(out),
                *per_head(basis), *per_head(common.decay), length,
                *_steps(first, cut.pieces), *_steps(last),
                self._heads, length, cut.rows, cut.segments, blocks, contracted, columns,
                (contracted if options.TURNED else columns) + self.sums,
                skipped, self._heads // x.shape[1], self._heads // y.shape[1],
                self.eps, self.scale,
            )  # fmt: skip
            grid = (self._batch * self._heads * cut.segments * blocks, 1)
            kernels = [kernel("sweep", each, self.device) for each in self._variants(options)]
            launches = [Launch(it, grid, THREADS, self.device, POINTERS, tail) for it in kernels]
            self._launches[options, cut, skipped] = launches
        inverse, delta = common.by_row or (before, None)
        for launch in launches:
            launch(
                x, y, z, gate, out, total, inverse, delta, basis, common.decay, first, last,
                common.mask, common.bounds,
            )  # fmt: skip

    def gather(
        self, options: Sweep, y: Tensor, z: Tensor, basis: Tensor, cut: Cut, common: Common,
        start: Tensor | None = None, *, total: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The state that each segment starts with, and the one after all of them if `total`.

        The first state stands where the segment's first piece does. Without causality, and of
        packed sequences, each segment gets its own sum instead.
        """
        pieces = Cut(cut.segments * cut.pieces, cut.rows // cut.pieces)
        states = self.states(pieces.segments)
        # nobody starts with the sum of the segment that comes last
        fewer = 0 if total or cut.segments == 1 or self.packed else cut.pieces
        launched = pieces._replace(segments=pieces.segments - fewer)
        skipped = fewer if options.REVERSE else 0
        self.sweep(options, y, y, z, basis, launched, common, last=states, skipped=skipped)
        if self.packed or (cut.segments == 1 and start is None):
            return states, states
        last = self.states() if total else None
        launch = self._launches.get(("edges", options))
        if launch is None:
            size = math.prod(self._state)
            whole = (self._heads, y.shape[2], pieces.rows, pieces.segments, cut.pieces)
            grid = (self._batch * self._heads, -(-size // 256))
            it = kernel("edges", self._around, self.device)
            offsets = (*range(0, 7 * 8, 8), *range(56, 84, 4))
            how = (self.shifted, options.REVERSE)
            tail = struct.pack("3q7i", size, *per_head(common.decay), *whole, *how)
            launch = Launch(it, grid, 256, self.device, 4, tail, offsets)
            self._launches["edges", options] = launch
        launch(states, start, last, common.decay)
        return states, last

    def sum_gates(self, gates: Tensor, bounds: Tensor | None) -> Tensor:
        """l of every token (see `gates.cu`), `[B, H, T]`, from gates or from L."""
        length = gates.shape[2]
        sums = gates.new_empty((self._batch, self._heads, length), dtype=torch.float32)
        launch = self._launches.get("sum_gates")
        if launch is None:
            blocks = -(-length // 512) if bounds is None else bounds.shape[0] - 1
            steps, sizes = (*per_head(gates), gates.stride(2)), (self._heads, length, blocks)
            tail = struct.pack("3q3i", *steps, *sizes)
            it = kernel("sum_gates", self._gates if self._gated else SUMS, self.device)
            grid = (self._batch * self._heads * blocks, 1)
            offsets = (*range(0, 6 * 8, 8), *range(48, 60, 4))
            launch = Launch(it, grid, 256, self.device, 3, tail, offsets)
            self._launches["sum_gates"] = launch
        launch(gates, sums, bounds)
        return sums

    def decay_gradient(
        self, decay: Tensor, found: Dots, less: Dots, at_start: Tensor | None, at_end: Tensor | None
    ) -> Tensor:
        """The gradient of the gates, or of L, `[B, H, T]`, from φ·dφ of every row."""
        by_query, by_key = found
        assert by_query is not None
        assert by_key is not None
        of_gates, shape = self._gated, by_query.shape[:3]
        made = decay.new_empty(shape) if of_gates else decay.new_empty(shape, dtype=torch.float64)
        launch = self._launches.get("decay_gradient")
        if launch is None:
            sizes = (self._heads, shape[2], by_query.shape[3], by_key.shape[3])
            tail = struct.pack("3q4i", *per_head(decay), decay.stride(2), *sizes)
            it = kernel("decay_gradient", self._gates, self.device)
            grid = (self._batch * self._heads * self._gates.CLUSTER, 1)
            offsets = (*range(0, 11 * 8, 8), *range(88, 104, 4))
            launch = Launch(it, grid, 512, self.device, 8, tail, offsets)
            self._launches["decay_gradient"] = launch
        launch(by_query, by_key, *less, decay if of_gates else None, at_start, at_end, made)
        return made

    def prepare(self, grad: Tensor, out: Tensor, total: Tensor) -> PerRow:
        """1/D and δ = −dout·out·dD/dtotal of every row."""
        by_row = total.new_empty(total.shape), total.new_empty(total.shape)
        launch = self._launches.get("prepare")
        if launch is None:
            width, rows = out.shape[3], total.numel()
            wide = _wide(out)
            steps = (*grad.stride()[:3], *out.stride()[:3], rows)
            tail = struct.pack("7q3if", *steps, *total.shape[1:], width, self.eps)
            it = kernel("prepare", Around(wide, self.rule), self.device)
            offsets = (*range(0, 12 * 8, 8), 96, 100, 104, 108)
            grid = (-(-rows * wide // 2048), 1)
            launch = Launch(it, grid, 256, self.device, 5, tail, offsets)
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
    decays = None
    if given.decay is not None:
        decays = (given.decay.shape, given.decay.stride(), given.decay.dtype)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), about.query_basis.shape,
        q.device, about.key_mask is None, given.state is None, decays,
        None if about.bounds is None else about.bounds.shape, dots, given.options, others,
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
def kernel(name: str, options: Options, device: int) -> Kernel:
    """The kernel of that name, compiled with these options."""
    shared = "shared_bytes" if name == "sweep" else ""
    with torch.cuda.device(device):
        return Kernel(_compiling(options).result(), name, device, shared=shared)


@functools.cache
def _compiling(options: Options) -> Future[Code]:
    """Machine code on its way: what a call will need is compiled side by side."""
    flags = tuple(f"-D{key}={int(value)}" for key, value in options._asdict().items())
    return _compilers().submit(cubin, source(FILES[type(options)]), flags)


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8, "cosformer-nvrtc")


def _learns(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _wide(rows: Tensor) -> int:
    return 64 if rows.shape[3] <= 64 else 128


def _blocks(z: Tensor) -> int:
    """How many blocks of 64 columns z has."""
    return -(-z.shape[3] // 64)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _steps(states: Tensor | None, pieces: int = 1) -> tuple[int, int]:
    """Strides of heads and segments in states; 0 for segments that share one state."""
    if states is None:
        return 0, 0
    one = math.prod(states.shape[-3:])  # not from strides, which are arbitrary for sizes of 1
    return (one, 0) if states.dim() == 5 else (states.shape[2] * one, pieces * one)
