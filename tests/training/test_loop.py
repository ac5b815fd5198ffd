"""The loop: what it learns from, when it judges, what it says, and what stops it."""

import itertools
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import training_cases as cases

from cosformer import training
from cosformer.models import ModelConfig, create_model
from cosformer.tasks import create, restore
from cosformer.training import evaluate, load, losses_by_position, progress, train, trainer
from cosformer.training.feed import described, feed
from cosformer.training.learner import Learner
from cosformer.training.optimiser import grouped
from cosformer.training.phases import phases
from cosformer.training.progress import number


def learner(config):
    return Learner(config, phases(config, config.task.create("cpu"))[-1], 0)


def gradients(one):
    """Those of one step, as the optimiser gets them."""
    one.optimiser.zero_grad = lambda: None
    one.learn(described(one.phase.task.batch("train", seed=0, rank=0, step=0, batch_size=8)))
    return [p.grad for p in one.model.parameters() if p.grad is not None]


def test_a_run_learns(config):
    config = replace(config, budget=training.Budget(steps=100, batch=16), average=None)
    config = replace(config, evaluation=training.Evaluation(every=100, batches=20))
    events = list(training.Trainer(config).events())
    losses = [event.loss for event in events if isinstance(event, training.Progress)]
    assert losses[-1] < 0.7 * losses[0]
    judged = [event for event in events if isinstance(event, training.Evaluated)]
    assert judged[-1].metrics["accuracy"] > 0.4  # a token of four


def test_events_tell_of_begin_steps_and_evaluations_and_are_the_log(config):
    events = list(training.Trainer(config).events())
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    assert rows == [vars(event) for event in events[1:]]
    assert isinstance(events[0], training.Started)
    assert "24 steps of 8 × 15 tokens on cpu" in str(events[0])
    assert [e.step for e in events if isinstance(e, training.Progress)] == [*range(3, 25, 3)]
    assert [e.step for e in events if isinstance(e, training.Evaluated)] == [8, 16, 24]
    assert re.fullmatch(r"training 24/24 .*loss.*tokens/s.*GiB.*left.*", str(events[-2]))


def test_the_loss_of_a_line_is_the_mean_of_its_steps(config, whole):
    events = training.Trainer(replace(config, log_every=1)).events()
    every = list(itertools.islice((e.loss for e in events if isinstance(e, training.Progress)), 6))
    third = [row["loss"] for row in cases.log(whole) if "loss" in row]
    assert third[1] == pytest.approx(sum(every[3:6]) / 3, rel=1e-12)


def test_the_best_checkpoint_is_that_of_the_best_evaluation(whole):
    rows = [row for row in cases.log(whole) if "metrics" in row]
    best = max(row["metrics"]["accuracy"] for row in rows)
    assert load(whole, "best").place.best == best == load(whole, "last").place.best
    assert [row["step"] for row in rows if row["best"]][-1] == load(whole).place.step
    assert load(whole, "last").place.step == 24


def test_the_average_is_what_is_judged_and_loaded(finished):
    result = train(finished)  # at its end already
    loaded = load(finished.out, "last", device="cpu").model
    stored = cases.tensors(finished.out / "last.safetensors")
    name = "backbone.embedding.weight"
    assert torch.equal(loaded.state_dict()[name], stored[f"average.{name}"])
    assert torch.equal(result.model.state_dict()[name], stored[f"average.{name}"])
    assert not torch.equal(stored[f"model.{name}"], stored[f"average.{name}"])


def test_parts_of_a_batch_add_up_to_its_gradient(config):
    config = replace(config, model={**config.model, "dropout": 0.0})
    budgets = [training.Budget(steps=4, batch=8, accumulate=parts) for parts in (1, 3)]
    whole, summed = (gradients(learner(replace(config, budget=budget))) for budget in budgets)
    torch.testing.assert_close(whole, summed, rtol=1e-4, atol=1e-6)


def test_a_gradient_is_no_longer_than_clip(config):
    one = learner(replace(config, optimiser=training.Optimiser(clip=1e-3)))
    assert torch.nn.utils.get_total_norm(gradients(one)).item() == pytest.approx(1e-3, rel=1e-3)
    assert one.read()[1] > 1e-2  # as it was before


def test_weights_of_matrices_alone_decay(config):
    one = learner(config)
    groups = grouped(one.model)
    decaying = [group["weight_decay"] > 0 for group in one.optimiser.param_groups]
    assert decaying == [name == "matrices" for name in groups]
    names = {id(parameter): name for name, parameter in one.model.named_parameters()}
    of_group = {group: [names[id(p)] for p in found] for group, found in groups.items()}
    assert set(of_group["embeddings"]) == {"backbone.embedding.weight", "backbone.positions.weight"}
    assert all(name.endswith("weight") for name in of_group["matrices"])
    assert "backbone.norm.weight" in of_group["vectors"]


SHAPES = {"constant": [1, 1, 1], "linear": [0.55, 0.325, 0.1]}
SHAPES |= {"inverse-sqrt": [0.5**0.5, 0.4**0.5, 3**-0.5]}
SHAPES |= {"cosine": [0.55, 0.1 + 0.9 * (1 - 2**-0.5) / 2, 0.1]}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rate_rises_and_then_follows_its_shape(shape):
    schedule = training.Schedule(shape, warmup=1 / 3, final=0.1)
    rates = [schedule.rate(step, 12) for step in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert [rates[n] for n in (7, 9, 11)] == pytest.approx(SHAPES[shape])


def test_two_runs_go_side_by_side(tmp_path, whole):
    """What a step draws, as for dropout, depends on its number alone."""
    configs = [cases.config(tmp_path / name, seed=n) for n, name in enumerate("ab")]
    for one, _ in zip(*(training.Trainer(config).events() for config in configs), strict=True):
        torch.rand(one.step + 1)
    cases.assert_same_outcome(configs[0].out, whole)
    assert cases.log(configs[1].out) != cases.log(whole)


def test_the_time_of_others_is_not_the_runs(config, monkeypatch):
    """By a clock that knows steps of a second, evaluations of ten, and a slow reader."""
    now = [0.0]

    def taking(seconds, what):
        def slower(*args, **kwargs):
            now[0] += seconds
            return what(*args, **kwargs)

        return slower

    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Learner, "learn", taking(1.0, Learner.learn))
    monkeypatch.setattr(trainer, "evaluate", taking(10.0, evaluate))
    run = training.Trainer(config)
    for event in run.events():
        now[0] += 1000.0
        if isinstance(event, training.Progress):
            assert event.tokens_per_second == pytest.approx(8 * 15)
    assert run.place.seconds == pytest.approx(24 * 1.0 + 3 * 10.0)


def test_a_feed_gives_the_batches_of_its_steps_or_their_error(monkeypatch):
    task = create("copying", length=8, copied=2)
    fed = list(feed(task, seed=3, batch_size=2, begin=4, end=9))
    assert len(fed) == 5
    for step, each in enumerate(fed, 4):
        wanted = task.batch("train", seed=3, rank=0, step=step, batch_size=2)
        assert torch.equal(each.batch["tokens"], wanted["tokens"])
        assert "mask" not in each.batch  # all are real
        assert (each.tokens, each.labels) == (20, 4)
    monkeypatch.setattr(task, "_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(feed(task, seed=0, batch_size=2, begin=0, end=3))


def test_bfloat16_and_compile_learn_as_well(config, whole, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda what: compiled.append(what) or what)
    plain = load(whole, "last").place.metrics["loss"]
    cast = train(replace(config, precision="bfloat16", compile=True)).place.metrics["loss"]
    assert len(compiled) == 3  # a block, the loss of all logits and that of a part of them
    assert plain != cast == pytest.approx(plain, rel=0.05)


def test_an_evaluation_counts_every_label_once_and_a_part_is_spread_over_the_split():
    task = create("copying", length=8, copied=2, vocabulary=4)
    model = create_model(ModelConfig(vocabulary=task.facts.vocabulary, max_length=10))
    task.sizes = {"train": 1, "valid": 300, "test": 1}
    small, large = (evaluate(model, task, "valid", batch_size=n) for n in (70, 300))
    assert small["accuracy"] == large["accuracy"]
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-5)
    assert model.training
    # a part is spread over the split: the first samples would be the short ones
    asked, batch = [], task.batch
    task.batch = lambda *a, step, **k: asked.append(step) or batch(*a, step=step, **k)
    evaluate(model, task, "valid", batch_size=50, batches=3)
    assert asked == [0, 2, 4]  # of 6


def test_losses_by_position_are_those_of_single_positions_and_sum_to_the_loss():
    task = create("copying", length=8, copied=2, vocabulary=4)
    model = create_model(ModelConfig(vocabulary=task.facts.vocabulary, max_length=10)).double()
    task.sizes = {"train": 1, "valid": 30, "test": 1}
    losses, labels = losses_by_position(model, task, "valid", batch_size=7)
    assert losses.shape == labels.shape == (task.facts.length,)
    whole = evaluate(model, task, "valid", batch_size=30)["loss"]
    assert float(losses.sum() / labels.sum()) == pytest.approx(whole, rel=1e-5)
    batch = task.batch("valid", seed=0, rank=0, step=0, batch_size=30)
    asked = batch["labels"]
    logs = model(batch["tokens"], batch["mask"]).log_softmax(-1)
    own = -logs.gather(-1, asked.clamp(min=0)[..., None])[..., 0] * (asked >= 0)
    assert losses.tolist() == pytest.approx(own.sum(0).tolist(), rel=1e-5)
    assert labels.tolist() == (asked >= 0).sum(0).tolist()
    assert model.training
    _, some = losses_by_position(model, task, "valid", batch_size=7, batches=2)
    assert some.max() == 14


@pytest.mark.parametrize(("name", "kind"), [("lm", "bpe"), ("mlm", "bytes")])
def test_a_vocabulary_outlives_the_data(config, tmp_path, name, kind):
    (tmp_path / "my.txt").write_text("one two three, " * 100)
    options = {"text": str(tmp_path / "my.txt"), "length": 8, "tokens": kind}
    budget = training.Budget(steps=1, batch=2)
    train(replace(config, task=training.TaskConfig(name, options), budget=budget))
    (tmp_path / "my.txt").unlink()
    found = load(config.out).vocabulary
    assert found.decode(found.encode(b"two three")) == "two three"
    with pytest.raises(ValueError, match=r"text .*my.txt', which does not exist"):
        _ = load(config.out).task


def test_a_run_that_kept_its_byte_pairs_in_vocabulary_json_is_judged_and_goes_on(config, tmp_path):
    (tmp_path / "my.txt").write_text("one two three, " * 100)
    options = {"text": str(tmp_path / "my.txt"), "length": 8, "tokens": "bpe"}
    pairs = {"kind": "bpe", "pairs": [[111, 110], [256, 101], [32, 116]]}  # on, one, " t"
    task = training.TaskConfig("lm", options).create("cpu", restore(pairs))
    asked = training.TaskConfig("lm", {**options, "vocabulary": 300})  # more than there are
    short = replace(config, task=asked, budget=training.Budget(steps=1, batch=2))
    list(training.Trainer(short, task).events())
    (config.out / "tokenizer.json").unlink()
    (config.out / "vocabulary.json").write_text(json.dumps(pairs))
    found = load(config.out)
    assert found.vocabulary.encode("one").tolist() == [257]
    assert math.isfinite(evaluate(found.model, found.task, "valid", batch_size=2)["loss"])
    train(replace(short, budget=replace(short.budget, steps=2)))
    assert load(config.out).vocabulary.plain() == found.vocabulary.plain()
    assert (config.out / "tokenizer.json").is_file()


def test_a_task_without_text_has_no_vocabulary(whole):
    with pytest.raises(ValueError, match=r"run must be of a task on text .* got copying"):
        _ = load(whole).vocabulary


def test_a_number_of_many_digits_is_shown_by_its_size():
    shown = str(training.Evaluated("training", 1, {"loss": 1e9, "perplexity": 1e304}, best=False))
    assert shown == "training 1: loss 1e+09  perplexity 1e+304"
    assert number(0.12345) == "0.1235"


def test_a_loss_looks_at_no_more_tokens_than_are_asked_for(config, monkeypatch):
    """And a task that asks for more than its facts say is refused."""
    task = config.task.create("cpu")
    learner = Learner(config, phases(config, task)[0], 0)
    seen, usual = [], learner.model.token_loss
    learner.model.token_loss = lambda x, *rest: seen.append(x.shape[1]) or usual(x, *rest)
    [fed] = feed(task, seed=0, batch_size=4, begin=0, end=1)
    learner.learn(fed)
    assert seen == [3]
    monkeypatch.setattr(task, "facts", replace(task.facts, asked=2))
    with pytest.raises(ValueError, match="at most 2 in each of 4 samples"):
        list(feed(task, seed=0, batch_size=4, begin=0, end=1))


def test_a_log_of_few_lines_takes_no_memory(config):
    """Of a run that asks for a line after more steps than it has."""
    train(replace(config, log_every=10**12))
    assert [row["step"] for row in cases.log(config.out) if "loss" in row] == [24]
