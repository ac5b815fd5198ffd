"""Performer's features made inside the sweep as the host sees it: launches of a stub driver."""

import math

import pytest
import stub_driver
import torch
from exponential_cases import Case
from torch.testing import assert_close

from cosformer.mechanisms import create, performer
from cosformer.mechanisms.linear.performer import Performer
from cosformer.ops import apart, attend_projected, exponentials
from cosformer.ops.features import projected
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.hopper.roles import PROJECTIONS, RULES

GIVEN = {"levels": slice(6, 8), "weights": slice(-2, None)}  # in a sweep's pointers
CONTRACTED, SCALE = -5, -1  # in the tail of its parameters
GROUPS = [128, 128, 10]


@pytest.fixture
def launches(monkeypatch):
    return stub_driver.install(monkeypatch).launches


def draw(length=100, **options):
    leaves, about, _ = Case(length, **options).draw(batch=1, heads=2, device="cpu")
    return [x.requires_grad_() for x in leaves], about


def attend(leaves, about, causal=True):
    *given, decay = about
    sums, totals = exponentials.sums_of_exponentials(*leaves, *given, causal, decay)
    return [*sums, *totals]


@pytest.mark.parametrize("causal", [True, False])
def test_every_group_has_its_sweep(launches, causal):
    found = attend(*draw(), causal)
    assert [x.shape for x in found] == [(1, 2, 100, 64)] * 3 + [(1, 2, 100, 1)] * 3
    assert {name for name, *_ in launches} == {"sweep"}
    tails = [hopper_plan.TAIL.unpack(tail) for *_, tail, _ in launches]
    each = 1 if causal else 2
    assert [tail[CONTRACTED] for tail in tails] == [n for n in GROUPS for _ in range(each)]
    for (_, role, *_, given), tail in zip(launches, tails, strict=True):
        last = tail[CONTRACTED] == 10
        assert (PROJECTIONS["exp"] + last, RULES["apart"]) == (role.PROJECT, role.RULE)
        assert (64 if last else 128) == role.KW
        assert tail[SCALE] == pytest.approx(-math.log2(266) / 2)
        assert given[GIVEN["levels"]] == given[GIVEN["weights"]] == (True, True)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_only_float32_matrices_are_split(launches, stored):
    attend(*draw(stored=stored))
    assert {role.SPLIT for _, role, *_ in launches} == {stored == torch.float32}


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_as_wide_as_features_is_kept(launches, causal):
    kept = attend(*draw(1000), causal)[0].grad_fn.saved_tensors
    assert all(x.shape[3] <= 64 for x in kept if x is not None and x.dim() == 4)


@pytest.fixture
def made(monkeypatch):
    """What features are made of, in place of kernels; gradients of rows are the rows."""
    found = []

    def features(x, weight, kind, level):
        found.append((x, weight, level))
        made = projected.by_formula(x, weight, kind, level)
        return torch.nn.functional.pad(made, (0, -made.shape[-1] % projected.ALIGNED))

    def gradients(x, weight, level, grad, kind, learned):
        assert grad.shape == (*x.shape[:3], 272)
        assert not learned
        return x, None

    monkeypatch.setattr(exponentials, "by_kernel", features)
    monkeypatch.setattr(exponentials, "gradients", gradients)
    return found


def test_backward_makes_the_features_again(launches, made):
    leaves, about = draw()
    weight, levels, *_ = about
    found = sum(x.sum() for x in attend(leaves, about))
    launches.clear()
    dq, dk, _ = torch.autograd.grad(found, leaves)
    for x, level, (rows, used, relative) in zip(leaves[:2], levels, made, strict=True):
        assert torch.equal(x, rows)
        assert torch.equal(weight, used)
        assert torch.equal(level, relative)
    assert torch.equal(dq, leaves[0])
    assert torch.equal(dk, leaves[1])
    assert len(launches) == 9  # dq, dk and dv of every group
    assert not any(role.PROJECT for _, role, *_ in launches)


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_what_is_asked_for_is_swept(launches, made, asked):
    leaves, about = draw()
    leaves = [x.detach().requires_grad_(n in asked) for n, x in enumerate(leaves)]
    found = sum(x.sum() for x in attend(leaves, about))
    launches.clear()
    torch.autograd.grad(found, [leaves[n] for n in asked])
    assert len(launches) == 3 * len(asked)


def test_states_that_were_kept_have_a_row_for_every_stored_feature(launches, made, monkeypatch):
    monkeypatch.setattr(hopper_plan, "choose_segments", lambda *given, **_: 2)
    kept, own = [], apart.hopper.backward
    monkeypatch.setattr(apart.hopper, "backward", lambda *x: (kept.append(x[-2]), own(*x))[1])
    leaves, about = draw(1000)
    torch.autograd.grad(sum(x.sum() for x in attend(leaves, about)), leaves)
    assert [x.shape[-2:] for x in kept] == [(128, 65), (128, 65), (16, 65)]
    assert not kept[-1][..., 10:, :].any()


def test_every_group_fades_both_ways(launches, made):
    leaves, about = draw(fades=True)
    torch.autograd.grad(sum(x.sum() for x in attend(leaves, about)), leaves)
    roles = [role for name, role, *_ in launches if name == "sweep"]
    assert [bool(role.PROJECT) for role in roles] == [True] * 3 + [False] * 9
    assert all(role.DECAY and not role.DOTS for role in roles)


@pytest.mark.parametrize(("causal", "fades"), [(True, True), (True, False), (False, False)])
def test_second_derivatives_are_those_of_the_formula(launches, causal, fades):
    leaves, (weight, levels, _, decay) = draw(9, features=130, fades=fades)
    since = torch.zeros(1, 2, 9) if decay is None else decay.cumsum(-1)
    left = (since[..., :, None] - since[..., None, :]).clamp(max=0).exp()
    leaves = [x.detach().float().requires_grad_() for x in leaves]
    mask = torch.tensor([[True] * 5 + [False] + [True] * 3])
    grads = [torch.linspace(-1, 1, 18 * n).view(1, 2, 9, n) for n in (64, 64, 1, 1)]

    def formula(q, k, v):
        pairs = zip((q, k), levels, strict=True)
        made = [projected.by_formula(x, weight, "exp", level).split(128, -1) for x, level in pairs]
        scores = [(x @ y.mT) * left * mask[:, None, None] for x, y in zip(*made, strict=True)]
        scores = [x.tril() if causal else x for x in scores]
        return [x @ v for x in scores] + [x.sum(-1, keepdim=True) for x in scores]

    def squares(call):
        found = torch.autograd.grad(call(*leaves), leaves, grads, create_graph=True)
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    ours = squares(lambda *x: attend(x, (weight, levels, mask, decay), causal))
    for one, other in zip(ours, squares(formula), strict=True):
        one, other = one.detach(), other.detach()
        assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"features": 10}, True), ({"keys": 120}, False),
     ({"keys": 120, "causal": False}, True), ({"width": 128}, False), ({"there": False}, False),
     ({"learned": True}, False), ({"columns": 32}, False), ({"heads": 2}, False)],
)  # fmt: skip
def test_what_is_attended(launches, monkeypatch, change, expected):
    there, learned = change.pop("there", True), change.pop("learned", False)
    columns, heads = change.pop("columns", 64), change.pop("heads", 0)
    monkeypatch.setattr(attend_projected, "kernels_serve", lambda x: there)
    leaves, (weight, *_) = draw(**change)
    weight = weight[:, :columns].requires_grad_(learned)
    weight = weight.expand(heads, -1, -1) if heads else weight
    found = exponentials.is_attended(*leaves, weight, change.get("causal", True))
    assert found == expected


@pytest.fixture
def calls(monkeypatch):
    """What Performer gives to the kernels, which serve it."""
    found = []

    def attended(*given):
        found.append(given)
        return [given[2]], [torch.ones_like(given[2][..., :1])]

    monkeypatch.setattr(performer, "is_attended", lambda *given: True)
    monkeypatch.setattr(performer, "sums_of_exponentials", attended)
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_performer_hands_over_its_levels(calls, causal):
    mechanism = create("performer", 2, 64)
    (q, k, v), (_, _, mask, _) = draw(masked=True)
    q, k, v = (x.detach() for x in (q, k, v))
    out, _ = mechanism(q, k, v, causal=causal, key_mask=mask)
    ((*rows, weight, (of_queries, of_keys), hidden, way, fading),) = calls
    assert torch.equal(out, v)
    assert all(torch.equal(x, y) for x, y in zip(rows, (q, k, v), strict=True))
    assert weight is mechanism.projection
    assert hidden is mask
    assert way is causal
    assert fading is None
    queries = projected.by_formula(q, weight, "exp", of_queries)
    assert_close(queries, mechanism.queries(q, 0))
    tops = projected.top_exponents(k, weight).masked_fill(~mask[:, None], -torch.inf)
    level = tops[0, :, mask[0].long().argmax()] if causal else tops[0].amax(-1)
    assert torch.equal(of_keys, level[None, :, None].expand(1, 2, 100))


def test_levels_that_rise_let_sums_fade(calls):
    (q, k, v), _ = draw()
    steep = torch.cat([8 * k[:, :, :50], k[:, :, 50:]], 2).detach()  # exponents rise by far
    create("performer", 2, 64)(q.detach(), steep, v.detach(), causal=True)
    ((*_, (_, levels), _, _, fading),) = calls
    assert (fading < -40).any()
    assert_close(levels[..., :1] - fading.cumsum(-1), levels)


def test_what_has_more_than_levels_goes_the_old_way(calls):
    (q, k, v), _ = draw()
    q, k, v = (x.detach() for x in (q, k, v))
    create("performer", 2, 64)(q, k, v, causal=True, start=3)

    class Turned(Performer):
        def queries(self, q, start):
            return super().queries(-q, start)

    Turned(2, 64)(q, k, v, causal=True)
    assert not calls
