"""What the clock is wrapped in; no test here measures time."""

import contextlib
import itertools
import os

import pytest
import torch

from cosformer import attention
from cosformer.bench import timing, verb


def test_candidates_take_turns_and_each_comes_first_at_times(monkeypatch):
    monkeypatch.setattr(timing, "_sample", lambda call, count, device: call() or 1.0)
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timing.median_times(calls, repeats=4)
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_the_median_is_taken_per_call(monkeypatch):
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.01)
    # four to warm up, then three samples of two calls
    seconds = iter([0.004, 0.007, 0.005, 0.009, 0.1, 0.01, 0.3])
    monkeypatch.setattr(timing, "_sample", lambda call, count, device: next(seconds))
    found = timing.median_times({"a": lambda: None}, repeats=3)
    assert found == {"a": pytest.approx(1e3 * 0.1 / 2)}


@pytest.mark.parametrize(
    ("count", "device", "helps"), [(2, "cpu", True), (1, "cpu", False), (2, "cuda", False)]
)
def test_a_busy_machine_is_warned_of_and_one_thread_named_where_it_helps(
    monkeypatch, capsys, tmp_path, count, device, helps
):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 3.0, 3.0))
    verb.keep([], tmp_path / "rows.jsonl", keys=(), count=count, device=device)
    warning = capsys.readouterr().err
    assert warning.startswith("the machine is busy (load 3.0 before the start)")
    assert ("--threads 1" in warning) == helps


def test_peak_memory_counts_what_was_held_at_once():
    block = 1_000_000

    def call():
        for _ in range(3):
            torch.empty(block, dtype=torch.uint8)  # released before the next
        held = [torch.empty(block, dtype=torch.uint8) for _ in range(2)]
        del held

    assert timing.peak_extra_bytes(call) == 2 * block
    # temporaries inside an operator count
    x = torch.randn(4, 256, 256).transpose(1, 2)
    view = torch.nn.functional.softmax
    assert timing.peak_extra_bytes(lambda: view(x.flatten(), 0).sum()) >= 2 * x.nbytes
    # and so does what the op keeps from one call for the next
    q, k, v = torch.ones(3, 1, 2, 512, 16)
    first, second = (timing.peak_extra_bytes(lambda: attention(q, k, v)) for _ in range(2))
    assert second > 0.9 * first


def test_threads_are_restored_after_an_error():
    before, found = torch.get_num_threads(), []
    with contextlib.suppress(KeyError), timing.threads(before + 1):
        found.append(torch.get_num_threads())
        raise KeyError
    assert (found, torch.get_num_threads()) == ([before + 1], before)
    with pytest.raises(ValueError, match="threads must be at most 1,024, got 2000"):
        timing.threads(2000).__enter__()


def test_the_time_of_the_host_is_the_median_after_warming_up(monkeypatch):
    now = [0.0]
    spent = iter(itertools.accumulate([9.0] * timing.WARM_UP + [0.001, 0.002, 0.5]))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    found = timing.host_time(lambda: now.__setitem__(0, next(spent)), device="cpu", count=3)
    assert found == pytest.approx(2)


def test_an_attempt_gives_the_result_or_the_first_line_of_the_reason():
    assert timing.attempt(lambda: 3, "cpu") == (3, "")
    assert timing.attempt(lambda: {}["why\nmore"], "cpu") == (None, "KeyError: 'why\\nmore'")
    assert timing.attempt(lambda: int(""), "cpu")[1].startswith("ValueError: invalid literal")
