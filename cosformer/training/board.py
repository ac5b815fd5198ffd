"""TensorBoard's files beside the log, for those who ask for them."""

from pathlib import Path
from typing import Any

from cosformer.training.progress import Event, Progress, Started


class Board:
    """TensorBoard's files, a folder for each phase; a step taken again replaces its first entry."""

    def __init__(self, folder: Path) -> None:
        import tensorboard  # noqa: F401  # if it is missing, the error names it

        self._folder = folder
        self._writer: Any = None

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._open(event)
            return
        if isinstance(event, Progress):
            names = ("loss", "lr", "gradient_norm", "tokens_per_second")
            found = {name: getattr(event, name) for name in names}
        else:
            found = {f"valid/{name}": value for name, value in event.metrics.items()}
        for name, value in found.items():
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, event: Started) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder / event.phase), purge_step=event.step + 1)
