"""What the linear family has in common: features of q and k, a weight, a normaliser, one engine."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import cosformer.ops as ops
from cosformer.check import check_generator
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.linear.groups import goes_in_groups, in_groups
from cosformer.mechanisms.request import NO_CONTROLS, Controls, Request, Split, unit_values
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.runtime import full_precision, recomputed, renewed

SCRATCH = {"cpu": 2**20, "cuda": 2**28}
"""Numbers in memory while features are made: a CPU waits for the pages of more, a GPU has room."""


Start = int | Tensor
"""The position of the first token: one for all, or `[B]`, one for each stream."""


class Sums(NamedTuple):
    """The state of a stream: sums over all keys so far."""

    sums: ops.State
    owner: str  # the class of the mechanism


class LinearMechanism(Mechanism):
    """out_i = Σ_j w(i, j) φ(q_i)·φ(k_j) v_j / D_i. A member says what φ, w and D are.

    `feature_map` names a φ that the engine, `linear_attention`, applies itself, which costs no
    memory. A member with another φ has `queries` and `keys`, and `feature_width`.
    """

    traits = Traits(causal="exact", state="constant")
    state_type: ClassVar[type] = Sums
    feature_map: str = "identity"
    normaliser: str = "sum"
    rule: str = "clamp"
    eps: float = 1e-6
    states: int = 1  # how many sums each feature has: 2 where `weight` has a cosine
    forgets: bool = False  # whether a stream also remembers its decay: a number for each key head

    def queries(self, q: Tensor, start: Start) -> Tensor:
        """Features of queries, `[B, H, T, F]`, before `feature_map`; they begin at `start`."""
        return q

    def keys(self, k: Tensor, start: Start) -> Tensor:
        """Features of keys, `[B, H_kv, S, F]`, before `feature_map`; masked keys come as zeros."""
        return k

    def share(self, request: Request) -> Tensor | None:
        """A factor of the features of every key, `[B, H_kv, S]`; None for none."""
        return None

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        """The options theta, gamma, log_decay and scale of `linear_attention`."""
        return {}

    @property
    def feature_width(self) -> int:
        """How many features there are."""
        return self.width

    @property
    def scratch_width(self) -> int:
        """How many numbers a token takes in memory while its features are made."""
        return 2 * self.feature_width if self.stores_features else 0

    @property
    def stores_features(self) -> bool:
        """Whether features are stored before the engine reads them."""
        return type(self).keys is not LinearMechanism.keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        return self._attend(q, k, v, request, "auto")

    @property
    def splits(self) -> bool:
        one_sum = type(self)._attend is LinearMechanism._attend
        return one_sum and super().splits

    @property
    def queries_later(self) -> bool:
        kind, base = type(self), LinearMechanism
        names = ("queries", "_features", "attend_split")
        return all(getattr(kind, name) is getattr(base, name) for name in names)

    def attend_split(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, split: Split
    ) -> Tensor:
        kind, hidden = type(self), request.key_mask is not None
        if not self.splits:
            return super().attend_split(q, k, v, request, split)
        if hidden and kind._features is not LinearMechanism._features:
            raise ValueError(
                f"key_mask must be None for {kind.__name__} over ranks: positions count from the "
                "first real token, which may be on another rank"
            )
        start = split.start(k.shape[2])
        given = self._features(q, k, v, request, start, start)
        options = self._engine(k, request) | {"causal": request.causal}
        out = split.linear_attention(*given, **options, key_mask=request.key_mask)
        return out.to(q.dtype)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        """The quadratic formula, read with the columns of the identity as values."""
        if not k.shape[2]:
            return q.new_zeros(*q.shape[:3], 0)
        return self._attend(q, k, unit_values(k), request, "reference")

    def empty_state(self, k: Tensor, v: Tensor) -> Any:
        return Sums(self.empty_sums(k, v), self.owner)

    def empty_sums(self, k: Tensor, v: Tensor) -> ops.State:
        """The engine's state before the first token."""
        k, v = k[:, :, :0], v[:, :, :0]
        request = Request(True, None, 0, dict.fromkeys(self.traits.controls, k[..., 0]))
        keys = self.keys(k, 0)
        options = self._engine(k, request)
        return ops.linear_attention_with_state(keys, keys, v.to(keys.dtype), **options)[1]

    def check_state(self, state: Any, k: Tensor, v: Tensor) -> None:
        super().check_state(state, k, v)
        ops.check_state_shape(state.sums, k, self.feature_width, v.shape[3])

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, Any]:
        out, sums = self.advance_sums(q, k, v, state.sums, request)
        return out, renewed(state, sums=sums)

    def advance_sums(
        self, q: Tensor, k: Tensor, v: Tensor, sums: ops.State, request: Request
    ) -> tuple[Tensor, ops.State]:
        """The output of the next tokens, and the engine's state after them."""
        given = self._features(q, k, v, request, sums.position, sums.position)
        options = self._engine(k, request) | {"key_mask": request.key_mask}
        out, after = ops.linear_attention_with_state(*given, state=sums, **options)
        return out.to(q.dtype), after

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, controls: Controls = NO_CONTROLS
    ) -> tuple[Tensor, Any]:
        request = Request(True, None, 0, controls)
        position = state.sums.position
        with full_precision(q):
            given = self._features(q, k, v, request, position, position)
            out = ops.take_step(*given, state.sums, self._recurrence(k, request))
        return out.to(q.dtype), state

    def _recurrence(self, k: Tensor, request: Request) -> ops.Recurrence:
        """What a step computes: made once for each device, but for the decay of this token."""
        found: tuple[ops.Recurrence, bool] | None = self._recurrences.get(k.device)
        if found is None:
            given = ops.Arguments(**self._engine(k, request))
            fixed = ops.recurrence(k, given._replace(log_decay=None))
            found = fixed, given.log_decay is not None
            if not isinstance(given.gamma, Tensor) and not isinstance(given.theta, Tensor):
                self._recurrences[k.device] = found  # tensors may be learned, and change
        by, is_gated = found
        return by._replace(log_decay=self.weight(k, request)["log_decay"]) if is_gated else by

    def state_size(self, length: int) -> int:
        columns = self.value_width + (self.normaliser == "sum")
        return self.key_heads * (self.states * self.feature_width * columns + self.forgets)

    def cost(self, length: int) -> Cost:
        tokens = (self.heads + self.key_heads) * length
        sums = self.states * self.feature_width * (self.width + 1)
        products = 4 * self.heads * length * sums
        stored = tokens * self.feature_width if self.stores_features else 0
        operations = products + tokens * self.feature_operations()
        return Cost(operations, 4 * (2 * tokens * self.width + stored))

    def feature_operations(self) -> int:
        """How many operations make the features of one token of one head."""
        return self.feature_width

    def make(self, features: Callable[[Tensor, Start], Tensor], x: Tensor, start: Start) -> Tensor:
        """`features(x, start)`; long ones in segments, made again in the backward pass.

        What lies between tokens and features would otherwise be kept: several times the features.
        """
        rows = x.shape[0] * x.shape[1] * self.scratch_width
        segment = max(1, SCRATCH.get(x.device.type, 2**28) // max(rows, 1))
        if not self.scratch_width or x.shape[2] <= segment:
            return features(x, start)
        parts = []
        for tokens in x.split(segment, 2):  # slices would have gradients as long as x
            parts.append(recomputed(features, tokens, start))
            start = start + segment
        return torch.cat(parts, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        options = self._engine(k, request)
        options |= {"causal": request.causal, "impl": impl, "key_mask": request.key_mask}
        if request.start != (k.shape[2] - q.shape[2] if request.causal else 0):
            options["query_start"] = request.start
        given = self._features(q, k, v, request, request.start, 0)
        queries, *_ = given
        if impl == "auto" and goes_in_groups(queries):
            return in_groups(*given, options).to(q.dtype)
        return ops.linear_attention(*given, **options).to(q.dtype)

    def _engine(self, k: Tensor, request: Request) -> dict[str, Any]:
        """The options that a sweep, a stream and a step have in common."""
        return {
            "feature_map": self.feature_map,
            "normaliser": self.normaliser,
            "rule": self.rule,
            "eps": self.eps,
            **self.weight(k, request),
        }

    def _features(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, start: Start, key_start: Start
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self.make(self.queries, q, start), self.make(self.keys, k, key_start)
        share = self.share(request)
        keys = keys if share is None else keys * share[..., None].to(keys.dtype)
        return queries, keys, v.to(keys.dtype)


def draw_normal(into: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, the same on every device: a generator has a device of its own."""
    check_generator(generator)
    device = "cpu" if generator is None else generator.device
    return into.copy_(torch.randn(into.shape, generator=generator, device=device))
