"""A GPU that is the CPU with a clock of our own: the way of the rows without the device."""

import torch

from cosformer import records
from cosformer.bench import cells, checks, first_call, gpu, inputs, ops, steps, timing

TIME = 2.0
"""Milliseconds of everything."""


def times(calls, *, repeats, device):
    for call in calls.values():
        call()
    return dict.fromkeys(calls, TIME)


def install(monkeypatch):
    """Let `device="cuda"` be measured here; nothing looks at a clock."""

    def here(function):
        return staticmethod(lambda *given, device, **options: function(*given, **options))

    stream, draw = here(checks.stream_against_full_pass), here(inputs.draw)
    state = type("Here", (), {"empty": here(checks.State.empty)})
    monkeypatch.setattr(ops, "stream_against_full_pass", stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "describe_hardware", lambda device: {"device": device})
    monkeypatch.setattr(timing, "synchronise", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda *, repeats, device: 1e9)
    monkeypatch.setattr(gpu, "recorded", lambda call: call)
    monkeypatch.setattr(gpu, "host_time", lambda call, *, device: TIME / 10)
    for module in (cells, checks, inputs):
        monkeypatch.setattr(module, "draw", draw)
    for module in (gpu, ops, steps):
        monkeypatch.setattr(module, "median_times", times)
    for module in (ops, steps):
        monkeypatch.setattr(module, "peak_extra_bytes", lambda call, device: 96)
    for module in (gpu, steps):
        monkeypatch.setattr(module, "State", state)
    for module in (gpu, ops):
        monkeypatch.setattr(module, "LENGTHS", {"cuda": (30,)})
    monkeypatch.setattr(first_call, "in_new_process", lambda *given: TIME)
