"""Layers and models over ranks: what each of their parts needs of the tokens on other ranks."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosformer.distributed.attention import attention, linear_attention
from cosformer.distributed.exchange import Message, gather, send, sum_over_ranks
from cosformer.distributed.passes import Meanwhile
from cosformer.distributed.stretch import Reach, Stretch, check_group, check_lengths, stretch_of
from cosformer.models import Backbone
from cosformer.nn import AttentionLayer, CosformerAttention
from cosformer.runtime import readable

Module = TypeVar("Module", bound=nn.Module)


def split(
    model: Module, *, lengths: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> Module:
    """Let every rank of a group call the model with its own stretch of the tokens.

    The model is changed in place and returned. Its output is that of one process that has all
    tokens, cut in the same way: positions count over all ranks, short convolutions and attention
    see the tokens of other ranks. Every rank must call it, and go backward if one does. The
    gradient of a parameter is this rank's share: sum it over the ranks.

    `stream` and generation raise: they need whole sequences, which `unsplit` lets a model have.

    Args:
        model: an `AttentionLayer`, a `LanguageModel`, a `MaskedLanguageModel`, or any module in
            which nothing but `AttentionLayer` mixes tokens. A model with one output for a whole
            sequence raises when it is called, and so does a mechanism that cannot.
        lengths: how many tokens each rank has. None: all have as many as this one.
        group: the ranks that share the sequences; None: all.
    """
    found = _parts(model)
    ranks = dist.get_world_size(check_group(group))
    if lengths is not None:
        check_lengths(lengths, ranks)
    if not found:
        raise ValueError(f"model must have an AttentionLayer, got {type(model).__name__}")
    for name, part in model.named_modules():
        if isinstance(part, CosformerAttention | nn.MultiheadAttention):
            raise ValueError(
                f"model must have no attention but AttentionLayer to be split, got "
                f"{type(part).__name__} at {name!r}"
            )
        if isinstance(part, Backbone) and part.cls is not None:
            raise ValueError("model must have no cls token to be split: each rank would add one")
        if isinstance(part, Backbone) and part.cross:
            raise ValueError("model must have no cross attention to be split over ranks")
    among = Ranks(None if lengths is None else tuple(lengths), group)
    for part in found:
        part.split = among
    return model


def unsplit(model: Module) -> Module:
    """Undo `split`, in place: the model takes whole sequences again, in each process by itself."""
    for part in _parts(model):
        part.split = None
    return model


class Ranks:
    """The ranks that share sequences, as layers and mechanisms ask for them."""

    def __init__(self, lengths: tuple[int, ...] | None, group: dist.ProcessGroup | None) -> None:
        self.among: dict[str, Any] = {"lengths": lengths, "group": group}
        self._work: Meanwhile | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # a copy of a model is on the same ranks, and a group cannot be copied

    def meanwhile(self, work: Meanwhile) -> "Ranks":
        found = Ranks(**self.among)
        found._work = work
        return found

    def start(self, tokens: int) -> int:
        return self._stretch(tokens).start

    def total(self, tokens: int) -> int:
        return self._stretch(tokens).total

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attention(q, k, v, **options, **self.among, meanwhile=self._work)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return linear_attention(q, k, v, **options, **self.among, meanwhile=self._work)

    def neighbours(self, x: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
        """`before` last tokens of the rank before, `after` first ones of the rank after this."""
        stretch = self._stretch(x.shape[1])
        if min(stretch.lengths) < max(before, after):
            raise ValueError(
                f"every rank must have at least the {max(before, after)} tokens that a convolution "
                f"on its neighbour sees, got {list(stretch.lengths)}"
            )
        to_right = x[:, None, x.shape[1] - before :]
        to_left = x[:, None, :after] if after else None
        rank, last = stretch.rank, len(stretch.lengths) - 1
        reach = Reach(max(rank - 1, 0), min(rank + 1, last))
        nothing_passes = x.new_full((1, 1), -math.inf, dtype=torch.float64)
        found = send(Message(to_right, to_left, nothing_passes), stretch, reach, furthest=1)()
        assert found.from_left is not None
        later = x[:, :0] if found.from_right is None else found.from_right[:, 0]
        return found.from_left[:, 0], later

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return gather(x, dim, self._stretch(x.shape[dim]))

    def check_padding(self, key_mask: Tensor) -> None:
        """Refuse a mask `[B, T]` whose padding is not last, over all ranks."""
        stretch = self._stretch(key_mask.shape[1])
        shape = (2, len(stretch.lengths), len(key_mask))
        told = key_mask.new_zeros(shape, dtype=torch.float64)
        told[0, stretch.rank] = key_mask.sum(1)
        told[1, stretch.rank] = (key_mask.long().diff(dim=1) > 0).any(1)
        real, inside = sum_over_ranks(told, stretch)  # [ranks, B]
        if not readable(real):
            return
        padding = real.new_tensor(stretch.lengths)[:, None] - real
        before = padding.cumsum(0) - padding  # on earlier ranks
        wrong = (((before > 0) & (real > 0)) | (inside > 0)).any(0)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                "key_mask must have padding behind the last real token alone in a model that is "
                f"split over ranks, got some before it in row {row}"
            )

    def _stretch(self, tokens: int) -> Stretch:
        return stretch_of(tokens, **self.among)


def _parts(model: nn.Module) -> list[AttentionLayer | Backbone]:
    """The modules that ask for ranks: layers, and backbones, which count positions."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    return [part for part in model.modules() if isinstance(part, AttentionLayer | Backbone)]
