"""Features made inside the sweep as the host sees them: what is launched, by a stub driver."""

import pytest
import stub_driver
import torch
from torch.testing import assert_close

from cosformer.mechanisms import create, projecting
from cosformer.mechanisms.linear.learned import Hedgehog
from cosformer.ops import attend_projected
from cosformer.ops.attend_projected import is_attended
from cosformer.ops.features import projected
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.hopper.roles import PROJECTIONS

SHARED, CONTRACTED = slice(-11, -9), -5  # in the tail of a sweep's parameters
WEIGHTS = slice(-2, None)  # in its pointers
OPTIONS = ("softmaxes", True, "clamp", 1e-6)
WIDTHS = {"waves": 128, "softmaxes": 128, "relu": 64}


@pytest.fixture
def launches(monkeypatch):
    return stub_driver.install(monkeypatch).launches


def draw(length=100, keys=None, matrices=2, stored=torch.float32, width=64):
    generator = torch.Generator().manual_seed(5)
    keys = keys or length
    sizes = ((2, length, 64), (2, keys, 64), (2, keys, width))
    q, k, v = (torch.randn(1, *size, generator=generator).bfloat16() for size in sizes)
    count = (matrices,) if matrices else ()
    weights = [torch.randn(*count, 64, 64, generator=generator).to(stored) for _ in range(2)]
    return [x.requires_grad_() for x in (q, k, v, *weights)]


def attend(leaves, mask=None, options=OPTIONS):
    return attend_projected.attend_projected(*leaves, mask, *options)


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_forward_is_sweeps_alone(launches, kind, causal):
    attend(draw(), options=(kind, causal, "clamp", 1e-6))
    assert [name for name, *_ in launches] == ["sweep"] * (1 if causal else 2)
    for _, role, _, _, tail, given in launches:
        assert role[:2] == (WIDTHS[kind], 1)
        assert PROJECTIONS[kind] == role.PROJECT
        assert hopper_plan.TAIL.unpack(tail)[CONTRACTED] == WIDTHS[kind]
        assert given[WEIGHTS] == (True, True)


@pytest.mark.parametrize(("matrices", "shared"), [(None, 2), (1, 2), (2, 1)])
def test_heads_share_matrices(launches, matrices, shared):
    attend(draw(matrices=matrices))
    assert hopper_plan.TAIL.unpack(launches[0][4])[SHARED] == (shared, shared)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_only_float32_matrices_are_split(launches, stored):
    leaves = draw(stored=stored)
    attend(leaves)
    attend([*leaves[:4], leaves[4].float()])
    assert [role.SPLIT for _, role, *_ in launches] == [stored == torch.float32, True]


def test_other_sweeps_have_no_matrices(launches):
    stub_driver.both_passes(stub_driver.leaves(), None, causal=True)
    assert all(given[WEIGHTS] == (False, False) and not role.PROJECT
               for name, role, *_, given in launches if name == "sweep")  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_as_wide_as_features_is_kept(launches, causal):
    out = attend(draw(length=1000), options=("waves", causal, "signed", 1e-6))
    kept = [x for x in out.grad_fn.saved_tensors if x is not None]
    assert all(x.shape[3] <= 64 for x in kept if x.dim() == 4)


@pytest.fixture
def made(monkeypatch):
    """What features are made of, in place of kernels; gradients are the rows and W themselves."""
    found = []

    def features(x, weight, kind):
        found.append((x, weight))
        return projected.by_formula(x, weight, kind)

    def gradients(x, weight, level, grad, kind, learned):
        assert level is None
        assert grad.shape == (*x.shape[:3], WIDTHS[kind])
        return x, weight if learned else None, None

    monkeypatch.setattr(attend_projected, "by_kernel", features)
    monkeypatch.setattr(attend_projected, "gradients", gradients)
    return found


@pytest.mark.parametrize("kind", WIDTHS)
def test_backward_makes_the_features_again(launches, made, kind):
    leaves = draw()
    leaves[4].requires_grad_(False)
    out = attend(leaves, options=(kind, True, "clamp", 1e-6))
    dq, dk, _, of_queries = torch.autograd.grad(out, leaves[:4], torch.ones_like(out))
    for x, weight, (found, used) in zip(leaves[:2], leaves[3:], made, strict=True):
        assert torch.equal(x, found)
        assert torch.equal(weight, used)
    for one, other in ((dq, leaves[0]), (dk, leaves[1]), (of_queries, leaves[3])):
        assert torch.equal(one, other)
    names = [name for name, *_ in launches]
    assert names == ["sweep", "prepare", "sweep", "sweep", "sweep"]
    assert not any(role.PROJECT for _, role, *_ in launches[1:])


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (3,), (4,), (1, 2), (0, 3)], ids=str)
def test_only_what_is_asked_for_is_swept(launches, made, asked):
    leaves = [x.requires_grad_(n in asked) for n, x in enumerate(draw())]
    out = attend(leaves)
    torch.autograd.grad(out, [leaves[n] for n in asked], torch.ones_like(out))
    assert len(launches) == 2 + len({n % 3 for n in asked})  # W of q and k stand 3 behind them


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize(("rule", "causal"), [("none", True), ("clamp", True), ("add", False)])
def test_second_derivatives_are_those_of_the_formula(launches, kind, rule, causal):
    leaves = [x.detach().float().requires_grad_() for x in draw(9)]
    mask = torch.tensor([[True] * 5 + [False] + [True] * 3])
    grad = torch.linspace(-1, 1, 18 * 64).view(1, 2, 9, 64)

    def formula(q, k, v, query_weight, key_weight):
        features = (projected.MAPS[kind].formula(x, w, None)
                    for x, w in ((q, query_weight), (k, key_weight)))  # fmt: skip
        queries, keys = features
        score = (queries @ keys.mT) * mask[:, None, None]
        score = score.tril() if causal else score
        total = score.sum(-1, keepdim=True)
        divisor = {"none": 1.0, "clamp": total.clamp(min=1e-6), "add": total + 1e-6}[rule]
        return score @ v / divisor

    def squares(call):
        found = torch.autograd.grad(call(*leaves), leaves, grad, create_graph=True)
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    ours = squares(lambda *x: attend(x, mask, (kind, causal, rule, 1e-6)))
    for one, other in zip(ours, squares(formula), strict=True):
        one, other = one.detach(), other.detach()
        assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"kind": "waves"}, True), ({"kind": "relu"}, True), ({"kind": "exp"}, False),
     ({"rows": 32}, False), ({"keys": 120}, False), ({"keys": 120, "causal": False}, True),
     ({"there": False}, False), ({"width": 32}, True), ({"width": 128}, False),
     ({"device": "meta"}, False)],
)  # fmt: skip
def test_what_is_attended(launches, monkeypatch, change, expected):
    given = {"kind": "softmaxes", "rows": 64, "causal": True, "there": True} | change
    monkeypatch.setattr(attend_projected, "kernels_serve", lambda x: given["there"])
    q, k, v, *weights = draw(keys=given.get("keys"), width=given.get("width", 64))
    weights = [w[:, : given["rows"]].to(given.get("device", "cpu")) for w in weights]
    assert is_attended(q, k, v, *weights, given["kind"], given["causal"]) == expected


def test_narrow_rows_are_not_attended(launches, monkeypatch):
    monkeypatch.setattr(attend_projected, "kernels_serve", lambda x: True)
    narrow = [x[..., :32] for x in draw()]
    assert not is_attended(*narrow, "softmaxes", True)


def test_subclasses_of_tensors_are_not_attended(launches, monkeypatch):
    monkeypatch.setattr(attend_projected, "kernels_serve", lambda x: True)
    for n in range(5):
        leaves = [x.detach() for x in draw()]
        leaves[n] = leaves[n].as_subclass(type("Other", (torch.Tensor,), {}))
        assert not is_attended(*leaves, "softmaxes", True)


@pytest.fixture
def calls(monkeypatch):
    """What mechanisms give to the kernels, which serve them all."""
    found = []

    def attended(*given):
        found.append(given)
        return given[0]

    monkeypatch.setattr(projecting, "kernels_serve", lambda x: True)
    monkeypatch.setattr(projecting, "is_attended", lambda *given: given[5] in PROJECTIONS)
    monkeypatch.setattr(projecting, "attend_projected", attended)
    return found


@pytest.mark.parametrize(
    ("name", "rule"), [("rfa", "signed"), ("rfa-arccos", "signed"), ("hedgehog", "clamp")]
)
@pytest.mark.parametrize("causal", [True, False])
def test_mechanisms_hand_over_their_matrices(calls, name, rule, causal):
    mechanism, mask = create(name, 2, 64), torch.ones(1, 100, dtype=torch.bool)
    q, k, v = (x.detach() for x in draw()[:3])
    out, _ = mechanism(q, k, v, causal=causal, key_mask=mask)
    (given,) = calls
    assert torch.equal(out, q)
    assert given[5] is mask
    assert given[6:] == (mechanism.projected_map, causal, rule, mechanism.eps)
    for weight, features, x in zip(
        given[3:5], (mechanism.queries, mechanism.keys), (q, k), strict=True
    ):
        made = projected.by_formula(x, weight, mechanism.projected_map)
        assert torch.equal(features(x, 0), made)


def test_what_has_more_than_projections_goes_the_old_way(calls):
    q, k, v = (x.detach() for x in draw()[:3])
    create("rfa-gated", 2, 64)(q, k, v, causal=True, controls={"gate": torch.zeros(1, 2, 100)})
    create("hedgehog", 2, 64)(q, k, v, causal=True, start=3)

    class Turned(Hedgehog):
        def keys(self, k, start):
            return super().keys(-k, start)

    Turned(2, 64)(q, k, v, causal=True)

    class Fading(Hedgehog):
        def weight(self, k, request):
            return {"log_decay": torch.full(k.shape[:3], -1.0)}

    Fading(2, 64)(q, k, v, causal=True)
    assert not calls
