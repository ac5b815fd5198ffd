"""The learning rate of each step."""

import math

from cosformer.training.config import Schedule


def rate(schedule: Schedule, step: int, steps: int) -> float:
    """Share of the highest rate at step 0 … steps - 1."""
    warmup = round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "inverse-sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    done = (step - warmup + 1) / (steps - warmup)
    fall = (1 + math.cos(math.pi * done)) / 2 if schedule.shape == "cosine" else 1 - done
    return schedule.final + (1 - schedule.final) * fall
