"""Launches of `sweep.cu`: how a sequence is cut, what is prepared for the next call."""

import functools
import math
import struct
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.ops.hopper.nvrtc import Kernel, Launch, cubin
from cosformer.ops.hopper.roles import MAPS, PROJECTIONS, RULES, Sweep, roles_of
from cosformer.ops.hopper.source import source
from cosformer.ops.triton.prepared import per_head

CHUNK = 64
THREADS = 640
POINTERS = 14
TAIL = struct.Struct("22q10i2f")  # of the kernel's parameters, behind the pointers
PLANS = 256

PerRow = tuple[Tensor | None, Tensor]  # 1/D and δ, each `[B, H, T]`


class Projection(NamedTuple):
    """φ of `projected.py` that a sweep makes of its rows, W both float32 or both bfloat16."""

    kind: str
    width: int  # of the features
    query_weight: Tensor  # [h, 64, 64] or [64, 64], in one piece; exp: [width, 64], and of both
    key_weight: Tensor
    levels: tuple[Tensor, Tensor] | None = None  # exp: of queries and of keys, [B, H, T]

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.query_weight, self.key_weight

    @property
    def alike(self) -> tuple[Any, ...]:
        """What a launch depends on."""
        return self.kind, self.width, *(x.shape for x in self.weights), self.query_weight.dtype


@functools.cache
def choose_segments(
    programs: int, length: int, processors: int, *, extra: float = 0.0, weight: int = 192
) -> int:
    """Into how many segments to cut a sequence: those that end first.

    A program takes a multiprocessor for itself and costs its rows, and `weight` rows for a state
    in or out. `extra`: what a cut sequence must be swept once more for, as a share of a sweep.
    """
    best, least = 1, float("inf")
    for segments in range(1, max(1, min(64, length // (4 * CHUNK))) + 1):
        rounds = -(-programs * segments // processors)
        cost = rounds * (length / segments + weight * (segments > 1)) * (1 + extra * (segments > 1))
        if cost < 0.98 * least:
            best, least = segments, cost
    return best


class Plan:
    """Launches for tensors of one set of shapes and strides, each prepared when it first comes."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, states: int, masked: bool, feature_map: str,
        rule: str, eps: float, scale: float, decays: bool, dots: bool,
        projection: Projection | None = None,
    ) -> None:  # fmt: skip
        self.device, self.rule = q.device.index, RULES[rule]
        self.eps, self.scale = eps, scale
        self.sums, self.divides = rule != "none", rule not in ("none", "apart")
        width = q.shape[3] if projection is None else projection.width
        self._state = (states, width, v.shape[3] + self.sums)
        self._launches: dict[Any, Launch] = {}
        made = () if projection is None else _made(projection)
        about = (states, MAPS[feature_map], self.rule, masked, decays, dots)
        self.roles = roles_of(width, v.shape[3], *about, *made)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count

        def rows(like: Tensor, blocks: int, extra: float = 0.0) -> int:
            """The length of a segment."""
            programs, length = like.shape[0] * like.shape[1] * blocks, like.shape[2]
            segments = choose_segments(programs, length, processors, extra=extra)
            return -(-length // (segments * CHUNK)) * CHUNK

        self.gather_queries, self.gather_keys = rows(q, _blocks(q)), rows(k, _blocks(v))
        self.read_queries, self.read_keys = rows(q, 1), rows(k, 1)
        self.causal_rows = rows(q, _blocks(v), extra=0.6)

    def states(self, like: Tensor, segments: int = 1) -> Tensor:
        """Room for states `[B, H, segments, R, D, V(+1)]`, or `[B, H, R, D, V(+1)]` for one."""
        several = (segments,) if segments > 1 else ()
        return like.new_empty(*like.shape[:2], *several, *self._state, dtype=torch.float32)

    def dots(self, rows: Tensor) -> Tensor | None:
        """Room for φ(row)·gradient `[B, H, T, blocks]`, where the decay has a gradient."""
        if not self.roles.dq.DOTS:
            return None
        return rows.new_empty(*rows.shape[:3], _blocks(rows), dtype=torch.float32)

    def since(self, decay: Tensor) -> Tensor:
        """L since the chunk of each row began, to base 2: `[b, h, T, 1]`, T in whole chunks."""
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
        projection: Projection | None = None,
    ) -> None:  # fmt: skip
        """One launch; without `out` it only sums states. `rows` is the length of a segment."""
        weights: tuple[Tensor | None, Tensor | None] = (None, None)
        if projection is not None:
            weights, by_row = projection.weights, projection.levels
        launch = self._launches.get(options)
        if launch is None:
            batch, heads, length, contracted = x.shape
            contracted = contracted if projection is None else projection.width
            columns, segments = z.shape[3], -(-length // rows)
            blocks = 1 if options.PAIRED else _blocks(z)
            tail = TAIL.pack(
                *x.stride()[:3], *y.stride()[:3], *z.stride()[:3], *_strides(gate), *_strides(out),
                *per_head(basis), length, *_steps(first), *_steps(last),
                heads, *(_sharing(weight, heads) for weight in weights),
                length, rows, segments, blocks, contracted, columns,
                (contracted if options.TURNED else columns) + self.sums, self.eps, self.scale,
            )  # fmt: skip
            grid = (batch * heads * segments * blocks, 1)
            it = kernel("sweep", options, self.device)
            launch = Launch(it, grid, THREADS, self.device, POINTERS, tail)
            self._launches[options] = launch
        given = (x, y, z, gate, out, total, *(by_row or (None, None)), basis, first, last, mask)
        launch(*given, *weights)

    def gather(
        self, options: Sweep, y: Tensor, z: Tensor, basis: Tensor | None, rows: int,
        start: Tensor | None, mask: Tensor | None, by_row: PerRow | None = None, *, causal: bool,
        total: bool = True, decay: Tensor | None = None, projection: Projection | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """What each segment starts with, and the state after all of them if `total`."""
        segments = -(-y.shape[2] // rows)
        states = self.states(y, segments)
        about: dict[str, Any] = {"mask": mask, "by_row": by_row, "projection": projection}
        self.sweep(options, y, y, z, basis, rows, last=states, **about)
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
        """1/D and δ of every row."""
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


def plan_of(
    q: Tensor, k: Tensor, v: Tensor, basis: Tensor | None, key_mask: Tensor | None,
    decay: Tensor | None, feature_map: str, rule: str, eps: float, scale: float, *others: Any,
    dots: bool = False, projection: Projection | None = None,
) -> Plan:  # fmt: skip
    """The plan for these shapes and strides; `others` are whatever else a launch depends on."""
    decays = None if decay is None else decay.shape
    shape = None if basis is None else basis.shape
    alike = None if projection is None else projection.alike
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), shape, q.device,
        key_mask is None, decays, dots, feature_map, rule, eps, scale, alike, others,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        states = 1 if shape is None else shape[3]
        about = (states, key_mask is not None, feature_map, rule, eps, scale, decays is not None)
        plan = Plan(q, k, v, *about, dots, projection)
        with _lock:
            while len(_plans) >= PLANS:
                _plans.pop(next(iter(_plans)))
            _plans[key] = plan
    return plan


@functools.cache
def kernel(name: str, options: Sweep, device: int) -> Kernel:
    flags = tuple(f"-D{key}={int(value)}" for key, value in options._asdict().items())
    shared = "shared_bytes" if name == "sweep" else ""
    with torch.cuda.device(device):
        return Kernel(cubin(source(), flags), name, device, shared=shared)


def _blocks(z: Tensor) -> int:
    """Of 64 columns."""
    return -(-z.shape[3] // 64)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _steps(states: Tensor | None) -> tuple[int, int]:
    """From head to head and from segment to segment; one state may serve all segments."""
    if states is None:
        return 0, 0
    one = math.prod(states.shape[-3:])  # strides of a single head may be anything
    return (one, 0) if states.dim() == 5 else (states.shape[2] * one, one)


def _made(projection: Projection) -> tuple[int, bool]:
    """As `roles_of` is told it; behind exponentials, zeros may fill a tile."""
    filled = projection.width % 64 > 0
    return PROJECTIONS[projection.kind] + filled, projection.query_weight.dtype == torch.float32


def _sharing(weight: Tensor | None, heads: int) -> int:
    """How many heads share a W."""
    return heads if weight is None or weight.dim() == 2 else heads // weight.shape[0]
