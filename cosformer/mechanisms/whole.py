"""Self-attention whose blocks or means depend on the length: it needs a whole sequence."""

from torch import Tensor

from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.padding import without_padding
from cosformer.mechanisms.request import Request, repeat_heads
from cosformer.mechanisms.traits import Traits
from cosformer.runtime import compute_dtype, long_dtype


class Whole(Mechanism):
    """Attention over whole sequences. A subclass has `attend_whole` and `dense_whole`.

    A token behind `key_mask` is absent, as a key and as a query (its output is 0): the real tokens
    of each item are computed as if they stood alone, so that padding changes nothing at all.
    Items of one length go together; the lengths are read on the host.
    """

    traits = Traits(causal="no", cross=False, reads_mask=True, positions="absolute")

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """`[B, H, n, V]`; k and v have a head for each of q, all are of `long_dtype`."""
        raise NotImplementedError

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        """`[B, H, n, n]`."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        inputs = [x.to(long_dtype(q)) for x in (q, repeat_heads(k, q), repeat_heads(v, q))]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend_whole(q, k, v, request.causal) if q.numel() else v

        return without_padding(attend, request.key_mask, *inputs).to(q.dtype)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        inputs = [x.to(compute_dtype(q.dtype)) for x in (q, repeat_heads(k, q))]

        def dense(q: Tensor, k: Tensor) -> Tensor:
            return self.dense_whole(q, k, request.causal) if q.numel() else q @ k.mT

        return without_padding(dense, request.key_mask, *inputs, square=True).to(q.dtype)
