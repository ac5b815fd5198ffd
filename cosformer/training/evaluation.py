"""What a model answers, how wrong it is, and what is reported of it."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.models import TokenModel
from cosformer.runtime import compute_dtype
from cosformer.tasks import IGNORED, Batch, Facts, LanguageTask, Task
from cosformer.training.feed import Fed, described
from cosformer.training.processes import ALONE, Processes


def answers(model: nn.Module, batch: Batch) -> Tensor:
    """Logits `[B, T, vocabulary]` or `[B, classes]`, as the task asks."""
    towers = [name for name in ("tokens", "tokens2") if name in batch]
    masks = [batch.get(name.replace("tokens", "mask")) for name in towers]
    logits: Tensor = model(*(batch[name] for name in towers), *masks)
    return logits


class Losses(nn.Module):
    """A model as a step of training calls it: a batch to its summed loss."""

    def __init__(self, model: nn.Module, facts: Facts) -> None:
        super().__init__()
        self.model, self.asked = model, facts.asked

    def forward(self, batch: Batch) -> Tensor:
        return summed_loss(self.model, batch, self.asked)


def summed_loss(model: nn.Module, batch: Batch, asked: int | None = None) -> Tensor:
    """Cross entropy, the sum over all labels, in float32 at least; `asked` as in `Facts`."""
    if isinstance(model, TokenModel):
        return model.summed_loss(batch["tokens"], batch["labels"], batch.get("mask"), asked)
    return _cross_entropy(answers(model, batch), batch["labels"])


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.flatten(0, -2).to(compute_dtype(logits.dtype))
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    split: str,
    *,
    batch_size: int,
    batches: int | None = None,
    precision: str = "float32",
    processes: Processes = ALONE,
) -> dict[str, float]:
    """Metrics of a split, by name: `loss` in nats a label, and what the task is judged by.

    `processes` share every batch.
    """
    loss = torch.zeros((), dtype=torch.float64, device=task.device)
    right, labels = torch.zeros((), dtype=torch.int64, device=task.device), 0
    for fed in _judging(model, task, split, batch_size, batches):
        batch = processes.part(fed.batch)
        processes.fit(model, fed.length)
        with autocast(task.device, precision):
            logits = answers(model, batch)
        asked = batch["labels"]
        loss += _cross_entropy(logits, asked)
        right += ((logits.argmax(-1) == asked) & (asked != IGNORED)).sum()
        labels += fed.labels
        processes.agreed(False)  # an interrupt need not wait for the end
    processes.sum(loss)
    processes.sum(right)
    if labels == 0:
        raise ValueError(f"split must have labels to be judged by, got {split!r}, which has none")
    return _metrics(task, split, loss.item() / labels, right.item() / labels)


@torch.no_grad()
def losses_by_position(
    model: nn.Module,
    task: Task,
    split: str,
    *,
    batch_size: int,
    batches: int | None = None,
    precision: str = "float32",
) -> tuple[Tensor, Tensor]:
    """Sum of the losses in nats and number of labels at each position of a split, both `[T]`.

    For tasks with a label for each token; the sums are float64, on the CPU.
    """
    losses = torch.zeros(task.facts.length, dtype=torch.float64, device=task.device)
    labels = torch.zeros_like(losses)
    for fed in _judging(model, task, split, batch_size, batches):
        with autocast(task.device, precision):
            logits = answers(model, fed.batch)
        asked = fed.batch["labels"]  # [B, T]
        each = F.cross_entropy(
            logits.mT.float(), asked, ignore_index=IGNORED, reduction="none"
        )  # [B, T], 0 where nothing is asked
        losses[: asked.shape[1]] += each.double().sum(0)
        labels[: asked.shape[1]] += (asked != IGNORED).sum(0)
    return losses.cpu(), labels.cpu()


def _metrics(task: Task, split: str, loss: float, accuracy: float) -> dict[str, float]:
    """Metric name -> value; the metric that the task is judged by is always one of them."""
    found = {"loss": loss, "accuracy": accuracy}
    if task.facts.metric == "nats":
        found["perplexity"] = math.exp(min(loss, 700.0))  # beyond, a float is inf
    if isinstance(task, LanguageTask) and (width := task.bytes_per_token[split]) is not None:
        found["bits_per_byte"] = loss / math.log(2) / width
    return found


def judged_by(facts: Facts) -> str:
    """The name of the metric that decides which checkpoint is best."""
    return "loss" if facts.metric == "nats" else "accuracy"


def is_better(facts: Facts, new: float, old: float | None) -> bool:
    """Whether a model is to be kept in place of an earlier one; of equal accuracies the later."""
    if old is None:
        return True
    return new < old if facts.metric == "nats" else new >= old


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def _judging(
    model: nn.Module, task: Task, split: str, batch_size: int, batches: int | None
) -> Iterator[Fed]:
    """The batches of a split while the model is in evaluation mode: all, or `batches` of them.

    Those are evenly spaced, because the shortest samples come first.
    """
    was_training = model.training
    model.eval()
    total = task.batches(split, batch_size)
    count = total if batches is None else min(batches, total)
    for n in range(count):
        step = n * total // count
        yield described(task.batch(split, seed=0, rank=0, step=step, batch_size=batch_size))
    model.train(was_training)
