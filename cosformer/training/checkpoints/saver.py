"""Checkpoints are written while training goes on: from copies, in a thread, one after the other."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from cosformer.training.checkpoints.file import Checkpoint, fill, set_extra_states, write
from cosformer.training.checkpoints.parts import Parts
from cosformer.training.processes import Lost, Processes


class Saver:
    """Writes what a run keeps; at most one write is under way."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as they are now, on the CPU; none in a process that writes nothing."""
        if self._processes.sharing is None and not self._processes.is_first:
            return {}
        return {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}

    def begin(self, files: Mapping[Path, Checkpoint], done: Callable[[], None]) -> None:
        """Write checkpoints of copied tensors, in this order, then call `done`, in a thread.

        Nothing else may be under way.
        """
        assert self._thread is None
        self._thread = threading.Thread(target=self._write, args=(files, done), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the last write, if it has failed in this process.

        Of an error elsewhere that process tells; `wait` raises it here.
        """
        if self._error is not None and not isinstance(self._error, Lost):
            self.wait()

    def wait(self) -> None:
        """Return when nothing is under way; raise the error of the last write, if it has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self, *, is_left: bool = False) -> None:
        """Forget the error of the last write, once it has ended.

        `is_left`: other processes that it needs may be gone: it ends with this one at the latest.
        """
        if self._thread is not None and not is_left:
            self._thread.join()
        self._thread = self._error = None

    def _write(self, files: Mapping[Path, Checkpoint], done: Callable[[], None]) -> None:
        try:
            for path, checkpoint in files.items():
                if self._processes.sharing is not None:
                    from cosformer.training.checkpoints.sharded import write_parts

                    write_parts(path, checkpoint, self._processes.sharing)
                elif self._processes.is_first:
                    write(path, checkpoint)
            done()
        except BaseException as error:
            self._error = error


def bring_back(
    own: Mapping[str, Tensor],
    models: Mapping[str, nn.Module],
    checkpoint: Checkpoint,
    where: str,
    processes: Processes,
) -> None:
    """Give tensors, and models that keep more than tensors, what a checkpoint has of them.

    Args:
        own: the tensors by their names in the checkpoint.
        models: what stands before the names of a model's state -> the model.
        checkpoint: as it was read.
        where: names the checkpoint in errors.
        processes: those that go on from it, each with its own parts.
    """
    stored, sharing = checkpoint.tensors, processes.sharing
    if sharing is not None and isinstance(stored, Parts):
        from cosformer.training.checkpoints.sharded import fill_parts

        fill_parts(own, stored, where, sharing)
    else:
        fill(own, stored, where)
    for prefix, model in models.items():
        set_extra_states(model, own, prefix)
