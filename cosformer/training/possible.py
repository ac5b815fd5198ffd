"""Whether a run can be trained to its end, asked before its folder is there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cosformer.mechanisms import Mechanism
from cosformer.models import Model, ModelConfig
from cosformer.training.config import RunConfig
from cosformer.training.learner import create, take_over
from cosformer.training.phases import Phase
from cosformer.training.processes import Processes

GATHERS = (
    "softmax layers gather the keys and values of all processes that share a sequence: their "
    "messages and memory grow with its length"
)


def require_possible(todo: Sequence[Phase]) -> None:
    """An error unless each phase's model can be made, read its sequences and follow the last."""
    before = None
    for phase in todo:
        model = _sketch(phase.model)
        _require_length(model, phase)
        if before is not None:
            take_over(model, before)
        before = model


def require_shared(todo: Sequence[Phase], config: RunConfig, processes: Processes) -> None:
    """An error unless many processes can train each phase, to the end that one process comes to."""
    if processes.count == 1:
        return
    data, shard, context = processes.sizes
    many = f"with {processes.count} processes"
    if config.graph:
        raise ValueError(f"graph must be false {many}, whose exchanges it cannot record, got True")
    if config.compile and shard * context > 1:
        raise ValueError(
            "compile must be false with parallel.shard or parallel.context above 1, got True"
        )
    if config.average is not None and shard > 1:
        raise ValueError(
            "average must be none with parallel.shard above 1, where no process has all weights, "
            f"got {config.average}"
        )
    for phase in todo:
        if phase.model.dropout:
            raise ValueError(
                f"model.dropout must be 0 {many}: its draws would depend on who has which rows, "
                f"got {phase.model.dropout}"
            )
        least = data * shard * phase.budget.accumulate
        if phase.budget.batch < least:
            raise ValueError(
                f"batch of {phase.name} must be at least data · shard · accumulate = {least}, a "
                f"row for each process and part, got {phase.budget.batch}"
            )
        if context > 1:
            require_stretches(phase, context)


def notes_on_sharing(phase: Phase, processes: Processes) -> list[str]:
    """What a user should know about how processes share a phase; a sentence each."""
    if processes.sizes[2] > 1 and "softmax" in phase.model.mechanisms:
        return [GATHERS]
    return []


def require_stretches(phase: Phase, context: int) -> None:
    """An error unless processes can have a stretch of each sequence."""
    if phase.model.kind not in ("decoder", "masked-lm"):
        raise ValueError(
            "parallel.context must be 1 for a model with one answer to a whole sequence, got "
            f"{context} for the {phase.model.kind} of {phase.name}"
        )
    length, needed = phase.task.facts.length, max(phase.model.conv - 1, 1)
    if length // context < needed:
        raise ValueError(
            f"parallel.context must leave each process at least {needed} of the {length} tokens "
            f"of {phase.name}, got {context}"
        )
    for each in _sketch(phase.model).modules():
        if isinstance(each, Mechanism) and not each.splits:
            raise ValueError(f"parallel.context must be 1: {each.unsplit_error()}, got {context}")


def outline(config: ModelConfig) -> Model:
    """The model without its numbers: names, shapes and dtypes, and next to no memory.

    A RuntimeError where a mechanism reads its numbers while it is made.
    """
    with torch.device("meta"), _Undrawn():
        return create(config)


class _Undrawn(TorchFunctionMode):
    """Leaves tensors as they are made: torch would import its compiler to draw no numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            return given.get("tensor", args[0] if args else None)
        return func(*args, **given)


def _sketch(config: ModelConfig) -> nn.Module:
    """The outline of a model, or all of it where that cannot be."""
    try:
        return outline(config)
    except RuntimeError:
        return create(config)


def _require_length(model: nn.Module, phase: Phase) -> None:
    length = phase.task.facts.length + (phase.model.pooling == "cls")
    for each in model.modules():
        if not isinstance(each, Mechanism):
            continue
        limit = each.traits.max_length
        if limit is not None and limit < length:
            raise ValueError(
                f"model.options must allow the {length} tokens of {phase.name}, got "
                f"{phase.model.mechanism} for up to {limit}: {each.length_hint}"
            )
