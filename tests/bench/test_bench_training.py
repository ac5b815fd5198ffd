"""`cosformer bench training`, `generation` and `data` at toy size: their rows and tables."""

from unittest.mock import Mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cosformer import records, tasks
from cosformer.bench import data, generation, training
from cosformer.bench.flops import peak_flops, training_flops
from cosformer.models import PRESETS, LanguageModel
from cosformer.report.generation import generation_figure
from cosformer.report.tables import TABLES
from cosformer.training import Budget, RunConfig, TaskConfig

SMALL = {"preset": "tiny", "lengths": (8, 32), "tokens": 64, "repeats": 1, "threads": 1}


def options(tmp_path, **given):
    return training.Options(**{"out": tmp_path / "rows.jsonl", **SMALL, **given})


def _of(rows, what, at="length"):
    found = [row for row in rows if row.what == what]
    return {(row.config["candidate"], row.config[at]): row.value for row in found}


def test_steps_give_speed_memory_and_the_share_of_the_data(tmp_path):
    given = options(tmp_path)
    assert training.run(given) == 0
    rows = records.read(given.path)
    places = {(name, length) for name in ("cosformer", "softmax") for length in (8, 32)}
    speeds = _of(rows, "train_speed")
    for what in ("train_speed", "peak_memory", "data_share"):
        assert _of(rows, what).keys() == places
        assert min(_of(rows, what).values()) > 0
    ratios = {n: speeds["cosformer", n] / speeds["softmax", n] for n in (8, 32)}
    expected = {("softmax", n): pytest.approx(ratio) for n, ratio in ratios.items()}
    assert _of(rows, "train_speed_ratio") == expected
    assert {row.config["batch"] * row.config["length"] for row in rows} == {64}
    table = TABLES["training"](rows)
    assert "| batch × tokens | tokens/s: cosFormer | tokens/s: softmax (SDPA) | ratio" in table
    assert f"| 2 × 32 | {speeds['cosformer', 32]:,.0f} |" in table
    assert "peak flops" not in table  # nobody states one for a processor


def test_a_step_trains_the_preset_as_a_run_would(tmp_path):
    given = options(tmp_path)
    task = tasks.create("lm", text="python", length=8)
    config = RunConfig(TaskConfig("lm"), tmp_path, budget=Budget(batch=2))
    steps = training.Steps(config, given.model("cosformer", 8), task)
    assert steps.model.config.vocabulary == 1028  # not the task's
    before = [p.detach().clone() for p in steps.model.parameters()]
    steps()
    steps.close()
    assert not any(map(torch.equal, steps.model.parameters(), before))


def test_a_mechanism_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    explode = Mock(side_effect=torch.OutOfMemoryError("tried to allocate"))
    monkeypatch.setattr("cosformer.mechanisms.dense.softmax.Softmax.attend", explode)
    rows = list(training.measure(options(tmp_path, lengths=(8,))))
    (failed,) = [row for row in rows if row.what == "failed"]
    assert (failed.config["candidate"], failed.config["length"]) == ("softmax", 8)
    assert _of(rows, "train_speed").keys() == {("cosformer", 8)}
    assert "out of memory" in TABLES["training"](rows)


def test_flops_of_matrices_are_those_that_torch_counts():
    model, length = LanguageModel(PRESETS["tiny"]), 16
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64)).sum().backward()
    counts = counter.get_flop_counts()["Global"].items()
    counted = sum(n for x, n in counts if str(x) in ("aten.mm", "aten.addmm"))  # not bmm of heads
    mechanism = model.backbone.blocks[0].attention.mechanism
    attention = 2 * 3 * mechanism.cost(length).operations
    assert training_flops(model, length) * length == pytest.approx(counted + attention)


def test_utilisation_is_flops_over_the_peak_of_a_device_that_states_one(tmp_path):
    model = LanguageModel(options(tmp_path).model("cosformer", 32))
    fast = records.Run({"device": "cuda", "name": "NVIDIA H200"}, {}, None, 0, "2026-01-02")
    at = {"batch": 2, "length": 32, "dtype": "bfloat16"}
    rows = training._speeds(fast, at, {"cosformer": 4.0, "data": 1.0}, {"cosformer": model})
    values = {row.what: row.value for row in rows}
    assert (values["train_speed"], values["data_share"]) == (16_000, 0.25)
    assert values["flops_utilisation"] == 16_000 * training_flops(model, 32) / 989e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("Some processor", "bfloat16") is None


def test_a_token_is_timed_by_position_and_a_sum_does_not_grow(tmp_path):
    once = {"repeats": 1, "threads": 1, "out": tmp_path / "rows.jsonl"}
    assert generation.run(generation.Options(preset="tiny", positions=(4, 40), **once)) == 0
    rows = records.read(once["out"])
    held = _of(rows, "stream_memory", "position")
    assert held["cosformer", 4] == held["cosformer", 40]
    assert held["softmax", 40] > 9 * held["softmax", 4]
    speeds = _of(rows, "generation_speed", "position")
    right = {("cosformer", n): speeds["cosformer", n] / speeds["softmax", n] for n in (4, 40)}
    assert _of(rows, "generation_speed_ratio", "position") == pytest.approx(right)
    assert sum(row.what == "token_time" for row in rows) == 4
    assert "| mechanism | ms per token at 4 | ms per token at 40 |" in TABLES["generation"](rows)


def test_streams_of_a_gpu_are_counted_with_half_of_them_where_all_do_not_fit(tmp_path, monkeypatch):
    """On a CPU: what is measured where, not how fast."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        records, "describe_hardware", lambda device: {"device": device, "name": "x"}
    )
    monkeypatch.setattr(generation, "CUDA", "cpu")
    monkeypatch.setattr(generation, "TOKENS", 1)
    monkeypatch.setattr(generation, "ROUNDS", 1)
    peers, speed = [], generation._speed
    monkeypatch.setattr(generation, "transformers_speed", lambda *given: peers.append(given) or 9.0)

    def short_of_memory(model, cell, options):
        if model.config.mechanism == "softmax" and cell.batch * cell.position > 100:
            raise RuntimeError("out of memory")
        return speed(model, cell, options)

    monkeypatch.setattr(generation, "_speed", short_of_memory)
    given = {"preset": "tiny", "positions": (5, 40), "batches": (1, 4, 6), "repeats": 1}
    mechanisms = ("cosformer-gated", "cosformer-gated softmax", "softmax")
    options = generation.Options(
        device="cuda", out=tmp_path / "rows.jsonl", mechanisms=mechanisms, threads=1, **given
    )
    assert generation.run(options) == 0
    rows = records.read(options.path)
    found = {}
    for row in rows:
        if row.what == "generation_speed":
            c = row.config
            found.setdefault(c["candidate"], []).append((c["batch"], c["position"], c["context"]))
    usual = [(1, 5, "read"), (4, 5, "read"), (6, 5, "read"), (4, 40, "filled")]
    assert [found[name] for name in mechanisms[:2]] == [usual] * 2
    assert found["softmax"] == [*usual[:3], (2, 40, "filled")]
    assert found["transformers"] == [(1, 5, "read"), (4, 5, "read")]
    assert [each[1:3] for each in peers] == [(1, 5), (4, 5)]
    held = _of(rows, "stream_memory", "position")
    assert held["cosformer-gated", 5] == held["cosformer-gated", 40]
    assert held["softmax", 40] - 8 == 8 * (held["softmax", 5] - 8)  # 8 bytes of its position
    far = [
        row for row in rows if row.what == "generation_speed_ratio" and row.config["position"] == 40
    ]
    assert [row.config["to_batch"] for row in far] == [2, 2]
    table = TABLES["tokens"](rows)
    assert "| softmax, static cache | 2 | 40 (filled) |" in table
    assert b"<svg" in generation_figure(rows, "svg")


def test_generated_sets_are_timed_and_nothing_is_kept(tmp_path):
    given = data.Options(listops=5, listops_workers=1, pathfinder=5, out=tmp_path / "rows.jsonl")
    assert data.run(given) == 0
    rows = records.read(given.out)
    assert [row.config["set"] for row in rows] == 2 * ["listops"] + 2 * ["pathfinder"]
    for seconds, speed in (rows[:2], rows[2:]):
        assert speed.value == pytest.approx(5 / seconds.value)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert "| listops | 5 | 1 |" in TABLES["data"](rows)
    assert TABLES["data"](rows[:3]) == TABLES["data"](rows)  # of a run that was killed
