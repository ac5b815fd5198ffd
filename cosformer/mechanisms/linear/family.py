"""What the linear family has in common: features of q and k, a weight, a normaliser, one engine."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosformer.check import check_generator
from cosformer.mechanisms.base import Mechanism, Request
from cosformer.mechanisms.linear.groups import goes_in_groups, in_groups
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.ops import linear_attention, linear_attention_with_state
from cosformer.ops.features.projected import MAPS, is_served
from cosformer.mechanisms.recompute import recomputed
from cosformer.ops.state import check_state

SCRATCH = {"cpu": 2**20, "cuda": 2**28}
"""Numbers in memory while features are made: a CPU waits for the pages of more, a GPU has room."""


class LinearMechanism(Mechanism):
    """out_i = Σ_j w(i, j) φ(q_i)·φ(k_j) v_j / D_i. A member says what φ, w and D are.

    `feature_map` names a φ of the engine's, which costs no memory. One that the engine does not
    have is `queries` and `keys`, with its width as `feature_width`; zeros may follow the features.
    """

    traits = Traits(causal="exact", state="constant")
    feature_map: str = "identity"
    projected_map: str = ""  # the map of `ops.projected` that `queries` and `keys` use, if they do
    normaliser: str = "sum"
    rule: str = "clamp"
    eps: float = 1e-6

    def queries(self, q: Tensor, start: int | Tensor) -> Tensor:
        """What φ is applied to, `[B, H, T, F]`; the first query stands at position `start`."""
        return q

    def keys(self, k: Tensor, start: int | Tensor) -> Tensor:
        """The same of keys; those that are masked come as zeros, and whatever they become is."""
        return k

    def share(self, request: Request) -> Tensor | None:
        """A factor for every key, `[B, H_kv, S]`, if there is one."""
        return None

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        """theta, gamma, log_decay or scale of `linear_attention`."""
        return {}

    @property
    def feature_width(self) -> int:
        return self.width

    @property
    def scratch_width(self) -> int:
        """Numbers per token that lie in memory while its features are made."""
        return 2 * self.feature_width if self.stores_features else 0

    @property
    def stores_features(self) -> bool:
        """Whether φ is stored before the engine sees it."""
        return type(self).keys is not LinearMechanism.keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        return self._attend(q, k, v, request, "auto")

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        """The quadratic formula, read with the columns of the identity as values."""
        identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        if not k.shape[2]:
            return q.new_zeros(*q.shape[:3], 0)
        return self._attend(q, k, identity.expand(*k.shape[:2], -1, -1), request, "reference")

    def empty_state(self, k: Tensor, v: Tensor) -> Any:
        k, v = k[:, :, :0], v[:, :, :0]
        request = Request(True, None, 0, dict.fromkeys(self.traits.controls, k[..., 0]))
        keys = self.keys(k, 0)[..., : self.feature_width]
        options = self._engine(k, request)
        return linear_attention_with_state(keys, keys, v.to(keys.dtype), **options)[1]

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, Any]:
        check_state(state)
        *rows, v = self._features(q, k, v, request, state.position, state.position)
        queries, keys = (x[..., : self.feature_width] for x in rows)
        options = self._engine(k, request)
        out, after = linear_attention_with_state(queries, keys, v, state=state, **options)
        return out.to(q.dtype), after

    def state_size(self, length: int) -> int:
        columns = self.value_width + (self.normaliser == "sum")
        return self.key_heads * self.feature_width * columns

    def cost(self, length: int) -> Cost:
        tokens = (self.heads + self.key_heads) * length
        products = 4 * self.heads * length * self.feature_width * (self.width + 1)
        stored = tokens * self.feature_width if self.stores_features else 0
        operations = products + tokens * self.feature_operations()
        return Cost(operations, 4 * (2 * tokens * self.width + stored))

    def feature_operations(self) -> int:
        """To make the features of one token of one head."""
        return self.feature_width

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        options = self._engine(k, request) | {"causal": request.causal, "impl": impl}
        if request.start != (k.shape[2] - q.shape[2] if request.causal else 0):
            options["query_start"] = request.start
        if impl == "auto" and (out := self._at_once(q, k, v, request, options)) is not None:
            return out
        given = self._features(q, k, v, request, request.start, 0)
        if impl == "auto" and goes_in_groups(given[0]):
            return in_groups(*given, options).to(q.dtype)
        return linear_attention(*given, **options).to(q.dtype)

    def make(
        self, features: Callable[[Tensor, int | Tensor], Tensor], x: Tensor, start: int | Tensor
    ) -> Tensor:
        """`features(x, start)`, in segments where that takes scratch."""
        width = 0 if self.made_at_once(x) else self.scratch_width
        return in_segments(features, x, start, width)

    def shared_keys(self, k: Tensor, start: int | Tensor, share: Tensor | None) -> Tensor:
        """Features of keys, each times its share if there is one."""
        keys = self.make(self.keys, k, start)
        return keys if share is None else keys * share[..., None].to(keys.dtype)

    def made_at_once(self, x: Tensor) -> bool:
        """Whether a kernel makes features of x, with little between."""
        kind = self.projected_map
        return bool(kind) and is_served(x, self.feature_width // MAPS[kind].parts, kind)

    def _at_once(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, options: dict[str, Any]
    ) -> Tensor | None:
        """Attention by kernels that make the features themselves; None where there are none."""
        return None

    def _engine(self, k: Tensor, request: Request) -> dict[str, Any]:
        return {
            "feature_map": self.feature_map,
            "normaliser": self.normaliser,
            "rule": self.rule,
            "eps": self.eps,
            "key_mask": request.key_mask,
            **self.weight(k, request),
        }

    def _features(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        request: Request,
        query_start: int | Tensor,
        key_start: int | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = self.make(self.queries, q, query_start)
        keys = self.shared_keys(k, key_start, self.share(request))
        return queries, keys, v.to(keys.dtype)


def in_segments(
    features: Callable[[Tensor, int | Tensor], Tensor],
    x: Tensor,
    start: int | Tensor,
    scratch_width: int,
) -> Tensor:
    """`features(x, start)`, a stretch of tokens at a time, made again in the backward pass.

    What lies between tokens and features would otherwise be kept: several times the features.
    """
    length = x.shape[2]
    rows = x.shape[0] * x.shape[1] * scratch_width
    segment = max(1, SCRATCH.get(x.device.type, 2**28) // max(rows, 1))
    if not scratch_width or length <= segment:
        return features(x, start)
    parts, first = [], start
    for tokens in x.split(segment, 2):  # slices would have gradients as long as x
        parts.append(recomputed(features, tokens, first))
        first = first + segment
    return torch.cat(parts, 2)


def unmasked(control: Tensor, request: Request) -> Tensor:
    """Zeros at masked tokens, which a stream then passes as if they were not there."""
    if request.key_mask is None:
        return control
    return control.masked_fill(~request.key_mask[:, None], 0)


def draw_normal(into: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, the same on every device: a generator has one of its own."""
    check_generator(generator)
    device = "cpu" if generator is None else generator.device
    return into.copy_(torch.randn(into.shape, generator=generator, device=device))
