"""Peers get what they would compute by themselves: layouts, features, backends."""

import sys
from types import SimpleNamespace

import pytest
import torch

from cosformer import attention, linear_attention
from cosformer.bench import peers
from cosformer.bench.candidates import CANDIDATES, draw, token_major
from cosformer.bench.fla import PEERS
from cosformer.mechanisms import create


def _chunk(q, k, v, *, scale, normalize):
    """What fla computes, on its layout `[B, T, H, D]`."""
    assert scale == 1.0
    assert all(x.is_contiguous() for x in (q, k, v))
    rule = "sum" if normalize else "none"
    inputs = (x.transpose(1, 2) for x in (q, k, v))
    return linear_attention(*inputs, causal=True, normaliser=rule).transpose(1, 2), None


@pytest.fixture
def fla(monkeypatch):
    module = SimpleNamespace(chunk_linear_attn=_chunk, fused_chunk_linear_attn=_chunk)
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", module)
    monkeypatch.setattr(peers, "_compiled_features", lambda: peers.features)


def test_cosformer_on_fla_is_cosformer(fla):
    q, k, v = token_major(draw((2, 3, 37, 8), 3, dtype=torch.float32))
    found = CANDIDATES["fla_cos"].attend(q, k, v, causal=True)
    torch.testing.assert_close(found, attention(q, k, v, causal=True, impl="reference"))


@pytest.mark.parametrize("name", ["fla_linear", "fla_fused"])
def test_linear_attention_of_fla_has_neither_cosine_nor_denominator(name, fla):
    q, k, v = token_major(draw((2, 3, 37, 8), 3, dtype=torch.float64))
    expected = (q @ k.mT).tril() @ v
    torch.testing.assert_close(CANDIDATES[name].attend(q, k, v, causal=True), expected)


def test_features_are_rounded_once():
    (x,) = draw((2, 37, 3, 8), 1, dtype=torch.bfloat16)
    table = peers.cosine_table(37, x.device)
    exact = peers.features(x.double(), table.double())
    assert torch.equal(peers.features(x, table), exact.bfloat16())


@pytest.mark.parametrize("causal", [True, False])
def test_a_backend_that_is_named_computes_softmax(causal):
    q, k, v = draw((1, 2, 9, 8), 3, dtype=torch.float32)
    found = peers.softmax_by(q, k, v, causal=causal, backend=torch.nn.attention.SDPBackend.MATH)
    torch.testing.assert_close(found, peers.softmax(q, k, v, causal=causal))


def test_candidates_of_a_gpu_alone_are_marked_and_packages_may_be_missing():
    alone = [name for name, c in CANDIDATES.items() if c.devices == ("cuda",)]
    theirs = ["fla_cos", "fla_linear", "fla_fused"]
    assert alone == ["auto", "sdpa_flash", "sdpa_cudnn", *theirs]
    assert {name for name, c in CANDIDATES.items() if not c.is_present} <= set(theirs)


def _recurrent(q, k, v, *, g=None, beta=None, use_qk_l2norm_in_kernel=False):
    """What fla's functions compute, a token at a time on `[B, T, H, D]`."""
    batch, length, heads, width = q.shape
    if use_qk_l2norm_in_kernel:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    if g is None and beta is None:  # retention
        g = torch.log(1 - 2.0 ** (-5 - torch.arange(heads))).to(q.dtype).expand(batch, length, -1)
    memory, outs = q.new_zeros(batch, heads, width, v.shape[-1]), []
    for t in range(length):
        if g is not None:
            memory = memory * g[:, t, :, None, None].exp()
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - (k[:, t, :, None] @ memory)[:, :, 0])
        memory = memory + k[:, t, :, :, None] * new[:, :, None]
        outs.append((q[:, t, :, None] @ memory)[:, :, 0] / width**0.5)
    return torch.stack(outs, 1), None


@pytest.mark.parametrize("name", PEERS)
def test_peers_of_mechanisms_get_the_same_numbers(name, monkeypatch):
    place, _, function = PEERS[name].function.rpartition(".")
    module = SimpleNamespace(**{function: _recurrent})
    monkeypatch.setitem(sys.modules, f"fla.ops.{place}", module)
    theirs, ours = PEERS[name](3, 8), create(name.removeprefix("fla-"), 3, 8)
    q, k, v, other = draw((2, 3, 37, 8), 4, dtype=torch.float64)
    controls = {control: other[..., n] for n, control in enumerate(ours.traits.controls)}
    found, right = (x(q, k, v, causal=True, controls=controls)[0] for x in (theirs, ours))
    torch.testing.assert_close(found, right)
