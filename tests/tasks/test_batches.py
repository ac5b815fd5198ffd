"""What holds for every task: batches are a pure function, nothing padded unseen, all is learnt."""

import errno
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cosformer import tasks
from cosformer.data import known
from cosformer.tasks import IGNORED, SPLITS, files, resident
from cosformer.tasks.base import BatchId
from cosformer.tasks.order import Order
from cosformer.tasks.pretraining import from_inputs
from cosformer.tasks.probes import Probe
from cosformer.training import Budget, Optimiser, RunConfig, Schedule, TaskConfig
from cosformer.training.config import kind_of
from cosformer.training.evaluation import summed_loss
from cosformer.training.feed import described
from cosformer.training.learner import Learner
from cosformer.training.phases import Phase


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_batch_is_a_pure_function_of_its_arguments(task):
    at = {"seed": 3, "rank": 1, "step": 7, "ranks": 2, "batch_size": 4}
    first = task.batch("train", **at)
    for change in ({"seed": 4}, {"step": 8}, {"rank": 0}):
        assert not same(first, task.batch("train", **(at | change)))
    assert same(first, task.batch("train", **at))  # what was asked before does not matter


def test_shapes_and_labels_are_what_the_facts_say_and_data_have_a_checksum(task):
    facts = task.facts
    assert len(task.digest()) == 64
    assert from_inputs(task, "causal", rate=0.1).digest() == task.digest()
    for split in SPLITS:
        batch = task.batch(split, seed=0, rank=0, step=0, batch_size=5)
        second = {"tokens2", "mask2"} if facts.towers == 2 else set()
        assert batch.keys() == {"tokens", "mask", "labels"} | second
        for suffix in ("", "2")[: facts.towers]:
            tokens, mask = batch[f"tokens{suffix}"], batch[f"mask{suffix}"]
            assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
            assert tokens.shape == mask.shape
            assert tokens.shape[1] <= facts.length
            assert 0 <= int(tokens.min()) <= int(tokens.max()) < facts.vocabulary
            assert torch.equal(tokens == facts.token("pad"), ~mask)
        labels, many = batch["labels"], (min(5, task.sizes[split]),)
        assert labels.shape == (batch["tokens"].shape if facts.asks == "tokens" else many)
        assert int(labels.max()) < facts.classes
        assert ((labels >= 0) | (labels == IGNORED)).all()
        assert (labels >= 0).any()
    assert facts.floor > 0 < len(facts.floor_is)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_sees_every_sample_once_whatever_the_number_of_ranks(task, split):
    if isinstance(task, Probe):
        task.sizes = {"train": 10, "valid": 13, "test": 7}

    def found(ranks):
        steps = range(task.batches(split, 3, ranks=ranks))
        at = {"seed": 0, "batch_size": 3, "ranks": ranks}
        below = task.task if isinstance(task, tasks.MaskedTask) else task  # not what masks hide
        batches = [below.batch(split, step=s, rank=r, **at) for s in steps for r in range(ranks)]
        towers = ("", "2")[: task.facts.towers]
        seen = [(b, n) for b in batches for n in range(len(b["labels"]))]
        rows = ([b[f"tokens{t}"][n][b[f"mask{t}"][n]].tolist() for t in towers] for b, n in seen)
        return sorted(map(str, rows))

    alone = found(1)
    assert len(alone) == task.sizes[split]
    assert found(2) == alone


def _order(lengths, step, *, rank=0, ranks=1):
    return Order(lengths, shuffled=True).indices(BatchId("train", 0, rank, step, 8, ranks))


def test_an_epoch_has_every_sample_once_and_the_next_one_another_order():
    steps = [
        np.concatenate([_order(np.arange(160) % 37, n, rank=rank, ranks=2) for rank in range(2)])
        for n in range(20)
    ]
    first, second = np.concatenate(steps[:10]), np.concatenate(steps[10:])
    assert sorted(first) == sorted(second) == list(range(160))
    assert not np.array_equal(first, second)


def test_samples_of_similar_length_come_together_on_all_ranks():
    lengths = np.random.default_rng(0).integers(1, 2000, 4000)
    spread = [np.ptp(lengths[_order(lengths, step)]) for step in range(50)]
    assert np.mean(spread) < 400  # about 1,600 without buckets
    for step in range(20):
        means = [lengths[_order(lengths, step, rank=rank, ranks=4)].mean() for rank in range(4)]
        assert np.ptp(means) < 250


def test_a_small_set_has_other_batches_in_every_epoch_and_is_repeated_in_a_larger_batch():
    lengths = np.repeat(np.arange(1, 17), 4) * 10
    found = [tuple(sorted(_order(lengths, n))) for n in range(16)]
    assert len({*found[:8]} & {*found[8:]}) <= 4
    counts = np.bincount(_order(np.ones(3), 5), minlength=3)
    assert (counts.sum(), counts.min() >= 2) == (8, True)


@pytest.mark.parametrize(("free", "where"), [(1000, "on the device"), (300, "beside it")])
def test_data_lies_on_the_device_where_it_fits(free, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: "on the device")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: "beside it")
    assert resident.to_device(np.zeros(100, np.uint8), torch.device("cuda")) == where


@pytest.mark.parametrize("name", ["imdb", "image", "sst2", "retrieval"])
def test_a_missing_file_is_named_with_the_remedy(name, tmp_path):
    fetched = name in known.SOURCES
    remedy = f"`cosformer data get {name}` fetches it" if fetched else "put the file there yourself"
    rule = f"data must hold the file {known.SETS[name][0][0]}, got {tmp_path}; .*{remedy}"
    with pytest.raises(ValueError, match=rule):
        tasks.create(name, data=tmp_path)
    with pytest.raises(ValueError, match=rf"got {tmp_path}/no, which does not exist; .*{remedy}"):
        tasks.create(name, data=tmp_path / "no")


HERE = {"seed": 1, "rank": 0, "step": 2, "batch_size": 4}


def test_a_full_disk_is_told_with_the_file_that_is_not_written(tmp_path, monkeypatch):
    path, full = tmp_path / "new.json", OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(files.os, "fsync", Mock(side_effect=full))
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/new.json'") as caught,
        files.replacing(path) as file,
    ):
        file.write(b"all")
    assert (caught.value.errno, list(tmp_path.iterdir())) == (errno.ENOSPC, [])


def test_the_next_token_is_asked_for(task):
    inputs = from_inputs(task, "causal", rate=0.15)
    assert (inputs.facts.causal, inputs.facts.asks) == (True, "tokens")
    batch = inputs.batch("train", **HERE)
    tokens, labels = batch["tokens"], batch["labels"]
    asked = labels != IGNORED
    assert asked.any()
    assert not asked[:, -1].any()
    assert torch.equal(labels[:, :-1][asked[:, :-1]], tokens[:, 1:][asked[:, :-1]])
    assert int(labels.max()) < inputs.facts.data_tokens
    real = batch["mask"][:, 1:] & (tokens[:, 1:] < inputs.facts.data_tokens)
    assert torch.equal(asked[:, :-1], real)


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_tokens_of_what_is_no_text_have_an_even_chance(objective):
    inputs = from_inputs(tasks.create("copying", vocabulary=14), objective, rate=0.5)
    assert inputs.facts.floor == pytest.approx(np.log(16))


def test_both_towers_are_read_for_either_objective(folder):
    task = tasks.create("retrieval", data=folder, length=200)
    pairs = task.batch("train", **HERE)
    inputs = from_inputs(task, "causal", rate=0.15)
    assert inputs.facts.towers == 1
    stacked = inputs.batch("train", **HERE)
    for n, tower in enumerate(("", "2")):
        width = pairs[f"tokens{tower}"].shape[1]
        rows = slice(4 * n, 4 * n + 4)
        assert torch.equal(stacked["tokens"][rows, :width], pairs[f"tokens{tower}"])
        assert torch.equal(stacked["mask"][rows, :width], pairs[f"mask{tower}"])
        assert not stacked["mask"][rows, width:].any()
    masked = from_inputs(task, "masked", rate=0.5).batch("train", **HERE)
    assert masked["tokens"].shape == stacked["tokens"].shape
    with pytest.raises(ValueError, match="objective must be one of masked, causal, got 'guess'"):
        from_inputs(task, "guess", rate=0.1)


STEPS = 200


@pytest.mark.slow
def test_two_batches_of_every_task_are_learnt_by_heart(task, tmp_path):
    shape = {"model": {"layers": 1, "width": 32, "heads": 2}, "log_every": STEPS}
    schedule = Schedule("constant", warmup=0.1)  # the task below is what the fixture has instead
    config = RunConfig(TaskConfig("lm"), tmp_path, schedule=schedule, **shape)
    how = Optimiser(lr=1e-2, weight_decay=0.0), Budget(steps=STEPS, batch=2)
    phase = Phase("training", task, config.model_config(task.facts), *how, is_last=True)
    assert phase.model.kind == kind_of(task.facts)
    learner = Learner(config, phase, 0)
    place = {"seed": 0, "rank": 0, "batch_size": 2}
    batches = [described(task.batch("train", step=n, **place)) for n in range(2)]
    for n in range(STEPS):
        learner.learn(batches[n % 2])
        if n % 10 == 9:
            losses = [summed_loss(learner.model, fed.batch).item() / fed.labels for fed in batches]
            if max(losses) < 0.1:
                return
    pytest.fail(f"the loss is still {max(losses):.2f} after {STEPS} steps")
