"""Training: runs that resume, judge themselves and keep what they learnt."""

from cosformer.training.checkpoints import Checkpoint, fill, save_pretrained, weights
from cosformer.training.checkpoints import read as read_checkpoint
from cosformer.training.checkpoints import write as write_checkpoint
from cosformer.training.config import (
    MOST_SEEDS,
    Budget,
    Evaluation,
    Objective,
    Optimiser,
    Parallel,
    Pretraining,
    RunConfig,
    Schedule,
    TaskConfig,
)
from cosformer.training.device import resolved
from cosformer.training.evaluation import autocast, evaluate, judged_by, losses_by_position
from cosformer.training.feed import Fed, described, feed
from cosformer.training.folder import (
    BEST,
    CONFIG,
    LAST,
    LOCK,
    LOG,
    comparable,
    going_on,
    is_same_run,
    is_whole,
    load_config,
    locked,
    read_json,
    setting,
    state_of,
    write_json,
)
from cosformer.training.interrupt import handled_by, uninterrupted
from cosformer.training.learner import Diverged, Learner
from cosformer.training.loading import (
    Loaded,
    create_task,
    export_weights,
    kept_vocabulary,
    load,
)
from cosformer.training.optimiser import begin_moments, moments
from cosformer.training.phases import Phase, phases
from cosformer.training.place import Place
from cosformer.training.plugin import load_plugin
from cosformer.training.possible import require_stretches
from cosformer.training.predictor import Predictor
from cosformer.training.processes import ALONE, Lost, Processes, joined, met, shown
from cosformer.training.progress import Evaluated, Event, Progress, Started, duration, number
from cosformer.training.start import inheriting
from cosformer.training.trainer import Result, Trainer, train
from cosformer.training.writer import Writer, encode

__all__ = [
    "Budget",
    "Diverged",
    "Evaluated",
    "Evaluation",
    "Event",
    "Loaded",
    "Optimiser",
    "Parallel",
    "Place",
    "Predictor",
    "Pretraining",
    "Progress",
    "Result",
    "RunConfig",
    "Schedule",
    "Started",
    "TaskConfig",
    "Trainer",
    "Writer",
    "evaluate",
    "load",
    "train",
]
