"""Whoever else asks for a gradient, those of an input are the same bits, on a Hopper GPU."""

import pytest
import torch
from asked import check_choices
from gpu_marks import ON_HOPPER
from kernel_cases import CASES, draw, ours

from cosformer import State, attention_with_state
from cosformer.ops.replay import native, replay

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned")]
NAMES = ["causal", "bidirectional", "masked", "retention", "gated"]


def check(name, impl):
    inputs, options = draw(CASES[name], 300, device="cuda")
    rows = [x.bfloat16() for x in inputs[:3]]
    check_choices(ours(CASES[name], options, impl), [*rows, *(x.float() for x in inputs[3:])])


@pytest.mark.parametrize("name", NAMES)
def test_by_the_kernels_for_hopper(name, segments):
    check(name, "hopper")


@pytest.mark.parametrize("name", ["causal", "gated", "grouped", "packed, both ways"])
def test_by_triton(name):
    check(name, "triton")


@pytest.mark.parametrize("name", ["causal", "bidirectional", "plain relu"])
def test_replayed(name, monkeypatch, host):
    connected = native.connected(host)
    monkeypatch.setattr(replay, "loaded_for", lambda q: connected)
    monkeypatch.setattr(replay, "_programs", {})
    for _ in range(3):
        check(name, "auto")
    assert all(program is not False for program in replay._programs.values())


def test_with_a_state(segments):
    def call(q, k, v, key_value):
        position = torch.tensor(4, device="cuda")
        state = State(key_value, torch.ones_like(key_value[..., 0]), position, 400.0)
        out, last = attention_with_state(q, k, v, state=state, impl="hopper")
        return torch.cat([out, last.key_value[:, :, 0].to(out)], 2)

    rows = torch.randn(3, 1, 2, 300, 64, device="cuda").bfloat16()
    check_choices(call, [*rows, torch.rand(1, 2, 2, 64, 64, device="cuda")])
