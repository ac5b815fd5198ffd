"""One run on many processes: it ends where one process ends, whatever has happened."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product

import many
import pytest
import torch
import torch.distributed as dist
import training_cases as cases
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cosformer import cli, records, training
from cosformer.commands import crew as crews
from cosformer.commands import reproduce
from cosformer.commands.crew_share import Taken
from cosformer.tasks import IGNORED
from cosformer.training import Budget, Evaluation, Optimiser, Parallel, learner, load, train
from cosformer.training.checkpoints import read
from cosformer.training.folder import state_of
from cosformer.training.phases import phases
from cosformer.training.possible import notes_on_sharing, require_shared
from cosformer.training.processes import Together, joined

PATIENCE = 240  # seconds after which a process is taken to hang; a busy machine needs one minute
MODEL = {"layers": 2, "width": 16, "heads": 2, "mechanism": "cosformer-gated", "conv": 4}
MESHES = {
    2: [Parallel(), Parallel(shard=2), Parallel(context=2)],
    4: [
        Parallel(),
        Parallel(data=2, shard=2),
        Parallel(data=2, context=2),
        Parallel(shard=2, context=2),
    ],
}
MORE = {
    "a phase before, with shards": {
        "pretraining": cases.pretraining(),
        "parallel": Parallel(shard=2),
    },
    "an average": {"average": 0.9, "parallel": Parallel(context=2)},
}


def settings(out, **changes):
    """A run whose gradients are clipped, with rows and tokens that no number of ranks divides."""
    given = {"model": MODEL, "average": None, "optimiser": Optimiser(lr=1e-2, clip=0.1)}
    given |= {"budget": Budget(steps=6, batch=9, accumulate=2)}
    given |= {"evaluation": Evaluation(every=4, batches=2), "log_every": 2}
    return cases.config(out, **(given | changes))


@pytest.fixture
def exact():
    """float64, in which processes agree to nine digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def alone(exact, tmp_path):
    """The run of one process."""
    train(settings(tmp_path / "alone"))
    return tmp_path / "alone"


def assert_close(one, other):
    """Logs line by line and checkpoints tensor by tensor, to rounding in float64."""
    for left, right in zip(cases.log(one), cases.log(other), strict=True):
        assert left.pop("phase") == right.pop("phase")
        for row in (left, right):
            row.update(row.pop("metrics", {}))
        assert left == pytest.approx(right, rel=1e-9, abs=1e-9)
    for name in ("last.safetensors", "best.safetensors"):
        left, right = cases.tensors(one / name), cases.tensors(other / name)
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def train_each(configs):
    """Several runs of one group of processes, one after the other."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    for config in configs:
        train(config)
    dist.destroy_process_group()


def train_until(config, step=None, dtype=torch.float64):
    """A run that the second process is asked to end after a step, if one is given."""
    torch.set_default_dtype(dtype)
    learn = learner.Learner.learn

    def signalled(self, fed):
        learn(self, fed)
        if self.step == step and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGINT)

    learner.Learner.learn = signalled
    try:
        train(config)
    except KeyboardInterrupt:
        return 130


@pytest.mark.slow
@pytest.mark.parametrize("count", MESHES)
def test_the_result_does_not_depend_on_the_processes(count, alone, tmp_path):
    todo = [settings(tmp_path / str(n), parallel=mesh) for n, mesh in enumerate(MESHES[count])]
    assert many.ended(count, train_each, todo, said=tmp_path / "said") == [0] * count
    for config in todo:
        assert_close(config.out, alone)
        assert load(config.out, "best", device="cpu").place.step in (4, 6)


@pytest.mark.slow
def test_phases_and_averages_do_not_depend_on_the_processes(exact, tmp_path):
    todo = [settings(tmp_path / name, **changes) for name, changes in MORE.items()]
    assert many.ended(2, train_each, todo, said=tmp_path / "said") == [0, 0]
    for config in todo:
        one = replace(config, out=config.out / "alone", parallel=Parallel())
        train(one)
        assert_close(config.out, one.out)


@pytest.mark.slow
def test_shards_compute_in_bfloat16_to_its_rounding(tmp_path):
    """… and keep parameters and moments in float32."""
    given = {"precision": "bfloat16", "optimiser": Optimiser(lr=1e-3)}
    one, two = (settings(tmp_path / name, **given) for name in ("one", "two"))
    train(one)
    shared = replace(two, parallel=Parallel(shard=2))
    codes = many.ended(2, train_until, shared, None, torch.float32, said=tmp_path / "said")
    assert codes == [0, 0]
    losses = [[row["loss"] for row in cases.log(x.out) if "loss" in row] for x in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)
    assert losses[0] != losses[1]  # one process keeps small parameters in float32
    stored = cases.tensors(two.out / "last.safetensors").values()
    assert {tensor.dtype for tensor in stored} == {torch.float32}


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes(alone, tmp_path):
    """One, then four that are asked to stop, then two, two others, and one: all save one step.

    Parts of four, in another mesh, are read by two, whose parts others read whole."""
    config = replace(settings(tmp_path / "run"), save_seconds=1e9)
    events = training.Trainer(config).events()
    while next(events).step < 2:
        pass
    events.close()
    todo = [(4, Parallel(shard=2, context=2), 3), (2, Parallel(shard=2), 4), (2, Parallel(), 5)]
    for count, mesh, step in todo:
        shared = replace(config, parallel=mesh)
        codes = many.ended(count, train_until, shared, step, said=tmp_path / "said")
        assert codes == [130] * count
        assert state_of(config.out)["step"] == load(config.out, "last").place.step == step
        assert state_of(config.out)["state"] == "interrupted"
        assert (config.out / "last.parts").is_dir() == (mesh.shard > 1)
    train(config)
    assert_close(config.out, alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Parallel(), Parallel(data=2, shard=2)], ids=["rows", "shards"])
def test_a_run_that_goes_on_with_as_many_processes_ends_with_the_same_bits(mesh, tmp_path):
    """Of sums of four numbers, whose order counts."""
    given = {"save_seconds": 1e9, "parallel": mesh}
    whole, stopped = (replace(settings(tmp_path / name), **given) for name in "ab")
    for config, step in ((whole, None), (stopped, 3), (stopped, None)):
        codes = many.ended(4, train_until, config, step, torch.float32, said=tmp_path / "said")
        assert codes == [0 if step is None else 130] * 4
    cases.assert_same_outcome(stopped.out, whole.out)


FULL = """
import errno, os
from cosformer.training.checkpoints import parts

def full(path):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))

if os.environ["RANK"] == "0":
    parts.replacing = full
"""
AT_A_STEP = """
import os, signal, time
from cosformer.training import Learner

learn = Learner.learn

def misbehaves(self, fed):
    {what}
    learn(self, fed)

if {where}:
    Learner.learn = misbehaves
"""
OTHER = 'os.environ["RANK"] == "1"'
FIRST = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
KILL = "if self.step == 5: os.kill(os.getpid(), signal.SIGKILL)"
DIES = AT_A_STEP.format(what=KILL, where=f"{OTHER} and {FIRST}")
HANGS = AT_A_STEP.format(what="if self.step == 2: time.sleep(60)", where=OTHER)
SLOW = AT_A_STEP.format(what="time.sleep(0.05)", where=True)


def words(out, *more, steps=8):
    """A run of the command line, small, and saved at every step."""
    sizes = ("layers=2", "width=16", "heads=2")
    given = [*(f"model.{size}" for size in sizes), "task.options.length=12", "budget.batch=4"]
    given += ["save_seconds=0", "log_every=2", f"budget.steps={steps}", "evaluation.every=100"]
    given += ["evaluation.batches=2", *more]
    sets = [word for each in given for word in ("--set", each)]
    return ["train", "copying", "--device", "cpu", "--threads", "1", "--out", str(out), *sets]


def plugin(folder, code):
    """A plugin, which every process runs first, to make one of them misbehave."""
    path = folder / "misbehaves.py"
    path.write_text(code)
    return ["--plugin", str(path)]


def ran(out, said, *more):
    """Exit codes of two ranks with this command line, and what each says on stderr."""
    codes = many.ended(2, cli.main, [*words(out), *more], said=said)
    return codes, [(said / str(rank)).read_text() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_a_full_disk_of_one_rank_ends_all_and_all_say_why(shard, tmp_path):
    """Of the rank that has all, or of one that has a part."""
    out, bad = tmp_path / "run", shard - 1
    code = FULL.replace('== "0"', f'== "{bad}"')
    shared = ("--set", f"parallel.shard={shard}")
    codes, said = ran(out, tmp_path / "said", *shared, *plugin(tmp_path, code))
    assert (codes[bad], codes[1 - bad]) == (2, 1)
    begins = "cosformer: train: [Errno 28] No space left on device: checkpoint of"
    assert said[bad].startswith(begins)
    told = rf"rank {bad} has failed.*: \[Errno 28\] No space left"
    assert re.search(told, said[1 - bad])
    assert state_of(out)["state"] == "failed"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_step(tmp_path):
    late = ("--set", "parallel.timeout=5")
    codes, said = ran(tmp_path / "run", tmp_path / "said", *late, *plugin(tmp_path, HANGS))
    assert codes == [1, -signal.SIGKILL]
    named = "rank 1 hangs at step 3 of training: no answer within parallel.timeout=5 seconds"
    assert f"cosformer: train: {named}; the checkpoint of step 2 is in" in said[0]
    assert state_of(tmp_path / "run")["message"] == named


@contextlib.contextmanager
def torchrun(*arguments):
    """A process of its own, which ends with the block if it has not ended by then."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    start += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]  # a free port
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*start, *arguments], env=quiet, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_torchrun_brings_a_killed_rank_back_to_the_same_end(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert many.ended(2, cli.main, words(whole), said=tmp_path / "said") == [0, 0]
    died = plugin(tmp_path, DIES)
    with torchrun("--max-restarts=1", "-m", "cosformer", *words(killed), *died) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out
    assert "from step 5 on" in out
    cases.assert_same_outcome(killed, whole)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_shares_parameters_leaves_a_whole_checkpoint(tmp_path):
    """The first rank at the second step, then the other at the sixth, as the fifth is written."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    said, shared = tmp_path / "said", ("--set", "parallel.shard=2")
    assert many.ended(2, cli.main, [*words(whole), *shared], said=said) == [0, 0]
    for rank, step in ((0, 1), (1, 5)):
        code = DIES.replace('== "1"', f'== "{rank}"').replace("step == 5", f"step == {step}")
        died = [*words(killed), *shared, *plugin(tmp_path, code)]
        assert many.ended(2, cli.main, died, said=said)[rank] == -signal.SIGKILL
    assert read(killed / "last.safetensors").facts["place"]["step"] in (4, 5)
    assert many.ended(2, cli.main, [*words(killed), *shared], said=said) == [0, 0]
    cases.assert_same_outcome(killed, whole)
    assert len(list((killed / "last.parts").iterdir())) == 1


@pytest.mark.slow
def test_sigterm_saves_the_same_step_of_all_ranks_once(tmp_path):
    out = tmp_path / "run"
    slow = plugin(tmp_path, SLOW)
    run = words(out, "save_seconds=1000", steps=10_000)
    with torchrun("-m", "cosformer", *run, *slow) as process:
        log = out / "log.jsonl"
        while not (log.exists() and log.read_text()):
            time.sleep(0.05)
            assert process.poll() is None
        process.terminate()
        said, _ = process.communicate(timeout=PATIENCE)
    assert said.count("interrupted; the checkpoint of step") == 1
    state = state_of(out)
    assert (state["state"], load(out, "last").place.step) == ("interrupted", state["step"])
    assert state["step"] > 0


@pytest.mark.slow
def test_many_judge_as_one_does(whole, tmp_path, shell):
    """`cosformer evaluate` of a split whose last batch has fewer rows than there are ranks."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    kept = json.loads((out / "config.json").read_text())
    kept["budget"]["batch"] = 2998  # of 3,000
    (out / "config.json").write_text(json.dumps(kept))
    said, found = tmp_path / "said", out / "metrics-test-best.json"
    words = ["evaluate", str(out), "--device", "cpu"]
    shell.shows(*words)
    one = json.loads(found.read_text())["metrics"]
    for count, mesh in ((3, []), (2, ["--shard", "2"]), (2, ["--context", "2"])):
        found.unlink()
        assert many.ended(count, cli.main, [*words, *mesh], said=said) == [0] * count
        assert json.loads(found.read_text())["metrics"] == pytest.approx(one, rel=1e-6)
    assert "shard · context must be the number of processes, 1, got 2 · 1" in shell.refuses(
        *words, "--shard", "2"
    )


def forked(words):
    """A command whose runs are forked, from a process that has imported all."""
    crews.PROCESSES = multiprocessing.get_context("fork")
    reproduce.Crew.processes = crews.Crew.processes
    return cli.main(words)


TRIALS = {
    "study": (["lm", "--scale", "tiny", "--only", "softmax", "cosformer", "multiscale"], 3),
    # two rates, then the better one with a further seed
    "reproduce": (["lm", "--small", "--columns", "enwik8", "--only", "softmax"], 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", TRIALS)
def test_each_trial_is_run_by_one_of_the_processes(verb, tmp_path):
    """The first writes all rows, and ends when all have; what comes next follows from all rows."""
    (tmp_path / "my.txt").write_text("ten green bottles hanging on the wall\n" * 200)
    given, count = TRIALS[verb]
    rows, said = tmp_path / "rows.jsonl", tmp_path / "said"
    words = [verb, *given, "--jobs", "1", "--device", "cpu", "--data", str(tmp_path / "my.txt")]
    words += ["--out", str(tmp_path / "runs"), "--rows", str(rows), "--threads", "1"]
    words += ["--rates", "1e-3"] if verb == "study" else []
    assert many.ended(2, forked, words, said=said) == [0, 0], (said / "0").read_text()
    names = [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(records.read(rows)) == len(names) == count


def test_a_trial_is_taken_once():
    store, names = dist.HashStore(), [f"trial {n}" for n in range(20)]
    team = [Taken(store, rank, 3) for rank in range(3)]
    for n, name in enumerate(names):
        first = team[n % 3]
        assert first.takes(name)
        assert [each.takes(name) for each in team] == [each is first for each in team]
    for each in reversed(team):  # the first waits for the others
        failed = each.failures({f"of {each.rank}": "why"})
    assert failed == {"of 0": "why", "of 1": "why", "of 2": "why"}


def test_the_parts_of_a_batch_are_the_batch():
    tokens = torch.arange(5 * 7).view(5, 7)
    batch = {"tokens": tokens, "labels": tokens + 1}
    sizes = (2, 2, 3)
    parts = [placed(sizes, place).part(batch) for place in product(*map(range, sizes))]
    for name, tensor in batch.items():
        rows = [torch.cat([part[name] for part in parts[n : n + 3]], 1) for n in range(0, 12, 3)]
        assert torch.equal(torch.cat(rows), tensor)


def test_a_process_without_rows_has_one_of_no_effect():
    tokens = torch.arange(2 * 3).view(2, 3)
    part = placed((3, 1, 1), (2, 0, 0)).part({"tokens": tokens, "labels": tokens})
    assert torch.equal(part["tokens"], tokens[:1])
    assert torch.equal(part["labels"], torch.full((1, 3), IGNORED))


def placed(sizes, place):
    """A process in a mesh, without the others."""
    found = object.__new__(Together)
    found.sizes, found._place = sizes, place
    return found


SIZES = {
    "must be the number of processes, 6, got 4 · 1: shard · context can be 1, 2, 3, 6, and": (
        Parallel(shard=4),
        6,
    ),
    "must be the number of processes, 8, got 2 · 2 · 1: ": (Parallel(data=2, shard=2), 8),
    "must be the number of processes, 1, got 1 · 2: .*torchrun --nproc-per-node=N starts": (
        Parallel(context=2),
        1,
    ),
}


@pytest.mark.parametrize("message", SIZES)
def test_a_mesh_that_does_not_fit_says_what_does(message):
    parallel, count = SIZES[message]
    with pytest.raises(ValueError, match=message):
        parallel.sizes(count)


def test_torchrun_ends_its_report_with_the_error(tmp_path, monkeypatch):
    """It asks for a file; where there is none, it ends with a page of its own."""
    address = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    address["TORCHELASTIC_ERROR_FILE"] = path = tmp_path / "error.json"
    for name, value in address.items():
        monkeypatch.setenv(name, str(value))
    rule = "must be the number of processes, 2, got 1 · 3"
    with pytest.raises(ValueError, match=rule), joined(Parallel(context=3), "cpu"):
        pass
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    assert rule in str(ChildFailedError("cosformer", {1: failure})).splitlines()[-2]


def test_one_process_refuses_a_mesh_of_many(config):
    with pytest.raises(ValueError, match="must be the number of processes, 1, got 1 · 4"):
        train(replace(config, parallel=Parallel(context=4)))
    assert not config.out.exists()


REFUSED = {
    "graph must be false with 4 processes": {"graph": True},
    "compile must be false with parallel.shard or parallel.context": {"compile": True},
    "average must be none with parallel.shard above 1.* got 0.9": {"average": 0.9},
    "model.dropout must be 0 with 4 processes: .*, got 0.1": {"model": {**MODEL, "dropout": 0.1}},
    r"batch of training must be at least data · shard · accumulate = 4, .* got 3": {
        "budget": Budget(batch=3, accumulate=2)
    },
    "parallel.context must be 1: delta cannot attend over ranks": {"model": {"mechanism": "delta"}},
    "parallel.context must leave each process at least 20 of the 15 tokens": {
        "model": {**MODEL, "conv": 21}
    },
}


def test_stretches_of_a_sequence_with_one_answer_are_refused(config, tmp_path):
    task = cases.table(tmp_path, ["0\tab", "1\tba"] * 20, 4)
    shared = replace(settings(config.out), task=task, model={})
    among = placed((1, 1, 2), (0, 0, 0))
    among.count = 2
    with pytest.raises(ValueError, match=r"must be 1 .*, got 2 for the classifier of train"):
        require_shared(phases(shared, task.create("cpu")), shared, among)


@pytest.mark.parametrize(
    ("context", "mechanism", "count"),
    [(2, "cosformer-gated softmax", 1), (2, "cosformer", 0), (1, "softmax", 0)],
)
def test_a_run_says_that_what_softmax_layers_send_grows_with_the_length(
    context, mechanism, count, config
):
    shared = settings(config.out, model={**MODEL, "mechanism": mechanism})
    phase = phases(shared, shared.task.create("cpu"))[0]
    notes = notes_on_sharing(phase, placed((1, 1, context), (0, 0, 0)))
    assert sum("softmax layers gather the keys and values" in note for note in notes) == count


@pytest.mark.parametrize("message", REFUSED)
def test_what_many_cannot_do_is_refused_by_name(message, config):
    shared = settings(config.out, parallel=Parallel(shard=2, context=2))
    shared = replace(shared, **REFUSED[message])
    todo = phases(shared, shared.task.create("cpu"))
    among = placed((1, 2, 2), (0, 0, 0))
    among.count = 4
    with pytest.raises(ValueError, match=message):
        require_shared(todo, shared, among)
