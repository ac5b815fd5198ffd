"""Peers get what they would compute by themselves: layouts, features, backends."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from cosformer import linear_attention
from cosformer.bench import peers
from cosformer.bench.candidates import CANDIDATES
from cosformer.bench.fla import PEERS
from cosformer.bench.inputs import draw, draw_inputs
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


def _found(name, inputs):
    """What a candidate computes of inputs in its layout."""
    return CANDIDATES[name].attend(CANDIDATES[name].prepare(inputs))


def test_cosformer_on_fla_is_cosformer(fla):
    inputs = draw_inputs((2, 3, 37, 8), causal=True, dtype=torch.float32)
    torch.testing.assert_close(_found("fla_cos", inputs), CANDIDATES["fla_cos"].formula(inputs))


@pytest.mark.parametrize("name", ["fla_linear", "fla_fused"])
def test_linear_attention_of_fla_has_neither_cosine_nor_denominator(name, fla):
    inputs = draw_inputs((2, 3, 37, 8), causal=True, dtype=torch.float64)
    expected = (inputs.q @ inputs.k.mT).tril() @ inputs.v
    torch.testing.assert_close(_found(name, inputs), expected)


def test_features_are_rounded_once():
    (x,) = draw((2, 37, 3, 8), 1, dtype=torch.bfloat16)
    table = peers.cosine_table(37, x.device)
    exact = peers.features(x.double(), table.double())
    assert torch.equal(peers.features(x, table), exact.bfloat16())


@pytest.mark.parametrize("causal", [True, False])
def test_a_backend_that_is_named_computes_softmax(causal):
    inputs = draw_inputs((1, 4, 9, 8), causal=causal, dtype=torch.float32, key_heads=2)
    found = peers.softmax_by(inputs, backend=torch.nn.attention.SDPBackend.MATH)
    torch.testing.assert_close(found, peers.softmax(inputs))


def _recurrent(q, k, v, *, g=None, beta=None, scale=None, use_qk_l2norm_in_kernel=False):
    """What fla's functions compute, a token at a time on `[B, T, H, D]`."""
    batch, length, heads, width = q.shape
    if use_qk_l2norm_in_kernel:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    if g is None and beta is None:  # retention
        g = torch.log(1 - 2.0 ** (-5 - torch.arange(heads))).to(q.dtype).expand(batch, length, -1)
    memory, outs = q.new_zeros(batch, heads, width, v.shape[-1]), []
    for t in range(length):
        if g is not None:
            gate = g[:, t] if g.dim() == 4 else g[:, t, :, None]  # [B, H, D] or [B, H, 1]
            memory = memory * gate[..., None].exp()
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - (k[:, t, :, None] @ memory)[:, :, 0])
        memory = memory + k[:, t, :, :, None] * new[:, :, None]
        outs.append((q[:, t, :, None] @ memory)[:, :, 0] * (scale or width**-0.5))
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


def _decayed(inputs, log_decay):
    """Linear attention with a decay per token `[B, H, T]`, by its matrix of weights."""
    groups = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (inputs.k, inputs.v))
    total = log_decay.repeat_interleave(inputs.q.shape[1] // log_decay.shape[1], dim=1).cumsum(-1)
    weights = (total[..., :, None] - total[..., None, :]).exp().tril()
    return (inputs.q @ k.mT * weights) @ v


@pytest.mark.parametrize("name", ["fla_retention", "fla_simple_gla", "fla_gla"])
def test_peers_with_a_decay_get_our_gates_for_every_query_head(name, monkeypatch):
    places = {"fla_retention": "retention", "fla_simple_gla": "simple_gla", "fla_gla": "gla"}
    module = SimpleNamespace(**{f"chunk_{places[name]}": _recurrent})
    monkeypatch.setitem(sys.modules, f"fla.ops.{places[name]}", module)
    inputs = draw_inputs((2, 4, 37, 8), causal=True, dtype=torch.float64, key_heads=2)
    inputs = inputs._replace(gates=inputs.gates.double())
    gates = inputs.gates
    if name == "fla_retention":  # it has decays of its own
        rates = torch.log(1 - 2.0 ** (-5 - torch.arange(4))).double()
        gates = rates[None, :, None].expand(2, 4, 37)
    torch.testing.assert_close(_found(name, inputs), _decayed(inputs, gates))


def test_peers_are_told_where_packed_sequences_end(monkeypatch):
    look = Mock(return_value=(torch.zeros(1, 12, 2, 8), None))
    module = SimpleNamespace(chunk_retention=look)
    monkeypatch.setitem(sys.modules, "fla.ops.retention", module)
    shape = (1, 2, 12, 8)
    inputs = draw_inputs(shape, causal=True, dtype=torch.float32, lengths=(5, 7))
    _found("fla_retention", inputs)
    assert look.call_args.kwargs["cu_seqlens"].tolist() == [0, 5, 12]
