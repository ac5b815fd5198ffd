"""The checks that come before any timing pass for the op, and fail for one slightly wrong."""

import functools

import pytest
import torch

from cosformer import attention
from cosformer.bench import checks

BROKEN = {
    "one part in a thousand": lambda q, k, v, causal: 1.001 * attention(q, k, v, causal=causal),
    "other horizon": lambda q, k, v, causal: attention(q, k, v, causal=causal, horizon=1000),
    "other causality": lambda q, k, v, causal: attention(q, k, v, causal=not causal),
    "not a number": lambda q, k, v, causal: torch.nan * attention(q, k, v, causal=causal),
    "gradient lost": lambda q, k, v, causal: 0 * q + attention(q.detach(), k, v, causal=causal),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_op_passes(causal, dtype):
    chunked = functools.partial(attention, impl="chunked")
    found = checks.against_formula(chunked, causal=causal, dtype=dtype)
    assert [check.name for check in found] == list(checks.QUANTITIES)
    assert all(check.passed for check in found), [str(check) for check in found]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_op_fails(broken, causal):
    found = checks.against_formula(broken, causal=causal, dtype=torch.float32)
    assert not all(check.passed for check in found)


def test_a_stream_passes_unless_it_forgets_a_token(monkeypatch):
    check, step = checks.stream_against_full_pass(), checks.step
    assert check.passed, str(check)

    def forgetful(q, k, v, state):
        forget = int(state.position) == 100
        return step(q, torch.zeros_like(k) if forget else k, v, state)

    monkeypatch.setattr(checks, "step", forgetful)
    assert not checks.stream_against_full_pass().passed
