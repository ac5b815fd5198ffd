"""Whether a run can be trained to its end, asked before its folder is there."""

from collections.abc import Sequence

import torch
from torch import nn

from cosformer.mechanisms import Mechanism
from cosformer.models import Model, ModelConfig
from cosformer.training.learner import create, take_over
from cosformer.training.phases import Phase


def require_possible(todo: Sequence[Phase]) -> None:
    """An error unless each phase's model can be made, read its sequences and follow the last."""
    before = None
    for phase in todo:
        try:
            model: nn.Module = outline(phase.model)
        except RuntimeError:  # a mechanism that reads its numbers while it is made
            model = create(phase.model)
        _require_length(model, phase)
        if before is not None:
            take_over(model, before)
        before = model


def outline(config: ModelConfig) -> Model:
    """The model without its numbers: names, shapes and dtypes, and next to no memory.

    A RuntimeError where a mechanism reads its numbers while it is made.
    """
    with torch.device("meta"):
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
