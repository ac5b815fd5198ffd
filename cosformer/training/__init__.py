"""Training: runs that resume, judge themselves and keep what they learnt."""

from cosformer.training.config import MOST_SEEDS as MOST_SEEDS
from cosformer.training.config import (
    Budget,
    Evaluation,
    Optimiser,
    Pretraining,
    RunConfig,
    Schedule,
    TaskConfig,
)
from cosformer.training.config import Objective as Objective
from cosformer.training.device import resolved as resolved
from cosformer.training.evaluation import evaluate
from cosformer.training.evaluation import judged_by as judged_by
from cosformer.training.feed import Fed as Fed
from cosformer.training.feed import described as described
from cosformer.training.feed import feed as feed
from cosformer.training.folder import BEST as BEST
from cosformer.training.folder import CONFIG as CONFIG
from cosformer.training.folder import LAST as LAST
from cosformer.training.folder import comparable as comparable
from cosformer.training.folder import is_same_run as is_same_run
from cosformer.training.folder import load_config as load_config
from cosformer.training.folder import read_json as read_json
from cosformer.training.folder import state_of as state_of
from cosformer.training.folder import write_json as write_json
from cosformer.training.learner import Diverged
from cosformer.training.learner import Learner as Learner
from cosformer.training.loading import Loaded, load
from cosformer.training.phases import Phase as Phase
from cosformer.training.place import Place
from cosformer.training.plugin import load_plugin as load_plugin
from cosformer.training.progress import Evaluated, Event, Progress, Started
from cosformer.training.progress import duration as duration
from cosformer.training.progress import number as number
from cosformer.training.start import inheriting as inheriting
from cosformer.training.trainer import Result, Trainer, train
from cosformer.training.writer import Writer as Writer
from cosformer.training.writer import encode as encode

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
