"""A task that begins with easier samples."""

import json
import shutil

import numpy as np
import pytest
import torch

from cosformer import tasks
from cosformer.tasks.base import Facts
from cosformer.tasks.ragged import Ragged
from cosformer.tasks.rising import RisingTask

LEVELS, STEPS, LENGTH = 3, 5, 4


def samples(kind, count):
    """Sequences of one token: who they are, beside their kind."""
    return Ragged.of([np.full(LENGTH, 50 * kind + n) for n in range(count)], np.arange(count) % 2)


@pytest.fixture
def rising():
    chance = {"asks": "sequence", "metric": "accuracy", "floor": 0.5, "floor_is": "chance"}
    facts = Facts(data_tokens=256, classes=2, length=LENGTH, **chance)
    own = {split: [samples(LEVELS, 20 + n)] for n, split in enumerate(tasks.SPLITS)}
    easier = lambda: [samples(level, 12) for level in range(LEVELS)]  # noqa: E731
    return RisingTask(own, facts, easier=easier, levels=LEVELS, steps=STEPS)


def kinds(task, step, **place):
    options = {"seed": 0, "rank": 0, "batch_size": 6} | place
    batch = task.batch("train", step=step, **options)
    assert torch.equal(batch["labels"], batch["tokens"][:, 0] % 50 % 2)  # still the sample's own
    return (batch["tokens"][:, 0] // 50).tolist()


def test_levels_rise_and_half_of_a_batch_is_of_those_before(rising):
    assert all(kinds(rising, step) == [0] * 6 for step in range(STEPS))
    assert all(kinds(rising, step) == [1] * 3 + [0] * 3 for step in range(STEPS, 2 * STEPS))
    third = [kinds(rising, step) for step in range(2 * STEPS, 3 * STEPS)]
    assert all(found[:3] == [2] * 3 for found in third)
    assert {tuple(found[3:]) for found in third} == {(0,) * 3, (1,) * 3}  # each in its turn
    assert kinds(rising, 3 * STEPS) == [LEVELS] * 6
    assert kinds(rising, 1000) == [LEVELS] * 6
    # of an odd batch, the larger half is of the level that is due
    assert kinds(rising, STEPS, batch_size=3) == [1, 1, 0]
    assert kinds(rising, STEPS, batch_size=1) == [1]


def test_ranks_share_a_step(rising):
    at = {"seed": 0, "ranks": 2, "step": STEPS, "batch_size": 6}
    both = [rising.batch("train", rank=rank, **at)["tokens"][:, 0] for rank in range(2)]
    assert len(torch.cat(both).unique()) == 12


def test_validation_and_test_are_the_tasks_own(rising):
    assert dict(rising.sizes) == {"train": 20, "valid": 21, "test": 22}
    for split in ("valid", "test"):
        found = torch.cat([b["tokens"][:, 0] for b in rising.evaluation(split, 5)])
        assert (found // 50).unique().tolist() == [LEVELS]
        assert len(found.unique()) == rising.sizes[split]


def test_pathfinder_begins_with_the_shortest_paths(folder):
    options = {"data": folder, "sizes": (40, 10, 10)}
    plain = tasks.create("pathfinder", **options)
    rising = tasks.create("pathfinder", **options, rising=2)
    place = {"seed": 0, "rank": 0, "batch_size": 2}
    before, after = (rising.batch("train", step=n, **place)["tokens"] for n in (0, 26))
    assert (before > 0).sum() < (after > 0).sum()  # 13 lengths, 2 steps each
    assert torch.equal(after, plain.batch("train", step=26, **place)["tokens"])
    valid = (task.batch("valid", step=0, **place)["tokens"] for task in (rising, plain))
    assert torch.equal(*valid)


def test_easier_samples_are_not_read_before_they_are_needed(rising):
    rising.digest()  # data are known again by the task's own samples
    kinds(rising, LEVELS * STEPS)
    assert "_levels" not in vars(rising)


@pytest.mark.parametrize("change", ["labels", "about"])
def test_sets_of_an_older_version_are_refused(change, folder, tmp_path):
    """Small ones may lack a length, or follow another rule."""
    arrays = dict(np.load(folder / "snakes-40-seed0.npz"))
    about = json.loads(str(arrays["about"])) | {"rule": {"fewest": 1}}
    changed = {"labels": arrays["labels"].clip(max=9), "about": np.array(json.dumps(about))}
    messages = {"labels": "have .* got none of 6: with", "about": "be of the rule of today"}
    np.savez(tmp_path / "snakes-40-seed0.npz", **(arrays | {change: changed[change]}))
    shutil.copy(folder / "pathfinder-60-seed0.npz", tmp_path)
    task = tasks.create("pathfinder", data=tmp_path, sizes=(40, 10, 10), rising=1)
    with pytest.raises(ValueError, match=rf"snakes-40-seed0.npz must {messages[change]}"):
        task.batch("train", seed=0, rank=0, step=0, batch_size=1)
