"""A model that learns: weights, optimiser and what they leave behind, as one state to save."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cosformer.models import (
    Backbone,
    Model,
    ModelConfig,
    TokenLoss,
    TokenModel,
    create_model,
)
from cosformer.tasks import Batch
from cosformer.training.checkpoints import Checkpoint, bring_back, weights
from cosformer.training.config import RunConfig
from cosformer.training.evaluation import Losses, autocast
from cosformer.training.feed import Fed
from cosformer.training.graph import Replayed, on_device
from cosformer.training.optimiser import begin_moments, create_optimiser, grouped, moments
from cosformer.training.phases import Phase
from cosformer.training.processes import ALONE, Processes, in_full, laid_like


class Diverged(ArithmeticError):
    """A loss, a gradient or a weight was not finite."""


class Learner:
    """A model, its optimiser and its moving average; `learn` takes one step.

    Losses and norms of gradients stay on the device, in the window, until `read` asks for those
    since its last call: a step never waits for its own result.
    """

    def __init__(
        self, config: RunConfig, phase: Phase, number: int, processes: Processes = ALONE
    ) -> None:
        self.config, self.phase, self.number, self.processes = config, phase, number, processes
        self.device = phase.task.device
        torch.manual_seed(config.seed)
        self.model = processes.sharded(create(phase.model).to(self.device), config.precision)
        self._called = processes.replicated(Losses(self.model, phase.task.facts))
        self.groups = grouped(self.model)
        # numbers that change from step to step, where a graph reads them
        self._lr = on_device(phase.optimiser.lr, self.device) if config.graph else None
        self._labels = on_device(1.0, self.device)
        self.optimiser = create_optimiser(self.groups, phase.optimiser, self._lr)
        self.average = _average(self.model, config.average)
        self.step = 0
        _backbone(self.model).recompute = config.recompute
        self.compiled = Compiled(self.model) if self._compiles() else None
        # a row a step: the loss, then the norm of each group's gradient
        rows = min(config.log_every, phase.budget.steps)
        self._window = torch.zeros(rows, 1 + len(self.groups), device=self.device)
        self._row = torch.zeros(1 + len(self.groups), device=self.device)
        self._filled = 0
        self._learn: Callable[[Batch], None] = self._update
        if config.graph:
            self._learn = Replayed(self._update, self.device)

    @property
    def judged(self) -> nn.Module:
        """The model to evaluate and to keep."""
        return self.model if self.average is None else self.average.module

    def learn(self, fed: Fed) -> None:
        """One update of the parameters."""
        # draws of a step depend on its number alone, so that no state of a generator is kept
        torch.manual_seed((self.config.seed * 2 + self.number) * 2**32 + self.step)
        self._set_rate()
        self._labels.fill_(max(fed.labels, 1))
        self.processes.fit(self.model, fed.length)
        self._learn(fed.batch)
        self._window[self._filled] = self._row
        self._filled += 1
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.step += 1

    def _update(self, batch: Batch) -> None:
        """All of a step that a graph can hold: what changes beside the batch lies in tensors."""
        loss = torch.zeros((), device=self.device)
        parts = _parts(batch, self.phase.budget.accumulate)
        for n, part in enumerate(parts, 1):
            with self.processes.accumulating(self._called, is_last=n == len(parts)):
                with autocast(self.device, self.config.precision), self.compiled or nullcontext():
                    share = self._called(part) / self._labels
                self.processes.weighted(share).backward()
            loss += share.detach()
        self.processes.sum(loss)
        torch.stack([loss, *self._clip()], out=self._row)
        self.optimiser.step()
        self.optimiser.zero_grad()

    def _set_rate(self) -> None:
        share_of_highest = self.config.schedule.rate(self.step, self.phase.end(self.step + 1))
        lr = self.phase.optimiser.lr * share_of_highest
        if self._lr is not None:
            self._lr.fill_(lr)
            return
        for group in self.optimiser.param_groups:
            group["lr"] = lr

    def read(self) -> tuple[float, float]:
        """Mean loss and last gradient norm of the steps since the last reading."""
        rows = self._rows()
        self._filled = 0
        return math.fsum(row[0] for row in rows) / len(rows), math.hypot(*rows[-1][1:])

    def check(self) -> None:
        """An error if a loss, a gradient or a weight is not finite: nothing such is kept."""
        self._rows()
        norms = {name: _norm(found) for name, found in self.groups.items()}
        wrong = [f"weights of {name}" for name, norm in norms.items() if not norm.isfinite()]
        if wrong:
            raise self._diverged(self.step, wrong)

    def _compiles(self) -> bool:
        if self.config.compile is not None:
            return self.config.compile
        _, shard, context = self.processes.sizes
        is_whole = shard * context == 1
        return is_whole and self.device.type == "cuda" and isinstance(self.model, TokenModel)

    @property
    def lr(self) -> float:
        """The rate of the last step."""
        return float(self.optimiser.param_groups[0]["lr"])

    def tensors(self) -> dict[str, Tensor]:
        """All that the next step depends on, by name; processes may have parts of each."""
        found = {f"model.{name}": tensor for name, tensor in weights(self.model).items()}
        if self.average is not None:
            kept = weights(self.average.module)
            found |= {f"average.{name}": tensor for name, tensor in kept.items()}
        state = moments(self.model, self.optimiser)
        found |= {f"optimiser.{name}": tensor for name, tensor in state.items()}
        found["window"] = self._window[: self._filled]
        return found

    def restore(self, checkpoint: Checkpoint, step: int, where: str) -> None:
        """Go on where a checkpoint was written; `where` names it in errors."""
        begin_moments(self.model, self.optimiser)
        self._filled = self.phase.unlogged(step, self.config.log_every)
        models = {"model.": self.model}
        if self.average is not None:
            models["average."] = self.average.module
            self.average.n_averaged.fill_(step)
        bring_back(self.tensors(), models, checkpoint, where, self.processes)
        self.step = step

    def begin_from(self, before: nn.Module) -> None:
        """Go on from a model that has learnt."""
        take_over(self.model, before)
        if self.average is not None:
            self.average = _average(self.model, self.config.average)

    def _clip(self) -> list[Tensor]:
        """The norm of each group's gradient; all are scaled if the whole is too long."""
        norms = [
            _norm([p.grad for p in group if p.grad is not None]) for group in self.groups.values()
        ]
        clip = self.phase.optimiser.clip
        if clip is not None:
            total = torch.linalg.vector_norm(torch.stack(norms))
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, total)
        return norms

    def _rows(self) -> list[list[float]]:
        """The window, a row a step; an error if something in it is not finite."""
        rows: list[list[float]] = self._window[: self._filled].tolist()
        names = ["loss", *(f"gradient of {name}" for name in self.groups)]
        for step, row in enumerate(rows, self.step - self._filled + 1):
            pairs = zip(names, row, strict=True)
            if wrong := [name for name, value in pairs if not math.isfinite(value)]:
                raise self._diverged(step, wrong)
        return rows

    def _diverged(self, step: int, wrong: list[str]) -> Diverged:
        return Diverged(f"step {step} of {self.phase.name}: {', '.join(wrong)} not finite")


class Compiled:
    """A model whose blocks and loss are compiled, within `with`; elsewhere it is as it was.

    Block by block: those that are alike are compiled once, in seconds where a whole model takes
    minutes. An evaluation, with its other shapes, is not worth it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._backbone = _backbone(model)
        self._calls = [torch.compile(block) for block in self._backbone.blocks]
        self._model = model if isinstance(model, TokenModel) else None
        loss = TokenModel.token_loss
        self._token_loss = TokenLoss(torch.compile(loss.whole), torch.compile(loss.part))

    def __enter__(self) -> None:
        self._backbone.calls = self._calls
        if self._model is not None:
            self._model.token_loss = self._token_loss

    def __exit__(self, *_: object) -> None:
        del self._backbone.calls
        if self._model is not None:
            del self._model.token_loss


def _backbone(model: nn.Module) -> Backbone:
    """The stack of blocks that every model of a task has."""
    return cast(Backbone, model.get_submodule("backbone"))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of tensors as if they were one, all parts of them on all processes."""
    return in_full(torch.nn.utils.get_total_norm(tensors))


def create(config: ModelConfig) -> Model:
    """The model of a config; an option that its mechanism does not have is a ValueError."""
    try:
        return create_model(config)
    except TypeError as error:  # an option that the mechanism does not have
        raise ValueError(f"model.options: {error}") from None


def take_over(model: nn.Module, before: nn.Module) -> None:
    """Weights of a model that has learnt: all if the head fits as well, else the backbone's.

    A cls token that only one of the two has is no part of it.
    """
    part = "" if _alike(model, before) else "backbone"
    module = model.get_submodule(part)
    own, learnt = module.state_dict(), before.get_submodule(part).state_dict()
    try:
        module.load_state_dict(
            {name: laid_like(learnt.get(name, own[name]), own[name]) for name in own}
        )
    except RuntimeError as error:  # a mechanism made for one length, and a cls beside it
        raise ValueError(f"what was learnt before must fit the model: {error}") from None


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same class, names and shapes."""
    shapes = [{name: t.shape for name, t in x.state_dict().items()} for x in (one, other)]
    # FSDP makes a subclass of the model's own class
    is_same = isinstance(one, type(other)) or isinstance(other, type(one))
    return is_same and shapes[0] == shapes[1]


def _average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


def _parts(batch: Batch, count: int) -> list[Batch]:
    """The batch cut along its sequences."""
    pieces = {name: tensor.tensor_split(count) for name, tensor in batch.items()}
    return [{name: pieces[name][n] for name in batch} for n in range(count)]
