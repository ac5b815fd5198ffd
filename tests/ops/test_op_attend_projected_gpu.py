"""Features made inside the sweep on a Hopper GPU, against formulas in float64."""

from typing import NamedTuple

import pytest
import torch
from gpu_marks import ON_HOPPER
from projected_cases import no_worse

from cosformer.mechanisms import create
from cosformer.ops import attend_projected
from cosformer.ops.features import projected
from cosformer.ops.problem.normaliser import denominator

pytestmark = [
    *ON_HOPPER,
    pytest.mark.usefixtures("poisoned"),
]
SLACK = 1e-3
"""Of the norm, as for stored features."""
KINDS = {"waves": "signed", "softmaxes": "clamp", "relu": "signed"}


class Case(NamedTuple):
    kind: str
    length: int = 300
    causal: bool = True
    keys: int | None = None
    width: int = 64  # of v
    weights: int | None = 4  # None: one W for all heads
    stored: torch.dtype = torch.float32
    spread: float = 1.0  # of angles and exponents
    masked: bool = False
    rule: str = ""
    turned: bool = False  # in memory tokens come before heads

    def draw(self, batch=2, heads=4):
        """q, k, v and both W, rounded; a mask; a gradient."""
        generator = torch.Generator().manual_seed(5)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).cuda()

        keys, dtype = self.keys or self.length, torch.bfloat16
        rows = ((self.length, 64), (keys, 64), (keys, self.width))
        q, k, v = (normal(batch, heads, *size).to(dtype) for size in rows)
        if self.turned:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        mask = None
        if self.masked:
            mask = torch.rand(batch, keys, generator=generator).cuda() < 0.7
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        count = () if self.weights is None else (self.weights,)
        scale = self.spread * (64**-0.5 if self.kind == "softmaxes" else 1)
        weights = [(scale * normal(*count, 64, 64)).to(self.stored) for _ in range(2)]
        grad = normal(batch, heads, self.length, self.width).to(dtype)
        return [q, k, v, *weights], mask, grad

    def fused(self, q, k, v, query_weight, key_weight, mask):
        about = (mask, self.kind, self.causal, self.rule or KINDS[self.kind], 1e-6)
        return attend_projected.attend_projected(q, k, v, query_weight, key_weight, *about)

    def plain(self, q, k, v, query_weight, key_weight, mask):
        """The quadratic formula in the dtype of its inputs."""
        rule = self.rule or KINDS[self.kind]
        pairs = ((q, query_weight), (k, key_weight))
        queries, keys = (projected.by_formula(x, w, self.kind) for x, w in pairs)
        score = queries @ keys.mT
        if mask is not None:
            score = score * mask[:, None, None]
        score = score.tril() if self.causal else score
        if rule == "none":
            return score @ v
        return score @ v / denominator(score.sum(-1, keepdim=True), rule, 1e-6)


def results(call, leaves, mask, grad):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = call(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def check(case):
    leaves, mask, grad = case.draw()
    right = results(case.plain, [x.double() for x in leaves], mask, grad)
    found = results(case.fused, leaves, mask, grad)
    no_worse(found, results(case.plain, leaves, mask, grad), right, SLACK)
    for one, other in zip(results(case.fused, leaves, mask, grad), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 63, 64, 1000])
def test_outputs_and_gradients_are_those_of_the_formula(kind, causal, length):
    alone = "none" if length == 1 else ""  # divided by itself, nothing is left but roundings
    check(Case(kind, length, causal, rule=alone))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_every_way_to_cut(kind, causal, masked, segments):
    check(Case(kind, 700, causal, masked=masked))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"weights": None},
        {"weights": 2},
        {"stored": torch.bfloat16},
        {"stored": torch.bfloat16, "causal": False},
        {"width": 8},
        {"width": 40, "causal": False, "keys": 100},
        {"rule": "none"},
        {"rule": "none", "causal": False},
        {"rule": "add"},
        {"turned": True},
        {"turned": True, "causal": False},
    ],
    ids=str,
)
def test_every_shape_and_rule(kind, change):
    check(Case(kind, **change))


@pytest.mark.parametrize("spread", [0.01, 8.0, 64.0])
def test_exponents_near_and_far(spread):
    check(Case("softmaxes", spread=spread))


def test_the_largest_exponent_is_0_however_large():
    leaves, mask, _ = (case := Case("softmaxes")).draw()
    q, k, *others = leaves
    with torch.no_grad():
        assert case.fused(3e9 * q, 3e9 * k, *others, mask).isfinite().all()


@pytest.mark.parametrize("spread", [0.1, 4.0, 100.0])
def test_angles_near_and_far(spread):
    """Undivided: sums of many waves cancel, and quotients would measure that alone."""
    leaves, mask, grad = (case := Case("waves", spread=spread, rule="none")).draw()
    found, plain, right = (
        [results(call, [x.to(dtype) if dtype else x for x in leaves], mask, grad)[0]]
        for call, dtype in ((case.fused, None), (case.plain, None), (case.plain, torch.float64))
    )
    no_worse(found, plain, right, SLACK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_masked_keys_may_hold_anything(kind, causal):
    case = Case(kind, causal=causal, masked=True)
    leaves, mask, _ = case.draw()
    hidden = ~mask[:, None, :, None]
    q, k, v, *weights = leaves
    poison = (x.masked_fill(hidden, torch.nan) for x in (k, v))
    with torch.no_grad():
        expected = case.fused(*leaves, mask)
        assert torch.equal(case.fused(q, *poison, *weights, mask), expected)


@pytest.mark.parametrize("name", ["rfa", "rfa-arccos", "hedgehog"])
def test_mechanisms_go_this_way_and_agree_with_stored_features(name, monkeypatch):
    calls, fused = [], attend_projected.hopper.forward
    monkeypatch.setattr(
        attend_projected.hopper, "forward", lambda *given: (calls.append(given), fused(*given))[1]
    )
    mechanism = create(name, heads=4, width=64).cuda()
    leaves, mask, grad = Case("waves", masked=True).draw()

    def attend(q, k, v, mask):
        return mechanism(q, k, v, causal=True, key_mask=mask)[0]

    found = results(attend, leaves[:3], mask, grad)
    assert len(calls) == 1
    assert calls[0][-1].kind == mechanism.projected_map
    monkeypatch.setattr("cosformer.mechanisms.linear.projecting.is_attended", lambda *given: False)
    for one, other in zip(found, results(attend, leaves[:3], mask, grad), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_second_derivatives():
    case = Case("softmaxes", 40)
    leaves, mask, grad = case.draw()

    def squares(call, leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = call(*leaves, mask)
        found = torch.autograd.grad(out, leaves, grad.to(out.dtype), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in found), leaves)

    right = squares(case.plain, [x.double() for x in leaves])
    no_worse(list(squares(case.fused, leaves)), list(squares(case.plain, leaves)), right, 0.02)
