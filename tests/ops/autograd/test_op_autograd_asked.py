"""Gradients that nobody asked for are not computed, and those that are asked for stay the same."""

import pytest
import stub_driver
import torch
from asked import check_choices, choices, gradients
from formula import tokens, uniform
from kernel_cases import CASES, draw, ours
from stub_driver import KERNELS, check_again, head, qkv

from cosformer import State, attention, attention_with_state, linear_attention
from cosformer.ops.chunked import passes as by_torch
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.triton import launch

each_choice = pytest.mark.parametrize("asked", choices(3)[:-1], ids=str)
some_choices = pytest.mark.parametrize("asked", [choices(3)[n] for n in (0, 3, 4, 6)], ids=str)
both_ways = pytest.mark.parametrize("causal", [True, False])


def close(x, y):
    """But for roundings: dk alone is made of other products than beside dv."""
    return bool(((x - y).abs() <= 4096 * torch.finfo(y.dtype).eps * y.abs().max()).all())


def streamed(impl):
    def call(q, k, v, key_value):
        key_sum = torch.ones_like(key_value[..., 0])
        state = State(key_value, key_sum, torch.tensor(4), 400.0)
        out, last = attention_with_state(q, k, v, state=state, impl=impl)
        return torch.cat([out, last.key_value[:, :, 0]], 2)

    return call


@pytest.mark.parametrize(
    "name", ["bidirectional", "causal, more queries", "grouped", "packed, both ways", "gated"]
)
def test_by_torch(name):
    inputs, options = draw(CASES[name], 70)
    check_choices(ours(CASES[name], options, "chunked"), inputs, close)


def test_with_a_state_by_torch():
    inputs = (*tokens(1, 2, 70), uniform(1, 2, 2, 4, 4))
    check_choices(streamed("chunked"), inputs, close)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted", "poisoned")
@pytest.mark.parametrize("name", ["bidirectional", "grouped", "packed", "gated, divided"])
def test_by_triton(name):
    inputs, options = draw(CASES[name], 4)
    check_choices(ours(CASES[name], options, "triton"), [x.float() for x in inputs])


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted", "poisoned")
def test_with_a_state_by_triton(monkeypatch):
    monkeypatch.setattr(launch, "segment_length", lambda *sizes: 64)  # two of them
    inputs = (*tokens(1, 1, 66), uniform(1, 1, 2, 4, 4))
    check_choices(streamed("triton"), [x.float() for x in inputs])


@pytest.fixture
def served(monkeypatch):
    """For how many gradients each sweep of torch was made."""
    counts, own = [], by_torch.trilinear

    def counted(*given, mirror=None, **options):
        counts.append(1 + (mirror is not None))
        return own(*given, mirror=mirror, **options)

    monkeypatch.setattr(by_torch, "trilinear", counted)
    return counts


@each_choice
@both_ways
def test_torch_serves_nobody_else(causal, asked, served):
    gradients(lambda *x: attention(*x, causal=causal), tokens(1, 2, 20), asked)
    assert sum(served) == sum(asked)


def test_torch_has_the_gradient_of_a_state_from_one_sweep(served):
    inputs = (*tokens(1, 2, 20), uniform(1, 2, 2, 4, 4))
    gradients(streamed("chunked"), inputs, (False, False, False, True))
    assert served == [1]  # nor is dk made beside it


@pytest.mark.usefixtures("interpreted")
@some_choices
@both_ways
def test_triton_sweeps_for_nobody_else(causal, asked, monkeypatch):
    read, own = [], launch.Pass.launch
    monkeypatch.setattr(
        launch.Pass, "launch", lambda self, x: (read.append(x.x is not None), own(self, x))[1]
    )
    inputs = [x.float() for x in tokens(1, 1, 3, width=8)]
    gradients(lambda *x: attention(*x, causal=causal, impl="triton"), inputs, asked)
    assert sum(read) == 1 + sum(asked)  # one forward
    gathered = 0 if causal else 1 + asked[0] + (asked[1] or asked[2])
    assert len(read) - sum(read) == gathered


@each_choice
@pytest.mark.parametrize(("causal", "length"), [(True, 100), (True, 6000), (False, 100)])
def test_hopper_sweeps_for_nobody_else(launches, causal, length, asked):
    def call(*x):
        out = attention(*x, causal=causal, **KERNELS)
        launches.clear()
        return out

    full = gradients(call, qkv(length), [True] * 3)
    found = gradients(call, qkv(length), asked)
    for x, right, each in zip(found, full, asked, strict=True):
        assert head(x) == head(right) if each else x is None
    sweeps = [options for name, options, *_ in launches if name == "sweep"]
    made = [role for role in sweeps if role.READ]
    wanted = zip([(True, False), (True, True), (False, True)], asked, strict=True)
    assert [(role.TURNED, role.REVERSE) for role in made] == [role for role, each in wanted if each]
    cut = not causal or length > 1000
    assert len(sweeps) - len(made) == (cut and (asked[1] or asked[2]))


@some_choices
@pytest.mark.parametrize("graded", [True, False])
def test_hopper_sweeps_for_a_decay(launches, asked, graded):
    def call(*x):
        out = linear_attention(*x[:3], log_decay=x[3], causal=True, normaliser="none", **KERNELS)
        launches.clear()
        return out

    gates = torch.full((1, 2, 100), -0.1)
    found = gradients(call, [*qkv(), gates], [*asked, graded])
    assert [x is not None for x in found] == [*asked, graded]
    count = 2 + asked[2] if graded else sum(asked)  # φ(q)·dφ(q) and φ(k)·dφ(k) are in the sweeps
    # each by two variants: nobody knows how strong the decay is
    wanted = ["sweep"] * (2 * count) + ["decay_gradient"] * graded
    assert [name for name, *_ in launches] == wanted


@pytest.mark.parametrize("length", [100, 6000])
@pytest.mark.parametrize("asked", [(False, False), (True, True)], ids=str)
def test_hopper_sweeps_for_a_state(launches, monkeypatch, length, asked):
    """Of k and v, and of a state that asks in every second call."""

    def swept(of_state):
        q, *rows = qkv(length)
        k, v = (x.requires_grad_(each) for x, each in zip(rows, asked, strict=True))
        key_value = uniform(1, 2, 2, 64, 64).float().requires_grad_(of_state)
        state = State(key_value, torch.ones(1, 2, 2, 64), torch.tensor(4), 1e4)
        out, _ = attention_with_state(q.requires_grad_(), k, v, state=state, **KERNELS)
        launches.clear()
        out.sum().backward()
        assert (key_value.grad is not None) == of_state
        return launches[:]

    cut = length > 1000  # whose states are summed by a sweep of their own
    without, with_state = swept(False), swept(True)
    for given, reverse in ((without, any(asked)), (with_state, True)):
        roles = [options for name, options, *_ in given if name == "sweep"]
        turned = [role for role in roles if role.TURNED and role.REVERSE]
        assert len(turned) == (1 + cut if reverse else 0)
    monkeypatch.setattr(hopper_plan, "_plans", {})
    assert swept(True) == with_state  # as if the first call had not been


@some_choices
@pytest.mark.parametrize("length", [100, 6000])
def test_a_call_like_another_launches_what_is_asked_for(
    driver, ordinary, monkeypatch, asked, length
):
    def call(seed):
        driver.launches.clear()
        found = gradients(
            lambda *x: stub_driver.attention(*x, causal=True), qkv(length, seed=seed), asked
        )
        return [x if x is None else head(x) for x in found], driver.launches[:]

    check_again(call, ordinary, monkeypatch)


@pytest.mark.usefixtures("driver")
def test_one_graph_is_asked_for_one_gradient_after_the_other():
    inputs = [x.requires_grad_() for x in qkv()]
    for _ in range(3):
        out = stub_driver.attention(*inputs, causal=True)
        full = torch.autograd.grad(out, inputs, out, retain_graph=True)
        for x, right in zip(inputs, full, strict=True):
            (found,) = torch.autograd.grad(out, x, out, retain_graph=True)
            assert head(found) == head(right)
