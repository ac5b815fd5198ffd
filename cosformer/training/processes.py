"""The processes of one run: what each has of a batch and of the model, and what all agree on."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from cosformer.distributed import split, unsplit
from cosformer.models import Backbone, TokenModel
from cosformer.tasks import IGNORED, Batch
from cosformer.training.config import Parallel
from cosformer.training.interrupt import Handler, handled_by

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ADDRESS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which torchrun tells a process of the others."""
OF_TIME = ("timed out", "timeout")
OF_OTHERS = ("gloo", "nccl", "connection", "peer")
"""Words in messages of gloo and NCCL, whose errors have no class of their own."""
SOON = 1.0
"""Seconds within which a process that fails has told of it."""
LONGEST_ASKED = 30.0
"""Seconds for which a process asks who else has failed, at most."""


class Lost(RuntimeError):
    """Another process has failed, has gone, or does not answer."""


class Processes:
    """A process that is alone; `Together` is one of many."""

    rank, count, sizes = 0, 1, (1, 1, 1)
    sharing: dist.ProcessGroup | None = None
    """All processes, for what threads exchange, if they share parameters: each then keeps its part
    of a checkpoint. None: the first has all, and writes it."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def part(self, batch: Batch) -> Batch:
        """The rows and tokens of a batch that this process has."""
        return batch

    def sharded(self, model: nn.Module, precision: str) -> nn.Module:
        """The model with parameters that processes share, where they do."""
        return model

    def replicated(self, losses: nn.Module) -> nn.Module:
        """What to call to have gradients of all rows and tokens after `backward`."""
        return losses

    def fit(self, model: nn.Module, length: int) -> None:
        """Prepare a model for its part of sequences that have so many tokens."""

    def release(self, model: nn.Module) -> None:
        """Undo `fit`."""

    def accumulating(
        self, called: nn.Module, *, is_last: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of a part of a step: the last one sums gradients over all."""
        return contextlib.nullcontext()

    def weighted(self, loss: Tensor) -> Tensor:
        """A share of the loss, as its backward wants it."""
        return loss

    def sum(self, number: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in place."""
        return number

    def agreed(self, wish: bool) -> bool:
        """What the first process wishes; all are interrupted if a signal has come to any one."""
        return wish

    def wait(self) -> None:
        """Return when all processes have come here."""

    def require_same(self, name: str, value: object) -> None:
        """An error unless all processes have the same value."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep signals for `agreed`: no process may leave the others in the middle of a step."""
        yield

    @contextlib.contextmanager
    def guarded(self, where: Callable[[], str]) -> Iterator[None]:
        """Tell the others of an error in the block, and say whose error ended an exchange."""
        yield


ALONE = Processes()
"""This process and no other."""


def met(soon: timedelta) -> tuple[Store, int, int] | None:
    """Where the processes that torchrun has started tell each other, this one's rank, their number.

    None: this process is alone.
    """
    if _started() == 1:
        return None
    store, rank, count = next(iter(rendezvous("env://", timeout=soon)))
    # torchrun's store may outlive a restart, with addresses of processes that are gone
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return PrefixStore(f"attempt {restarts}", store), rank, count


@contextlib.contextmanager
def shown(*, is_first: bool) -> Iterator[None]:
    """What is printed to stdout in the block is shown by the first process alone."""
    with contextlib.ExitStack() as closed:
        if not is_first:
            nowhere = closed.enter_context(open(os.devnull, "w"))
            closed.enter_context(contextlib.redirect_stdout(nowhere))
        yield


@contextlib.contextmanager
def joined(parallel: Parallel, device: str) -> Iterator[Processes]:
    """All processes of the run, as torchrun has started them, or this one alone.

    A group that is there already is used, and left as it is.
    """
    if dist.is_available() and dist.is_initialized():
        yield Together(parallel, device, None)
        return
    with _left_for_torchrun():
        parallel.sizes(_started())  # an error before anybody waits for anybody
        found = met(timedelta(seconds=parallel.timeout))
        if found is None:
            yield ALONE
        else:
            yield from _joined(parallel, device, *found)


def _joined(
    parallel: Parallel, device: str, store: Store, rank: int, count: int
) -> Iterator["Together"]:
    """This process in the group of all that have met at `store`; the group ends with the block."""
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=count,
        timeout=_waits(parallel, "cuda" if is_gpu else "cpu"),
    )
    try:
        yield Together(parallel, device, PrefixStore("failures", store))
    except (Exception, GeneratorExit):
        raise  # who closes a group waits for the others, who may be gone
    except BaseException:  # an interrupt, of all
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextlib.contextmanager
def _left_for_torchrun() -> Iterator[None]:
    """Leave an error of the block where torchrun looks for what its report ends with."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            about = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError), open(path, "w") as file:
                json.dump({"message": {"message": str(error), "extraInfo": about}}, file)
        raise


class Together(Processes):
    """This process where a run has several."""

    def __init__(self, parallel: Parallel, device: str, store: Store | None) -> None:
        """`store`: where processes tell each other of failures; None: they do not."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.sizes = data, shard, context = parallel.sizes(self.count)
        self._timeout, self._store = parallel.timeout, store
        self._kind = torch.device(device).type
        wait = _waits(parallel, self._kind)
        self.mesh = _mesh(self._kind, {"data": data, "shard": shard, "context": context}, wait)
        place = self.mesh.get_coordinate()
        assert place is not None  # every process is in the mesh
        self._place = place
        if shard > 1:
            # processes with other stretches of a sequence share the same parameters as well
            over = {"replicated": data, "sharded": shard * context}
            self._shards = _mesh(self._kind, over, wait)
        self._has_failed = False
        self._arrived: list[int] = []
        self._handlers: dict[int, Handler] = {}
        is_gloo = dist.get_backend() == "gloo"
        soon = timedelta(seconds=parallel.timeout)
        if shard > 1:
            self.sharing = dist.new_group(None, soon, "gloo")
        self._control = dist.group.WORLD if is_gloo else dist.new_group(None, soon, "gloo")

    def part(self, batch: Batch) -> Batch:
        data, shard, context = self._place
        groups, stretches = self.sizes[0] * self.sizes[1], self.sizes[2]
        mine = dict(batch)
        for name, tensor in batch.items():
            rows = tensor.tensor_split(groups)[data * self.sizes[1] + shard]
            if not len(rows):  # every process calls the model: this one with a row of no effect
                rows = torch.full_like(tensor[:1], IGNORED) if name == "labels" else tensor[:1]
            if stretches > 1:
                rows = rows.tensor_split(stretches, 1)[context].contiguous()
            mine[name] = rows
        return mine

    def sharded(self, model: nn.Module, precision: str) -> nn.Module:
        if self.sizes[1] == 1:
            return model
        from torch.distributed.fsdp import (
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        policy = MixedPrecisionPolicy()
        if precision == "bfloat16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for backbone in [part for part in model.modules() if isinstance(part, Backbone)]:
            for block in backbone.blocks:
                fully_shard(block, mesh=self._shards, mp_policy=policy)
        fully_shard(model, mesh=self._shards, mp_policy=policy)
        if isinstance(model, TokenModel):
            register_fsdp_forward_method(model, "summed_loss")
        return model

    def replicated(self, losses: nn.Module) -> nn.Module:
        if self.sizes[1] > 1:
            return losses
        is_new = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {
            "forward_sync_buffers" if is_new else "broadcast_buffers": False  # no step changes them
        }
        # DDP lays gradients out anew after its first step, unless it looks for unused ones: bits of
        # their sums would depend on when a run was begun again, which they do not on a CPU
        options["find_unused_parameters"] = self._kind == "cpu"
        return DistributedDataParallel(losses, gradient_as_bucket_view=True, **options)

    @contextlib.contextmanager
    def accumulating(self, called: nn.Module, *, is_last: bool) -> Iterator[None]:
        if isinstance(called, DistributedDataParallel):
            with contextlib.nullcontext() if is_last else called.no_sync():
                yield
        else:
            called.model.set_requires_gradient_sync(is_last)  # type: ignore[operator, union-attr]
            yield

    def weighted(self, loss: Tensor) -> Tensor:
        return loss * self.count  # DDP and FSDP take the mean over processes, a loss is a sum

    def fit(self, model: nn.Module, length: int) -> None:
        ranks = self.sizes[2]
        if ranks > 1:
            lengths = [len(each) for each in torch.arange(length).tensor_split(ranks)]
            split(model, lengths=lengths, group=self.mesh.get_group("context"))

    def release(self, model: nn.Module) -> None:
        if self.sizes[2] > 1:
            unsplit(model)

    def sum(self, number: Tensor) -> Tensor:
        dist.all_reduce(number)
        return number

    def agreed(self, wish: bool) -> bool:
        told = torch.tensor([max(self._arrived, default=0), wish and self.is_first])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._control)
        number, wish = told.tolist()
        if number:
            handler = self._handlers.get(number)
            if handler is not None:
                handler(number, None)
            raise KeyboardInterrupt
        return bool(wish)

    def wait(self) -> None:
        dist.barrier(group=self._control)

    def require_same(self, name: str, value: object) -> None:
        found: list[object] = [None] * self.count
        dist.all_gather_object(found, value, group=self._control)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ValueError(
                    f"{name} must be the same on all ranks, got {found[0]!r} on rank 0 and "
                    f"{other!r} on rank {rank}"
                )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with handled_by(lambda number, _: self._arrived.append(number)) as self._handlers:
            yield

    @contextlib.contextmanager
    def guarded(self, where: Callable[[], str]) -> Iterator[None]:
        try:
            yield
        except Lost:
            raise
        except (Exception, GeneratorExit) as error:
            if _is_of_exchange(error):
                raise Lost(self._why(where(), error)) from error
            if not self._has_failed:  # else a block inside this one has told of it
                self._has_failed = True
                self._tell("cause", f"{where()}: {error or type(error).__name__}")
            raise

    def _why(self, where: str, error: BaseException) -> str:
        """Whose error has ended an exchange, as far as processes have told."""
        self._tell("waited", where)
        if any(mark in str(error).lower() for mark in OF_TIME):
            self._tell("late", where)
        begin, is_late, silent = time.monotonic(), False, list[int]()
        patience = min(max(self._timeout / 10, 2.0), LONGEST_ASKED)
        with contextlib.suppress(RuntimeError):  # whoever keeps the store may be gone as well
            while self._store is not None and time.monotonic() < begin + patience:
                if causes := self._told("cause"):
                    cause = self._store.get(f"cause/{causes[0]}").decode()
                    return f"rank {causes[0]} has failed at {cause}"
                waited, is_late = self._told("waited"), bool(self._told("late"))
                silent = [rank for rank in range(self.count) if rank not in waited]
                if not silent or (not is_late and time.monotonic() > begin + SOON):
                    break  # nobody waits for a process that was killed
                time.sleep(0.05)
        if is_late and silent:
            ranks = ", ".join(map(str, silent))
            late = f"parallel.timeout={self._timeout:g} seconds"
            return f"rank {ranks} hangs at {where}: no answer within {late}"
        return f"a process has gone at {where}: {error}"

    def _tell(self, what: str, message: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{what}/{self.rank}", message)

    def _told(self, what: str) -> list[int]:
        """The ranks that have told of such a thing."""
        assert self._store is not None
        return [rank for rank in range(self.count) if self._store.check([f"{what}/{rank}"])]


def _started() -> int:
    """How many processes torchrun has started; 1: this one alone, whoever has."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in ADDRESS) else 1


def in_full(tensor: Tensor) -> Tensor:
    """A tensor of which processes have parts as one, on all of them; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def laid_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, if it has a part of `like`; else all of it."""
    if not hasattr(like, "full_tensor") or hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def _waits(parallel: Parallel, kind: str) -> timedelta:
    """How long exchanges may take on a kind of device."""
    # longer on GPUs: gloo, which says what is wrong, looks at every step before NCCL ends a process
    return timedelta(seconds=parallel.timeout * (2 if kind == "cuda" else 1))


def _mesh(kind: str, sizes: Mapping[str, int], wait: timedelta) -> "DeviceMesh":
    """A mesh of all processes with these dimensions, of groups that wait so long."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = []
    for n, size in enumerate(sizes.values()):
        lines = ranks.movedim(n, -1).reshape(-1, size).tolist()
        groups.append(dist.new_subgroups_by_enumeration(lines, timeout=wait)[0])
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=tuple(sizes))


def _is_of_exchange(error: BaseException) -> bool:
    """Whether an exchange with other processes has failed, and not this process itself."""
    if isinstance(error, dist.DistError):
        return True
    message = str(error).lower()
    return type(error) is RuntimeError and any(mark in message for mark in (*OF_TIME, *OF_OTHERS))
