"""Mechanisms that go through PyTorch's attention: always in a shape that it has kernels for."""

from types import SimpleNamespace

import pytest
import torch
from mechanism_cases import make, stream, tokens
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.mechanisms import sdpa
from cosformer.mechanisms.request import Request


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


@pytest.mark.parametrize("rows", [slice(0, 5), slice(5, 17)])
@pytest.mark.parametrize("masked", [False, True])
def test_queries_of_a_rank_see_no_key_of_the_next_one(rows, masked):
    """Two ranks, of which each is asked in turn by this process."""
    softmax = make("softmax")
    q, k, v = (x[:, :, :17] for x in tokens(softmax)[:3])
    mask = torch.arange(17).expand(len(k), -1) != 3
    mine = {"k": k[:, :, rows], "v": v[:, :, rows], "mask": mask[:, rows]}
    every = {id(mine["k"]): k, id(mine["v"]): v, id(mine["mask"]): mask}
    ranks = SimpleNamespace(start=lambda _: rows.start, gather=lambda x, _: every[id(x)])
    request = Request(True, mine["mask"] if masked else None, 0, {})
    out = softmax.attend_split(q[:, :, rows], mine["k"], mine["v"], request, ranks)
    whole, _ = softmax(q, k, v, causal=True, key_mask=mask if masked else None)
    assert_close(out, whole[:, :, rows])
