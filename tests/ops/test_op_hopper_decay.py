"""Decays on Hopper as the host sees them: what is launched with what, by a stub of a driver."""

import struct

import pytest
import stub_driver
import torch

from cosformer import State, linear_attention, linear_attention_with_state
from cosformer.ops.hopper import plan as hopper_plan

UNDIVIDED = {"normaliser": "none", "impl": "hopper"}
BASIS_STRIDES = slice(15, 17)  # in the tail of a sweep's parameters
GAMMA = torch.tensor([0.9, 0.99])


@pytest.fixture
def launches(monkeypatch):
    return stub_driver.install(monkeypatch).launches


def sweeps(launches):
    return [options for name, options, *_ in launches if name == "sweep"]


def numbers(launches, kernel, form):
    """What a kernel was told behind its pointers, launch by launch."""
    return [struct.unpack(form, tail) for name, *_, tail, _ in launches if name == kernel]


def both_passes(length=100, width=64, **options):
    q, k, v = stub_driver.leaves(length, width)
    linear_attention(q, k, v, causal=True, **UNDIVIDED, **options).sum().backward()


def test_every_sweep_of_a_decay_knows_of_it(launches):
    both_passes(gamma=GAMMA)
    assert [name for name, *_ in launches] == ["since", "sweep", "since", *["sweep"] * 3]
    assert all(options.DECAY for options in sweeps(launches))
    assert numbers(launches, "since", "2i") == [(100, 128)] * 2


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_dots_are_computed_for_gates_that_need_a_gradient(launches, graded, width):
    gates = torch.full((1, 2, 100), -0.1, requires_grad=graded)
    both_passes(width=width, log_decay=gates)
    forward, dq, dk, dv = sweeps(launches)
    assert dq.DOTS == dk.DOTS == graded
    assert not any(role.DOTS for role in (forward, dv))
    assert (gates.grad is not None) == graded


def test_a_cut_sequence_decays_from_segment_to_segment(launches):
    both_passes(6000, gamma=GAMMA)
    rows = hopper_plan.choose_segments(2, 6000, 132, extra=0.6)
    rows = -(-6000 // (rows * 64)) * 64
    whole = (64 * 64, 0, 6000, 2, 6000, rows, -(-6000 // rows), True)
    assert numbers(launches, "edges", "3q6i") == [(*whole, False), (*whole, True)]
    edges = [(options, given) for name, options, *_, given in launches if name == "edges"]
    assert all(options.DECAY and given[3] for options, given in edges)


def test_a_stream_passes_its_state_on(launches):
    q, k, v = stub_driver.qkv()
    _, state = linear_attention_with_state(q, k, v, gamma=GAMMA, **UNDIVIDED)
    linear_attention_with_state(q, k, v, state=state, gamma=GAMMA, **UNDIVIDED)
    firsts_and_lasts = [given[9:11] for name, *_, given in launches if name == "sweep"]
    assert firsts_and_lasts == [(True, True)] * 2


def test_heads_and_sequences_that_share_a_decay_step_by_nothing(launches):
    q, k, v = (torch.randn(3, 2, 100, 64).bfloat16() for _ in range(3))
    each = torch.full((3, 2, 100), -0.1)
    about = {"causal": True, **UNDIVIDED}
    linear_attention(q, k, v, gamma=0.9, **about)
    linear_attention(q, k, v, gamma=GAMMA, **about)
    linear_attention(q, k, v, log_decay=each, **about)
    tails = numbers(launches, "sweep", hopper_plan.TAIL.format)
    assert [tail[BASIS_STRIDES] for tail in tails] == [(0, 0), (0, 128), (256, 128)]


def test_every_sweep_knows_the_scale(launches):
    gates = torch.full((1, 2, 6000), -0.1, requires_grad=True)
    for scale in (0.125, 3.0, 1.0):
        launches.clear()
        both_passes(6000, log_decay=gates, scale=scale)
        found = numbers(launches, "sweep", hopper_plan.TAIL.format)
        assert {tail[-1] for tail in found} == {scale}
        assert len(found) == 6


def test_a_state_is_not_scaled_but_its_gradient_is(launches, monkeypatch):
    """Kernels add to the end's gradient what they scale later, so that it is taken out before."""
    given = []
    own = hopper_plan.Plan.sweep

    def sweep(self, role, *rows, **about):
        given.append((role, about["first"]))
        own(self, role, *rows, **about)

    monkeypatch.setattr(hopper_plan.Plan, "sweep", sweep)
    q, k, v = stub_driver.qkv()
    first = torch.zeros(1, 2, 1, 64, 64, requires_grad=True)
    state = State(first, torch.zeros(1, 2, 1, 0), torch.tensor(0), None)
    _, after = linear_attention_with_state(
        q, k, v, state=state, gamma=GAMMA, scale=0.125, **UNDIVIDED
    )
    monkeypatch.setattr(
        hopper_plan.Plan, "states", lambda self, like, segments=1: torch.ones_like(first)
    )
    (grad,) = torch.autograd.grad(after.key_value.sum(), first)
    (ends,) = (x for role, x in given if role.REVERSE)
    assert (ends == 8).all()
    assert torch.equal(grad[0, 0, 0, -1], torch.full((64,), 0.125))
