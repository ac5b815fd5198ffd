"""Reformer ("Reformer: The Efficient Transformer", Kitaev et al., 2020): hashed attention."""

import math
from dataclasses import replace
from operator import index
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.check import check_whole
from cosformer.mechanisms.compiled import run_compiled
from cosformer.mechanisms.padding import to_multiple
from cosformer.mechanisms.sdpa import joined
from cosformer.mechanisms.seeded import Seeded, drawn_before
from cosformer.mechanisms.traits import Cost
from cosformer.mechanisms.whole import Whole
from cosformer.memo import Memo
from cosformer.runtime import compute_dtype, recomputed, untraced

_rotations: Memo[list[Tensor]] = Memo()

MOST_BUCKETS = 128  # of one hash; more are the pairs, triples, … of several
SLICE = {"cpu": 2**19, "cuda": 2**27}
"""Scores made at once: a CPU keeps them in its cache, a GPU has room."""
ITSELF = -5e4  # the logit of a token with itself: chosen where there is nothing else


class Reformer(Seeded, Whole):
    """Softmax over tokens that hash alike; queries are meant to be the keys, which it normalises.

    Buckets are those of q. Causal weights are never on the future, but it decides which of the
    past is seen: how a sequence is sorted depends on all of it. The rotations are a function of
    the seed and of the length.
    """

    traits = replace(
        Whole.traits, causal="leaky", multiple_of=128, random=True, shared_qk=True, growth="n log n"
    )
    source = "Kitaev et al., ICLR 2020"
    formula = (
        "out_i = Σ_j softmax_j(q_i·k̂_j / √d) v_j, k̂ = k/‖k‖, over the chunk of i and the one "
        "before, tokens sorted by (argmax[xR; −xR], t); s_ii = −5·10⁴; rounds joined by logsumexp"
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        bucket: int = 64,
        rounds: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.bucket = check_whole("bucket", bucket, 1)
        self.rounds = check_whole("rounds", rounds, 1)
        self.plant(seed)
        self.traits = replace(self.traits, multiple_of=2 * bucket)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        length, order = q.shape[2], self.order(q)  # [B H r N]
        key = F.normalize(k.to(compute_dtype(k.dtype)), dim=-1).to(k.dtype)
        q, k, v = (to_multiple(x, 2 * self.bucket) for x in (q, key, v))
        chunks = Chunks(self.bucket, length, causal)
        return hashed_attention(q, k, v, order, chunks)[:, :, :length]

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        length = q.shape[2]
        chunk = self.order(q).argsort(-1)[..., :length] // self.bucket  # [B H r n]
        chunks = self._padded(length) // self.bucket
        behind = (chunk[..., :, None] - chunk[..., None, :]) % chunks
        rounds = (behind <= 1).sum(2)  # in how many a pair meets
        i = torch.arange(length, device=q.device)
        if causal:
            rounds = rounds * (i <= i[:, None])
        score = q @ F.normalize(k, dim=-1).mT / math.sqrt(self.width)
        score = score.masked_fill(i == i[:, None], ITSELF)
        return (score + rounds.to(q.dtype).log()).softmax(-1)

    def cost(self, length: int) -> Cost:
        pairs = 2 * self.bucket * (4 * self.width + 5)
        hashing = sum(self._hashes(length)) * self.width + 2 * math.ceil(math.log2(length + 1))
        numbers = (2 + 3 * self.rounds) * length * self.width
        each = length * self.rounds * (pairs + hashing)
        return Cost(self.heads * each, 4 * self.heads * numbers)

    def order(self, q: Tensor) -> Tensor:
        """Tokens sorted by bucket and index in each round, padding last: `[B, H, rounds, N]`."""
        length = q.shape[2]
        bucket = buckets(q.detach().to(compute_dtype(q.dtype)), self._rotations_at(q))
        padding = (0, self._padded(length) - length)
        full = F.pad(bucket, padding, value=torch.iinfo(bucket.dtype).max)
        return full.argsort(dim=-1, stable=True)

    def rotations(self, length: int) -> list[Tensor]:
        """R of every hash, `[rounds, D, buckets/2]`."""
        halves = [size // 2 for size in self._hashes(index(length))]
        return draw_rotations(self.rounds, self.width, halves, self.seed)

    def _rotations_at(self, q: Tensor) -> list[Tensor]:
        """R on the device of q, kept for the next call: a copy would wait for the device."""
        length, dtype = q.shape[2], compute_dtype(q.dtype)

        def make() -> list[Tensor]:
            return [rotation.to(q.device, dtype) for rotation in self.rotations(length)]

        if not untraced():
            return make()
        sizes = (self.seed, self.rounds, self.width, *self._hashes(length))
        return _rotations.recall((sizes, dtype), q.device, make)

    def _padded(self, length: int) -> int:
        return length + -length % (2 * self.bucket)

    def _hashes(self, length: int) -> list[int]:
        """Numbers of buckets, even, of hashes that together have one for every `bucket` tokens."""
        missing, sizes = self._padded(length) // self.bucket, []
        while missing > 1:
            sizes.append(min(missing + missing % 2, MOST_BUCKETS))
            missing = -(-missing // sizes[-1])
        return sizes


@drawn_before
def draw_rotations(rounds: int, width: int, halves: list[int], seed: int) -> list[Tensor]:
    draw, real = torch.Generator().manual_seed(seed), torch.float64
    with torch._C._DisableFuncTorch():  # vmap has rules of its own for what is drawn
        return [torch.randn(rounds, width, half, generator=draw, dtype=real) for half in halves]


def buckets(x: Tensor, rotations: list[Tensor]) -> Tensor:
    """The bucket argmax[xR; −xR] of every row, int32 `[B, H, rounds, n]`.

    Several hashes make one number.

    Args:
        x: `[B, H, n, D]`, in float32 at least.
        rotations: R of every hash, `[rounds, D, buckets/2]`.
    """
    found = [_bucket(x, matrices) for matrices in zip(*rotations, strict=True)]
    return torch.stack(found, 2).to(torch.int32)


def _bucket(x: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
    """The bucket of every row in one round, `[B, H, n]`."""
    bucket = torch.zeros(x.shape[:3], dtype=torch.int64, device=x.device)
    for matrix in matrices:
        turned, half = x @ matrix, matrix.shape[1]
        nearest = turned.abs().argmax(-1, keepdim=True)
        opposite = turned.gather(-1, nearest) < 0
        bucket = bucket * 2 * half + (nearest + half * opposite)[..., 0]
    return bucket


class Chunks(NamedTuple):
    """How sorted tokens meet."""

    size: int  # tokens in a chunk
    length: int  # tokens from here on are padding
    causal: bool


def hashed_attention(q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunks: Chunks) -> Tensor:
    """softmax(q kᵀ/√d) v over all rounds; q, k, v `[B, H, N, ·]`, order `[B, H, rounds, N]`.

    A pair that meets in several rounds counts as often. N is a multiple of the size of a chunk.
    The backward pass makes the scores again: kept is what is as long as q, k and v.
    """
    rows = (q / math.sqrt(q.shape[-1]), k, v, order)
    if q.is_cuda and untraced():  # one graph of all rounds: no pass over the scores but products
        flat = (x.flatten(0, 1) for x in rows)
        return run_compiled(_attend, chunks, *flat, on=q).unflatten(0, q.shape[:2])
    count = max(1, _most(q) // (2 * chunks.size * q.shape[2]))
    groups = zip(*(x.flatten(0, 1).split(count) for x in rows), strict=True)
    return torch.cat([_attend(chunks, *heads) for heads in groups]).unflatten(0, q.shape[:2])


def _attend(chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Tensor:
    """The output `[g, N, V]` of some heads: rounds weighted by their Σ e^s."""
    found = [recomputed(_round, chunks, q, k, v, sorting) for sorting in order.unbind(1)]
    return joined([out for out, _ in found], [log[..., 0] for _, log in found])


def _round(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, sorting: Tensor
) -> tuple[Tensor, Tensor]:
    """The output `[g, N, V]` of one round, and log Σ e^s `[g, N, 1]`."""
    taken = (*(_take(x, sorting) for x in (q, k, v)), sorting[..., None])
    rows, keys, values, i = (x.unflatten(1, (-1, chunks.size)) for x in taken)
    near, theirs, j = (torch.cat([x, x.roll(1, 1)], 2) for x in (keys, values, i))
    count = max(1, _most(q) // (2 * chunks.size**2 * q.shape[0]))
    parts = zip(*(x.split(count, 1) for x in (rows, near, theirs, i, j)), strict=True)
    found = [_softmax(chunks, *part) for part in parts]
    back = sorting.argsort(-1)
    out, log = (torch.cat(x, 1).flatten(1, 2) for x in zip(*found, strict=True))
    return _take(out, back), _take(log, back)


def _softmax(
    chunks: Chunks, rows: Tensor, keys: Tensor, values: Tensor, i: Tensor, j: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax of some chunks `[g, c, b, D]` over `[g, c, 2b, D]`; i and j are their tokens."""
    hidden = j.mT >= chunks.length
    hidden = hidden | (j.mT > i) if chunks.causal else hidden
    scores = (rows @ keys.mT).to(compute_dtype(rows.dtype))
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(i == j.mT, ITSELF)
    log = scores.logsumexp(-1, keepdim=True)
    return (scores - log).exp().to(values.dtype) @ values, log


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of `[g, N, D]` at `[g, N]`: whole rows, where `gather` would look up every number."""
    first = torch.arange(0, order.numel(), x.shape[1], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, (order + first).flatten()).unflatten(0, order.shape)


def _most(x: Tensor) -> int:
    return SLICE.get(x.device.type, SLICE["cuda"])
