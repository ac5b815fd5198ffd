"""Performer's features made inside the sweep on a Hopper GPU, against formulas in float64."""

import pytest
import torch
from exponential_cases import Case, results
from gpu_marks import ON_HOPPER
from projected_cases import no_worse

from cosformer.mechanisms import create
from cosformer.ops import exponentials

pytestmark = [
    *ON_HOPPER,
    pytest.mark.usefixtures("poisoned"),
]
SLACK = 1e-3
"""Of the norm, as for stored features."""


def check(case):
    leaves, about, grad = case.draw()
    right = results(case.plain, [x.double() for x in leaves], about, grad)
    found = results(case.fused, leaves, about, grad)
    no_worse(found, results(case.plain, leaves, about, grad), right, SLACK)
    for one, other in zip(results(case.fused, leaves, about, grad), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [5, 63, 64, 1000])
def test_outputs_and_gradients_are_those_of_the_formula(causal, length):
    check(Case(length, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_every_way_to_cut(causal, masked, segments):
    check(Case(700, causal, masked=masked))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [5, 64, 700])
def test_sums_that_fade(length, masked, segments):
    check(Case(length, masked=masked, fades=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", [10, 64, 65, 127, 128, 192, 256])
def test_every_number_of_features(causal, features):
    """Rows that fill the last block of W have none."""
    check(Case(causal=causal, features=features))


@pytest.mark.parametrize(
    "change",
    [
        {"stored": torch.bfloat16},
        {"stored": torch.bfloat16, "causal": False},
        {"width": 8},
        {"width": 40, "causal": False, "keys": 100},
        {"turned": True},
        {"turned": True, "causal": False},
        {"fades": True},
        {"fades": True, "stored": torch.bfloat16, "width": 40},
        {"fades": True, "features": 70, "turned": True},
        {"spread": 0.1},
        {"spread": 3.0, "causal": False},
    ],
    ids=str,
)
def test_every_shape(change):
    check(Case(**change))


@pytest.mark.parametrize("causal", [True, False])
def test_masked_keys_may_hold_anything(causal):
    """However far their own exponents are above the level of all others."""
    case = Case(causal=causal, masked=True, spread=3.0)
    (q, k, v), (weight, levels, mask, _), _ = case.draw()
    levels = levels[0], levels[1].masked_fill(~mask[:, None], torch.nan)
    hidden = ~mask[:, None, :, None]
    poison = (x.masked_fill(hidden, torch.nan) for x in (k, v))
    with torch.no_grad():
        expected = case.fused(q, k, v, weight, levels, mask, None)
        assert expected.isfinite().all()
        assert torch.equal(case.fused(q, *poison, weight, levels, mask, None), expected)


@pytest.mark.parametrize(("causal", "rises"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("masked", [False, True])
def test_performer_goes_this_way_and_agrees_with_stored_features(
    causal, rises, masked, monkeypatch
):
    calls, fused = [], exponentials.hopper.forward
    monkeypatch.setattr(
        exponentials.hopper, "forward", lambda *given: (calls.append(given), fused(*given))[1]
    )
    mechanism = create("performer", heads=4, width=64).cuda()
    leaves, (_, _, mask, _), grad = Case(masked=masked).draw()

    if rises:
        monkeypatch.setattr("cosformer.mechanisms.linear.performer.readable", lambda x: False)

    def attend(q, k, v, mask):
        return mechanism(q, k, v, causal=causal, key_mask=mask)[0]

    found = results(attend, leaves, (mask,), grad)
    assert all((given[3] is not None) == rises for given in calls)
    assert [given[-1].width for given in calls] == [128, 128, 10]
    monkeypatch.setattr("cosformer.mechanisms.linear.performer.is_attended", lambda *given: False)
    for one, other in zip(found, results(attend, leaves, (mask,), grad), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_second_derivatives():
    case = Case(40)
    leaves, about, grad = case.draw()

    def squares(call, leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = call(*leaves, *about)
        found = torch.autograd.grad(out, leaves, grad.to(out.dtype), create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in found), leaves))

    right = squares(case.plain, [x.double() for x in leaves])
    no_worse(squares(case.fused, leaves), squares(case.plain, leaves), right, 0.02)
