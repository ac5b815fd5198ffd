"""Sums and totals apart as the host sees them: what is launched with what, by a stub driver."""

import pytest
import stub_driver
import torch
from torch.testing import assert_close

from cosformer.ops import apart
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.hopper.roles import RULES

OUTPUT_STRIDES = slice(12, 15)  # in the tail of a sweep's parameters


@pytest.fixture
def launches(monkeypatch):
    return stub_driver.install(monkeypatch).launches


def draw(features=160, length=100, keys=None):
    lengths = ((length, features), (keys or length, features), (keys or length, 64))
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(1, 2, *size, generator=generator).bfloat16() for size in lengths]
    return [x.requires_grad_() for x in rows]


def both_passes(leaves, causal=True, decay=None):
    sums, totals = apart.sums_apart(*leaves, None, "identity", causal, decay)
    return torch.autograd.grad(sum(x.sum() for x in [*sums, *totals]), leaves)


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_is_divided_and_nothing_prepared(launches, causal):
    both_passes(draw(), causal)
    names = {name for name, *_ in launches}
    assert names == {"sweep"}
    roles = [options for _, options, *_ in launches]
    assert not any(role.SCALED for role in roles)
    assert {role.RULE for role in roles} == {0, RULES["apart"]}
    for role in roles:
        assert bool(role.DELTA) == role.TURNED
        assert (role.RULE == 0) == (role.REVERSE and not role.TURNED)  # dv has no columns of ones


def test_every_group_fades(launches):
    leaves = draw()
    decay = torch.full(leaves[0].shape[:3], -0.1)
    both_passes(leaves, decay=decay)
    roles = [options for name, options, *_ in launches if name == "sweep"]
    assert len(roles) == 8
    assert all(role.DECAY and not role.DOTS for role in roles)
    assert not apart.is_served(*leaves, "identity", True, decay.requires_grad_())


def test_a_group_is_a_forward_and_three_backward_sweeps(launches):
    both_passes(draw(272))
    widths = [tail[-5:-3] for tail in unpacked(launches)]
    forward = [(128, 64), (128, 64), (16, 64)]
    backward = [size for n in (128, 128, 16) for size in ((64, n), (64, n), (n, 64))]
    assert widths == forward + backward


def test_gradients_of_groups_lie_side_by_side(launches):
    assert all(x.is_contiguous() for x in both_passes(draw(272)))
    rows = [tail[OUTPUT_STRIDES] for tail in unpacked(launches)[3:]]
    wide, narrow = (2 * 100 * 272, 100 * 272, 272), (2 * 100 * 64, 100 * 64, 64)
    assert rows == [wide, wide, narrow] * 3


def unpacked(launches):
    return [hopper_plan.TAIL.unpack(tail) for *_, tail, _ in launches]


@pytest.mark.parametrize(("causal", "fades"), [(True, True), (True, False), (False, False)])
def test_second_derivatives_are_those_of_the_formula(launches, causal, fades):
    leaves = [x.detach().float().requires_grad_() for x in draw(length=9)]
    mask = torch.tensor([[True] * 5 + [False] + [True] * 3])
    grads = [torch.linspace(-1, 1, 18 * n).view(1, 2, 9, n) for n in (64, 64, 1, 1)]

    decay = torch.linspace(-1, 0, 18).view(1, 2, 9) if fades else None
    since = torch.zeros(1, 2, 9) if decay is None else decay.cumsum(-1)
    left = (since[..., :, None] - since[..., None, :]).tril().exp()

    def formula(q, k, v):
        parts = []
        for x, y in zip(q.split(128, -1), k.split(128, -1), strict=True):
            score = (x @ y.mT) * mask[:, None, None, :] * left
            parts.append(score.tril() if causal else score)
        return [x @ v for x in parts], [x.sum(-1, keepdim=True) for x in parts]

    def squares(call):
        sums, totals = call(*leaves)
        found = torch.autograd.grad([*sums, *totals], leaves, grads, create_graph=True)
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    ours = squares(lambda *x: apart.sums_apart(*x, mask, "identity", causal, decay))
    for one, other in zip(ours, squares(formula), strict=True):
        one, other = one.detach(), other.detach()
        assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"feature_map": "silu"}, False), ({"keys": 120}, False),
     ({"keys": 120, "causal": False}, True), ({"there": False}, False)],
)  # fmt: skip
def test_what_is_served(launches, monkeypatch, change, expected):
    given = {"feature_map": "relu", "causal": True, "keys": None, "there": True} | change
    monkeypatch.setattr(apart, "kernels_serve", lambda x: given["there"])
    leaves = draw(keys=given["keys"])
    assert apart.is_served(*leaves, given["feature_map"], given["causal"]) == expected
