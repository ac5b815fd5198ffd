"""Checkpoints of a run: one file or parts, whole or not at all, written while training goes on."""

from cosformer.training.checkpoints.file import (
    Checkpoint,
    clean,
    fill,
    load_weights,
    read,
    require_like,
    weights,
    write,
)
from cosformer.training.checkpoints.parts import put, save_pretrained
from cosformer.training.checkpoints.saver import Saver, bring_back
