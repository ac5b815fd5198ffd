"""A GPU that is the CPU with a clock of our own: the way of the rows without the device."""

import torch

from cosformer import records
from cosformer.bench import cells, checks, gpu, ops, steps, timing

TIME = 2.0
"""Milliseconds of everything."""


def times(calls, *, repeats, device):
    for call in calls.values():
        call()
    return dict.fromkeys(calls, TIME)


def install(monkeypatch):
    """Let `device="cuda"` be measured here; nothing looks at a clock."""
    draw = cells.draw

    def draw_here(shape, count, *, dtype, device, seed):
        return draw(shape, count, dtype=dtype, seed=seed)

    def empty_here(*sizes, horizon, device):
        return checks.State.empty(*sizes, horizon=horizon)

    def stream_here(*, device, seed):
        return checks.stream_against_full_pass(seed=seed)

    monkeypatch.setattr(ops, "stream_against_full_pass", stream_here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "describe_hardware", lambda device: {"device": device})
    monkeypatch.setattr(timing, "synchronise", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda *, repeats, device: 1e9)
    monkeypatch.setattr(gpu, "recorded", lambda call: call)
    monkeypatch.setattr(gpu, "host_time", lambda call, *, device: TIME / 10)
    for module in (cells, checks):
        monkeypatch.setattr(module, "draw", draw_here)
    for module in (gpu, ops, steps):
        monkeypatch.setattr(module, "median_times", times)
    for module in (ops, steps):
        monkeypatch.setattr(module, "peak_extra_bytes", lambda call, device: 96)
    for module in (gpu, steps):
        monkeypatch.setattr(module, "State", type("Here", (), {"empty": staticmethod(empty_here)}))
    for module in (gpu, ops):
        monkeypatch.setattr(module, "LENGTHS", {"cuda": (30,)})
