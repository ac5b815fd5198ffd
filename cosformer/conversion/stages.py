"""The two stages of a conversion: each layer by itself, then the whole model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import cosformer.hf as hf
from cosformer.models import pool
from cosformer.training import Diverged, Schedule, duration, moments, weights

SCHEDULE = Schedule(shape="cosine", warmup=0.05, final=0.02)
DECAYS = 10.0
"""By which factor the logits of decays, which lie between 0 and 6, learn faster than maps."""
ADDED = 4.0
"""By which factor new parameters learn faster than pretrained ones, where all learn."""

Losses = Mapping[str, Tensor]


class Stage(NamedTuple):
    """What is learnt, by which parameters and for how long."""

    name: str
    steps: int
    groups: list[tuple[float, list[nn.Parameter]]]
    """Highest learning rates and their parameters."""
    losses: Callable[[Mapping[str, Tensor]], Losses]
    """The errors on a batch, by what they are of; their sum is made small."""


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    stage: str
    step: int
    steps: int
    losses: Mapping[str, float]
    """Mean errors since the last report, by layer and, at last, of the output."""
    seconds_left: float

    def __str__(self) -> str:
        width = len(str(self.steps))
        errors = "  ".join(f"{name} {value:.4f}" for name, value in self.losses.items())
        return (
            f"{self.stage} {self.step:>{width}}/{self.steps}  {errors}  "
            f"{duration(self.seconds_left)} left"
        )


def match(model: Any, steps: int, highest: float) -> Stage:
    """Each layer's replacement learns the output of softmax, which all later layers still get."""
    layers = model.config.quantization_config.layers
    names = {layer: f"layer {n}" for n, layer in enumerate(layers)}

    def losses(inputs: Mapping[str, Tensor]) -> Losses:
        with hf.matching(model) as found, torch.no_grad():
            model(**inputs)
        return {names[layer]: errors[0] for layer, errors in found.items()}

    maps, decays = list[nn.Parameter](), list[nn.Parameter]()
    for heads in hf.heads_of(model).values():
        for name, parameter in heads.named_parameters():
            (decays if name == "decay_logit" else maps).append(parameter)
    groups = [(highest, maps), (DECAYS * highest, decays)]
    # without maps and decays there is nothing to learn before the whole is distilled
    return Stage("match", steps if maps or decays else 0, groups, losses)


def distil(model: Any, teacher: Any, steps: int, highest: float) -> Stage:
    """The whole model but its embeddings learns hidden states and output of the original.

    The errors are those of every hidden state, Σ (own − teacher's)² / Σ teacher's² over the number
    of layers, and of the output: the divergence of logits from the teacher's, or, of a model
    without logits, the error of the mean of the last hidden states.
    """

    def losses(inputs: Mapping[str, Tensor]) -> Losses:
        with torch.no_grad():
            wanted = teacher(**inputs, output_hidden_states=True)
        own, mask = model(**inputs, output_hidden_states=True), inputs["attention_mask"]
        pairs = list(zip(own.hidden_states, wanted.hidden_states, strict=True))[1:]
        found = {
            f"layer {n}": hf.relative_error(x, y, mask) / len(pairs)
            for n, (x, y) in enumerate(pairs)
        }
        if getattr(own, "logits", None) is not None:
            return found | {"logits": divergence(own.logits, wanted.logits, mask)}
        ours, theirs = (pool(x.last_hidden_state, mask.bool(), "mean") for x in (own, wanted))
        return found | {"embedding": hf.relative_error(ours, theirs, None)}

    new = {id(p) for heads in hf.heads_of(model).values() for p in heads.parameters()}
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    parameters = list(model.parameters())
    for parameter in parameters:  # those of rare tokens would be moved by what others learn
        parameter.requires_grad_(id(parameter) not in tables)
    old = [p for p in parameters if id(p) not in new | tables]
    added = [p for p in parameters if id(p) in new]
    return Stage("distil", steps, [(highest, old), (ADDED * highest, added)], losses)


def divergence(own: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
    """Kullback and Leibler's, of the wanted logits from our own: its mean over real tokens."""
    ours, theirs = (each.float().log_softmax(-1) for each in (own, wanted))
    each = nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    real = mask.to(each.dtype) if each.shape == mask.shape else torch.ones_like(each)
    return (each * real).sum() / real.sum()


class Training:
    """A stage under way: `learn` takes one step."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.step = stage, 0
        self.parameters = nn.ParameterList([p for _, each in stage.groups for p in each])
        self.optimiser = AdamW(
            [{"params": each, "lr": highest, "highest": highest} for highest, each in stage.groups],
            betas=(0.9, 0.99),
            weight_decay=0.0,
            fused=True,
        )
        self._window: list[dict[str, Tensor]] = []

    def learn(self, inputs: Mapping[str, Tensor]) -> None:
        share = SCHEDULE.rate(self.step, self.stage.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = share * group["highest"]
        losses = self.stage.losses(inputs)
        torch.stack(list(losses.values())).sum().backward()
        for parameter in self.parameters:  # of a part that no loss depends on, as a pooler
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        self._window.append({name: loss.detach() for name, loss in losses.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that the next step depends on, by name."""
        state = moments(self.parameters, self.optimiser)
        found = {f"model.{name}": x for name, x in weights(self.parameters).items()}
        return found | {f"optimiser.{name}": x for name, x in state.items()}

    def check(self) -> None:
        """An error if a weight or a moment of the optimiser is not finite: nothing such is kept."""
        if wrong := [name for name, x in self.tensors.items() if not x.isfinite().all()]:
            raise self._diverged(wrong[0])

    def read(self) -> dict[str, float]:
        """Mean errors of the steps since the last reading."""
        names = list(self._window[0])
        rows = torch.stack([torch.stack([row[name] for name in names]) for row in self._window])
        found = dict(zip(names, rows.mean(0).tolist(), strict=True))
        self._window.clear()
        if wrong := [name for name, value in found.items() if not math.isfinite(value)]:
            raise self._diverged(wrong[0])
        return found

    def _diverged(self, name: str) -> Diverged:
        return Diverged(f"step {self.step} of {self.stage.name}: {name} is not finite")
