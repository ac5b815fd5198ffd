"""Performer ("Rethinking Attention with Performers", Choromanski et al., ICLR 2021)."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import cosformer.ops as ops
from cosformer.check import check_whole
from cosformer.mechanisms.linear.family import LinearMechanism, Start, draw_normal
from cosformer.mechanisms.request import NO_CONTROLS, Controls, Request
from cosformer.ops.features import projected, top_exponents
from cosformer.runtime import compute_dtype, full_precision, readable, renewed

LEAP = 40.0
"""How far exponents of keys may rise above a constant that all are relative to: float32 has e⁸⁸."""


class Scaled(NamedTuple):
    """The state of a stream: sums of e^(exponent − level), and the level `[B, H_kv]`."""

    sums: ops.State
    level: Tensor
    owner: str  # the class of the mechanism


class Performer(LinearMechanism):
    """FAVOR+: positive orthogonal random features of the softmax kernel.

    Exponents of long keys are far below 0, and their exponentials would all be 0. They are
    computed relative to a level, which cancels in the quotient: the largest exponent of all keys,
    or, causally, that of the first key. Where a later key rises far above it the level follows
    the largest so far, and the sums fade as it rises; nothing depends on the future.
    """

    traits = replace(LinearMechanism.traits, random=True)
    source = "Choromanski et al., ICLR 2021"
    formula = (
        "φ(x) = exp(Ωx − ‖x‖²/2)/√m, x ← x/d^¼; Ω: orthogonal rows with the norms of Gaussian ones"
    )
    state_type = Scaled
    eps = 1e-30  # relative to a level, a sum is nothing only where all of it underflows

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        features: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`features` m: int(d ln d) if None."""
        super().__init__(heads, width, key_heads=key_heads)
        usual = max(1, int(width * math.log(width)))
        self.features = usual if features is None else check_whole("features", features, 1)
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(self.features, width))
        self.redraw(generator)

    @property
    def feature_width(self) -> int:
        return self.features

    def redraw(self, generator: torch.Generator | None = None) -> None:
        self.projection.copy_(orthogonal_rows(self.features, self.width, generator))

    def queries(self, q: Tensor, start: Start) -> Tensor:
        """Features relative to the largest exponent of each query alone."""
        return projected(q, self.projection, "exp")

    def keys(self, k: Tensor, start: Start) -> Tensor:
        """Features relative to 0."""
        zero = torch.zeros_like(k[..., 0], dtype=compute_dtype(k.dtype))
        return projected(k, self.projection, "exp", zero)

    def empty_state(self, k: Tensor, v: Tensor) -> Scaled:
        level = torch.full(k.shape[:2], -torch.inf, dtype=compute_dtype(k.dtype), device=k.device)
        return Scaled(self.empty_sums(k, v), level, self.owner)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, Scaled]:
        if not k.shape[2]:
            return q.new_zeros(*q.shape[:3], v.shape[3]), state
        levels, level = self._levels(k, request, state.level)
        # A state of the engine says whether it fades: these may, or may not, with every call.
        total = levels["fading"].new_zeros(k.shape[:2]).double() if "fading" in levels else 0.0
        sums = state.sums._replace(log_decay=total)
        out, after = self.advance_sums(q, k, v, sums, request._replace(controls=levels))
        return out, renewed(state, sums=renewed(after, log_decay=0.0), level=level)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, controls: Controls = NO_CONTROLS
    ) -> tuple[Tensor, Scaled]:
        """One token; the level follows every rise, so that the host need not look at it."""
        with full_precision(q):
            before = state.level
            level = torch.maximum(before, top_exponents(k, self.projection)[..., 0])
            fading = torch.where(before.isinf(), 0, before - level)[..., None]
            keys = projected(k, self.projection, "exp", level[..., None])
            by = self._recurrence(k, Request(True, None, 0, controls))
            by = by._replace(log_decay=fading)
            out = ops.take_step(self.queries(q, 0), keys, v.to(keys.dtype), state.sums, by)
        return out.to(q.dtype), renewed(state, level=level)

    def state_size(self, length: int) -> int:
        return super().state_size(length) + self.key_heads

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        fading = request.controls.get("fading")
        return {} if fading is None else {"log_decay": fading}

    def feature_operations(self) -> int:
        return (3 * self.width + 3) * self.features  # on average: exponents of keys twice

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        levels, _ = self._levels(k, request, None)
        queries, keys, start = q.shape[2], k.shape[2], request.start
        if "fading" not in levels or (start == 0 and queries == keys):
            return super()._attend(q, k, v, request._replace(controls=levels), impl)
        # Sums that fade are read as they are made: a query for every key, and a key for each.
        first, end = min(start, 0), start + queries
        mask = k.new_ones(k.shape[0], keys, dtype=torch.bool)
        mask = mask if request.key_mask is None else request.key_mask
        mask = F.pad(mask, (-first, end - keys))
        k, v = (F.pad(x, (0, 0, -first, end - keys)) for x in (k, v))
        q = F.pad(q, (0, 0, start - first, 0))
        aligned = Request(True, mask, 0, {})
        return self._attend(q, k, v, aligned, impl)[:, :, start - first :]

    def _features(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, start: Start, key_start: Start
    ) -> tuple[Tensor, Tensor, Tensor]:
        levels = request.controls["levels"]  # [B, H, S]

        def relative(k: Tensor, first: Any) -> Tensor:
            level = levels[:, :, first : first + k.shape[2]]
            return projected(k, self.projection, "exp", level)

        keys = self.make(relative, k, 0)
        return self.make(self.queries, q, 0), keys, v.to(keys.dtype)

    @torch.no_grad()
    def _levels(
        self, k: Tensor, request: Request, before: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The levels that exponents of keys are relative to, `[B, H, S]`, and the level after them.

        `fading` is how the sums shrink from key to key, where the level rises.
        """
        tops = self.make(lambda k, _: top_exponents(k, self.projection), k.detach(), 0)
        if request.key_mask is not None:
            tops = tops.masked_fill(~request.key_mask[:, None], -torch.inf)
        if not k.shape[2]:
            return {"levels": tops}, tops.sum(-1)
        highest = tops.amax(-1)
        if not request.causal:
            return {"levels": _finite(highest)[..., None].expand_as(tops)}, highest
        first = tops[..., 0] if request.key_mask is None else _first_finite(tops)
        if before is not None:
            first = torch.where(before.isinf(), first, before)
            highest = torch.maximum(highest, before)
        base = _finite(first)
        if readable(k) and bool((_finite(highest) - base <= LEAP).all()):
            after = torch.where(highest.isinf(), highest, first)
            return {"levels": base[..., None].expand_as(tops)}, after
        so_far = tops.cummax(-1).values
        so_far = so_far if before is None else torch.maximum(so_far, before[..., None])
        levels = torch.maximum(so_far, base[..., None])
        earlier = torch.cat([base[..., None], levels[..., :-1]], -1)
        return {"levels": levels, "fading": earlier - levels}, highest


def _finite(level: Tensor) -> Tensor:
    """Levels, 0 where there is no key yet."""
    return level.masked_fill(level.isinf(), 0)


def _first_finite(tops: Tensor) -> Tensor:
    """The exponent of the first real key; −inf if there is none."""
    return tops.gather(-1, tops.isfinite().byte().argmax(-1, keepdim=True))[..., 0]


def orthogonal_rows(rows: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """`[rows, width]`: blocks of orthogonal directions, each as long as a Gaussian vector."""
    dtype = compute_dtype(torch.get_default_dtype())  # qr has no 16 bits
    gaussian = draw_normal(torch.empty(2, -(-rows // width), width, width, dtype=dtype), generator)
    q, r = torch.linalg.qr(gaussian[0])
    # The signs that qr leaves are not drawn, and exp(ωx) is not even in ω: a bias that stays.
    uniform = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.reshape(-1, width)
    return (uniform * gaussian[1].reshape(-1, width).norm(dim=-1, keepdim=True))[:rows]
