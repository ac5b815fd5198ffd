"""A pass as a tape: the memory that it takes and the kernels that it launches, noted once.

Deciding in Python what to launch takes longer than short sequences take on the GPU. A later pass on
tensors of the same shapes, strides and alignment repeats the tape with other addresses.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.ops.hopper.nvrtc import Launch, noting_launches

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip
Results = Sequence[Tensor | None]


class Room(NamedTuple):
    """Memory that a pass allocates: like a given tensor, or of a size of its own."""

    like: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Tape:
    """What a pass does with the tensors that it is given and with those that it makes."""

    def __init__(
        self, device: torch.device, rooms: list[Room], fixed: list[int],
        launches: list[tuple[Launch, tuple[int, ...]]], returned: list[int | None],
    ) -> None:  # fmt: skip
        """Addresses are numbered: of the tensors given, then of `rooms`, then the `fixed` ones."""
        self._device, self._rooms, self._fixed = device, rooms, fixed
        self._launches = [(launch.start, operator.itemgetter(*at)) for launch, at in launches]
        self._returned = returned

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        """The results of the pass on tensors like those of the first one."""
        device = self._device
        made = [
            torch.empty_like(given[like])
            if like is not None
            else torch.empty_strided(size, stride, dtype=dtype, device=device)
            for like, size, stride, dtype in self._rooms
        ]
        addresses = [x.data_ptr() for x in given]
        addresses += [x.data_ptr() for x in made]
        addresses += self._fixed
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for start, chosen in self._launches:
            start(stream, chosen(addresses))
        return [None if n is None else made[n] for n in self._returned]


def on_tape(
    work: Callable[[], Results], given: Sequence[Tensor], fixed: Sequence[Tensor | None]
) -> tuple[Results, Tape | None]:
    """The results of a pass, and its tape; None if the pass does more than a tape can repeat.

    Args:
        work: the pass.
        given: the tensors that it reads and that differ from call to call, all of them distinct.
        fixed: tensors that it reads in every call, which the caller keeps.
    """
    with noting_launches() as noted, _Allocations() as seen:
        results = work()
    if seen.others:
        return results, None
    numbers = {x.data_ptr(): n for n, x in enumerate((*given, *seen.made)) if x.data_ptr()}
    kept = [x.data_ptr() for x in fixed if x is not None and x.data_ptr()]
    first_fixed = len(given) + len(seen.made)
    for n, address in enumerate((0, *kept), first_fixed):
        numbers.setdefault(address, n)
    try:
        launches = [(launch, tuple(numbers[at] for at in addresses)) for launch, addresses in noted]
        returned = [None if x is None else seen.numbers[id(x)] for x in results]
    except KeyError:  # a part of a tensor, or one from elsewhere
        return results, None
    if not launches:
        return results, None
    rooms = [_room(x, given) for x in seen.made]
    return results, Tape(given[0].device, rooms, [0, *kept], launches, returned)


def _room(x: Tensor, given: Sequence[Tensor]) -> Room:
    """How to take memory such as x again; `empty_like` takes half the time of `empty_strided`."""
    about = (x.shape, x.stride(), x.dtype)
    for n, other in enumerate(given):
        like = torch.empty_like(other, device="meta")
        if about == (like.shape, like.stride(), like.dtype):
            return Room(n, *about)
    return Room(None, *about)


class _Allocations(TorchDispatchMode):
    """Notes memory that is taken, and whether torch does anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # id of a tensor -> which one of `made` it is
        self.others = False
        self._kept: list[Tensor] = []  # an id is that of one tensor while the tensor lives

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self.numbers[id(out)] = len(self.made)
            self.made.append(out)
        elif function is _aten.detach.default and id(args[0]) in self.numbers:
            self.numbers[id(out)] = self.numbers[id(args[0])]  # empty_like of what has a gradient
            self._kept.append(out)
        else:
            self.others = True
        return out
