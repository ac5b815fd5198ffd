"""The checks that come before any timing pass for the op, and fail for one slightly wrong."""

import dataclasses

import pytest
import torch

from cosformer import attention
from cosformer.bench import checks
from cosformer.bench.candidates import CANDIDATES


def _cosformer(x, **changes):
    return attention(x.q, x.k, x.v, **{"causal": x.causal, **changes})


BROKEN = {
    "one part in a thousand": lambda x: 1.001 * _cosformer(x),
    "other horizon": lambda x: _cosformer(x, horizon=1000),
    "other causality": lambda x: _cosformer(x, causal=not x.causal),
    "not a number": lambda x: torch.nan * _cosformer(x),
    "gradient lost": lambda x: 0 * x.q + _cosformer(x._replace(q=x.q.detach())),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["chunked", "decay", "gates"])
def test_the_op_passes(name, causal, dtype):
    found = checks.against_formula(CANDIDATES[name], causal=causal, dtype=dtype)
    gates = ["dgates"] if name == "gates" else []
    assert [check.name for check in found] == ["output", "dq", "dk", "dv", *gates]
    assert all(check.passed for check in found), [str(check) for check in found]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_op_fails(broken, causal):
    candidate = dataclasses.replace(CANDIDATES["chunked"], attend=broken)
    found = checks.against_formula(candidate, causal=causal, dtype=torch.float32)
    assert not all(check.passed for check in found)


def test_decays_are_checked_against_a_formula_with_decays():
    forgets = dataclasses.replace(CANDIDATES["decay"], attend=CANDIDATES["chunked"].attend)
    found = checks.against_formula(forgets, causal=True, dtype=torch.float32)
    assert not any(check.passed for check in found)


def test_a_stream_passes_unless_it_forgets_a_token(monkeypatch):
    check, step = checks.stream_against_full_pass(), checks.step
    assert check.passed, str(check)

    def forgetful(q, k, v, state):
        forget = int(state.position) == 100
        return step(q, torch.zeros_like(k) if forget else k, v, state)

    monkeypatch.setattr(checks, "step", forgetful)
    assert not checks.stream_against_full_pass().passed
