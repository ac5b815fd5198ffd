"""Training: runs that resume, judge themselves and keep what they learnt."""

from cosformer.training.config import (
    Budget,
    Evaluation,
    Optimiser,
    Pretraining,
    RunConfig,
    Schedule,
    TaskConfig,
)
from cosformer.training.evaluation import evaluate
from cosformer.training.learner import Diverged
from cosformer.training.loading import Loaded, load
from cosformer.training.place import Place
from cosformer.training.progress import Evaluated, Event, Progress, Started
from cosformer.training.trainer import Result, Trainer, train

__all__ = [
    "Budget",
    "Diverged",
    "Evaluated",
    "Evaluation",
    "Event",
    "Loaded",
    "Optimiser",
    "Place",
    "Pretraining",
    "Progress",
    "Result",
    "RunConfig",
    "Schedule",
    "Started",
    "TaskConfig",
    "Trainer",
    "evaluate",
    "load",
    "train",
]
