"""Mechanisms that go through PyTorch's attention: always in a shape that it has kernels for."""

import pytest
import torch
from mechanism_cases import make, stream, tokens
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.mechanisms import sdpa


@pytest.mark.parametrize("name", ["softmax", "transnormer-local", "synthesizer-dense"])
@pytest.mark.parametrize("value_width", [3, 11])
def test_values_of_another_width_go_without_stored_scores(name, value_width, monkeypatch):
    """PyTorch stores all scores where widths differ, or are no multiple of 8."""
    widths, real = [], F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        widths.append({x.shape[3] for x in (q, k, v)})
        return real(q, k, v, **options)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", spy)
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, value_width=value_width)
    out, _ = mechanism(q, k, v)
    assert out.shape[3] == value_width
    assert_close(out, mechanism.weights(q, k) @ v)
    assert widths
    assert all(len(found) == 1 and found.pop() % 8 == 0 for found in widths)


@pytest.mark.parametrize("name", ["softmax", "local", "transnormer-local"])
def test_a_stream_goes_on_under_autocast(name):
    mechanism = make(name).float()
    q, k, v, _ = tokens(mechanism, dtype=torch.float32)
    whole, _ = mechanism(q, k, v, causal=True)
    _, state = stream(mechanism, (q, k, v), {}, (30,))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = mechanism(*(x[:, :, 30:] for x in (q, k, v)), causal=True, state=state)
    assert_close(out.float(), whole[:, :, 30:], rtol=0.05, atol=0.05)
