"""Linear attention on features of projections, which kernels may make themselves."""

from typing import Any

from torch import Tensor

from cosformer.mechanisms.base import Request
from cosformer.mechanisms.linear.family import LinearMechanism
from cosformer.mechanisms.linear.groups import PLAIN
from cosformer.ops.attend_projected import attend_projected, is_attended
from cosformer.ops.features.projected import projected
from cosformer.runtime import kernels_serve


class ProjectingMechanism(LinearMechanism):
    """φ(x) is `projected_map` of W x. A member says what W is."""

    def projections(self) -> tuple[Tensor, Tensor]:
        """W of queries and of keys: `[F, D]`, or one for each group of heads `[h, F, D]`."""
        raise NotImplementedError

    def queries(self, q: Tensor, start: int | Tensor) -> Tensor:
        return projected(q, self.projections()[0], self.projected_map)

    def keys(self, k: Tensor, start: int | Tensor) -> Tensor:
        return projected(k, self.projections()[1], self.projected_map)

    def shared_keys(self, k: Tensor, start: int | Tensor, share: Tensor | None) -> Tensor:
        """A kernel multiplies where it makes the features, if it makes all that `keys` returns."""
        plain = type(self).keys is ProjectingMechanism.keys
        if share is None or not (plain and self.made_at_once(k)):
            return super().shared_keys(k, start, share)
        return projected(k, self.projections()[1], self.projected_map, share=share)

    def _at_once(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, options: dict[str, Any]
    ) -> Tensor | None:
        own = type(self)
        alone = own.queries is ProjectingMechanism.queries and own.keys is ProjectingMechanism.keys
        plain = own.share is LinearMechanism.share and PLAIN.issuperset(options)
        if not (alone and plain and kernels_serve(q)):
            return None
        kind, causal, weights = self.projected_map, options["causal"], self.projections()
        rule = self.rule if self.normaliser == "sum" else "none"
        if not is_attended(q, k, v, *weights, kind, causal):
            return None
        return attend_projected(
            q, k, v, *weights, options["key_mask"], kind, causal, rule, self.eps
        )
