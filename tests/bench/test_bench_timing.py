"""What the clock is wrapped in; no test here measures time."""

import pytest
import torch

from cosformer.bench import timing


@pytest.fixture
def calls_take_no_time(monkeypatch):
    def sample(call, count, device):
        call()
        return timing.SHORTEST_SAMPLE

    monkeypatch.setattr(timing, "_sample", sample)


@pytest.mark.usefixtures("calls_take_no_time")
def test_candidates_take_turns_and_each_comes_first_at_times():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timing.median_times(calls, repeats=4)
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_the_median_is_taken_per_call(monkeypatch):
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.01)
    seconds = iter([0.004, 0.005, 0.1, 0.01, 0.3])  # two to warm up, three samples of two calls
    monkeypatch.setattr(timing, "_sample", lambda call, count, device: next(seconds))
    found = timing.median_times({"a": lambda: None}, repeats=3)
    assert found == {"a": pytest.approx(1e3 * 0.1 / 2)}


def test_peak_memory_counts_what_was_held_at_once():
    block = 1_000_000

    def call():
        for _ in range(3):
            torch.empty(block, dtype=torch.uint8)  # released before the next
        held = [torch.empty(block, dtype=torch.uint8) for _ in range(2)]
        del held

    assert timing.peak_extra_bytes(call) == 2 * block


def test_peak_memory_sees_temporaries_inside_an_operator():
    x = torch.randn(4, 256, 256).transpose(1, 2)
    view = torch.nn.functional.softmax
    assert timing.peak_extra_bytes(lambda: view(x.flatten(), 0).sum()) >= 2 * x.nbytes


def test_threads_are_restored_after_an_error():
    before = torch.get_num_threads()
    found = []

    def fail():
        with timing.threads(before + 1):
            found.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert found == [before + 1]
    assert torch.get_num_threads() == before


def test_the_time_of_the_host_is_the_median_after_warming_up(monkeypatch):
    spent = iter([9.0] * timing.WARM_UP + [0.001, 0.002, 0.5])
    now = [0.0]

    def call():
        now[0] += next(spent)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert timing.host_time(call, device="cpu", count=3) == pytest.approx(2)


def test_an_attempt_gives_the_result_or_the_first_line_of_the_reason():
    def fail():
        raise KeyError("why\nmore")

    assert timing.attempt(lambda: 3, "cpu") == (3, "")
    assert timing.attempt(fail, "cpu") == (None, "KeyError: 'why\\nmore'")
    assert timing.attempt(lambda: int(""), "cpu")[1].startswith("ValueError: invalid literal")
