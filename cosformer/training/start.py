"""A run that begins with the weights of another: what it has from there, and what must agree."""

from dataclasses import fields, replace

from cosformer.config import plain
from cosformer.models import ModelConfig
from cosformer.tasks import Vocabulary, has_vocabulary
from cosformer.training.config import OF_TASK, RunConfig
from cosformer.training.folder import BEST, CONFIG, LAST, load_config
from cosformer.training.learner import create
from cosformer.training.loading import Loaded, kept_vocabulary, load, options_of_vocabulary
from cosformer.training.phases import Phase

OF_HEAD = ("pooling", "tied")
"""Fields that the model of another task may have to have otherwise."""
BACKBONE = tuple(
    each.name for each in fields(ModelConfig) if each.name not in (*OF_TASK, *OF_HEAD, "dropout")
)
"""Fields that the weights of a backbone are made for: all others but dropout."""


def beginning(config: RunConfig) -> Loaded | None:
    """The model that a run starts from; None: a new one, or a checkpoint of its own."""
    if config.start is None or _goes_on(config):
        return None
    checkpoint = "best" if (config.start / BEST).is_file() else "last"
    try:
        return load(config.start, checkpoint, device="cpu")
    except ValueError as error:
        raise ValueError(f"start must be a run with a checkpoint: {error}") from None


def inheriting(recipe: RunConfig, config: RunConfig) -> RunConfig:
    """The recipe of a run with model and vocabulary of the one that `config` starts from.

    Sequences are no longer than its positions, unless more is asked for: that is refused later.
    Once there is a checkpoint the run's own folder tells them: the other may be gone.
    """
    found = beginning(config)
    if found is None:
        folder, before = config.out, load_config(config.out)
        model = dict(before.model)
    else:
        folder, before = found.folder, found.config
        model = {**before.model, "max_length": found.model.config.max_length}
    left_out = () if before.task.name == recipe.task.name else OF_HEAD
    model = {name: value for name, value in model.items() if name not in left_out}
    kept = {name: value for name, value in recipe.model.items() if name not in BACKBONE}
    options, learnt = dict(recipe.task.options), kept_vocabulary(folder)
    if learnt is not None and has_vocabulary(recipe.task.name):
        options |= options_of_vocabulary(learnt)
    if "length" in options:
        options["length"] = min(options["length"], model["max_length"])
    return replace(
        recipe,
        preset=before.preset,
        plugin=before.plugin,
        model={**kept, **model},
        task=replace(recipe.task, options=options),
    )


def require_fit(phase: Phase, before: Loaded) -> None:
    """An error unless the backbone can be taken over, and tokens mean the same."""
    here, there = phase.model, before.model.config
    for name in BACKBONE:
        wanted, given = (plain(getattr(model, name)) for model in (there, here))
        if wanted != given:
            raise ValueError(
                f"model.{name} must be that of the run to start from, {wanted!r} in "
                f"{before.folder}, got {given!r}"
            )
    if here.conv and here.conv % 2 == 0 and here.kind != "decoder":
        raise ValueError(
            f"start must be a run whose convolution can look at both sides, for a {here.kind}, got "
            f"conv={there.conv} in {before.folder}: begin from a run of mlm, or train that one "
            f"with --set model.conv={here.conv + 1}"
        )
    if here.mechanism_options != there.mechanism_options:  # a cls token makes sequences longer
        _require_shapes(phase, before)
    own, theirs = phase.task.vocabulary, kept_vocabulary(before.folder)
    if (own and own.plain()) != (theirs and theirs.plain()):
        raise ValueError(
            f"tokens must be written as in the run to start from, {_described(theirs)} in "
            f"{before.folder}, got {_described(own)}"
        )
    if here.vocabulary != there.vocabulary:
        raise ValueError(
            f"vocabulary must have the {there.vocabulary:,} tokens of the run to start from, "
            f"{before.folder}, got {here.vocabulary:,}"
        )


def _require_shapes(phase: Phase, before: Loaded) -> None:
    own, theirs = (
        model.get_submodule("backbone").state_dict()
        for model in (create(phase.model), before.model)
    )
    for name in own.keys() & theirs.keys():
        wanted, given = list(theirs[name].shape), list(own[name].shape)
        if wanted != given:
            raise ValueError(
                f"model must have a {name} of {wanted}, as the run to start from, "
                f"{before.folder}, got {given}"
            )


def _goes_on(config: RunConfig) -> bool:
    """Whether the run has a checkpoint of its own: nothing of the other is needed any more."""
    if not ((config.out / LAST).exists() and (config.out / CONFIG).is_file()):
        return False
    return load_config(config.out).start == config.start  # else it is another run, to be refused


def _described(vocabulary: Vocabulary | None) -> str:
    return "not a text" if vocabulary is None else f"{vocabulary.size:,} {vocabulary.kind}"
