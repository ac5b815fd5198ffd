"""What a run tells, shown by others beside the log: TensorBoard and Weights & Biases."""

import uuid
from pathlib import Path
from typing import Any

from cosformer.config import plain
from cosformer.training.config import RunConfig
from cosformer.training.folder import BOARD, WANDB, read_json, write_json
from cosformer.training.progress import Evaluated, Event, Progress, Started


def boards(config: RunConfig) -> "list[TensorBoard | Wandb]":
    """What takes the events of a run, the first of which is `Started`, until it is closed.

    An error names the package that is missing.
    """
    found: list[TensorBoard | Wandb] = []
    if config.tensorboard:
        found.append(TensorBoard(config.out / BOARD))
    if config.wandb:
        found.append(Wandb(config))
    return found


class TensorBoard:
    """TensorBoard's files, a folder for each phase; a step taken again replaces its first entry."""

    def __init__(self, folder: Path) -> None:
        import tensorboard  # noqa: F401  # if it is missing, the error names it

        self._folder = folder
        self._writer: Any = None

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            folder = str(self._folder / event.phase)
            self._writer = SummaryWriter(folder, purge_step=event.step + 1)
            return
        for name, value in _numbers(event).items():
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases, which goes on where ours does; `wandb.json` keeps its id.

    Its environment variables decide all else: WANDB_MODE=offline needs no account and no network.
    """

    def __init__(self, config: RunConfig) -> None:
        import wandb  # if it is missing, the error names it

        self._wandb, self._config = wandb, config
        self._run: Any = None

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            if self._run is None:
                self._run = self._begun()
            # every phase counts its own steps, and a stopped run may take some of them again
            self._run.define_metric(f"{event.phase}/step")
            self._run.define_metric(f"{event.phase}/*", step_metric=f"{event.phase}/step")
            return
        numbers = {"step": event.step, **_numbers(event)}
        self._run.log({f"{event.phase}/{name}": value for name, value in numbers.items()})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _begun(self) -> Any:
        out = self._config.out
        if not (out / WANDB).is_file():
            write_json(out / WANDB, {"id": uuid.uuid4().hex})
        number = read_json(out / WANDB).get("id")
        if not isinstance(number, str):
            raise ValueError(f"id in {out / WANDB} must be text, got {number!r}")
        about = {"name": out.name, "config": plain(self._config), "dir": str(out)}
        try:
            return self._wandb.init(id=number, resume="allow", **about)
        except self._wandb.Error as error:  # such as no account
            remedy = "WANDB_MODE=offline needs no account"
            raise ValueError(f"wandb must take the run in {out}: {error}; {remedy}") from None


def _numbers(event: Progress | Evaluated) -> dict[str, float]:
    """The numbers of an event that boards show, by name."""
    if isinstance(event, Evaluated):
        return {f"valid/{name}": value for name, value in event.metrics.items()}
    names = ("loss", "lr", "gradient_norm", "tokens_per_second")
    return {name: getattr(event, name) for name in names}
