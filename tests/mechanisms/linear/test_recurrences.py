"""Mechanisms with a memory against their recurrences, token by token in float64, with gradients."""

import pytest
import torch
from mechanism_cases import make, stream, tokens
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils import _pytree as pytree


def recurrence(q, k, v, keep, beta=None):
    """S_t = a_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, or + k_t v_tᵀ without β."""
    state, outs = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=k.dtype), []
    for t in range(k.shape[2]):
        key, value = k[:, :, t, :, None], v[:, :, t, None]
        state = keep[:, :, t, None, None] * state
        if beta is not None:
            share = beta[:, :, t, None, None]
            state = state - share * key @ (key.mT @ state) + share * key @ value
        else:
            state = state + key @ value
        outs.append(q[:, :, t, None] @ state)
    return torch.cat(outs, 2)


def gated_delta(q, k, v, beta, gate=None):
    keep = torch.ones_like(beta) if gate is None else (F.logsigmoid(gate) / 16).exp()
    q, k = F.normalize(q, dim=-1) / q.shape[-1] ** 0.5, F.normalize(k, dim=-1)
    return recurrence(q, k, v, keep, beta.sigmoid())


def gated_linear(q, k, v, gate):
    return recurrence(q / q.shape[-1] ** 0.5, k, v, (F.logsigmoid(gate) / 16).exp())


def retention(q, k, v):
    keep = (1 - 2.0 ** (-5 - torch.arange(k.shape[1], dtype=k.dtype)))[None, :, None]
    return recurrence(q / q.shape[-1] ** 0.5, k, v, keep.expand(k.shape[:3]))


def gated_rfa(mechanism):
    def attend(q, k, v, gate):
        def features(x):
            turned = F.normalize(x, dim=-1) @ (mechanism.scale * mechanism.noise).mT
            return torch.cat([turned.sin(), turned.cos()], -1)

        keep, keys = gate.sigmoid(), features(k) * (1 - gate.sigmoid())[..., None]
        above = recurrence(features(q), keys, v, keep)
        return above / recurrence(features(q), keys, torch.ones_like(v[..., :1]), keep)

    return attend


@pytest.mark.parametrize("length", [1, 7, 8, 150])
@pytest.mark.parametrize("name", ["delta", "gated-delta", "gated-linear", "retention", "rfa-gated"])
def test_the_chunked_form_is_the_recurrence(name, length):
    mechanism = make(name)
    formulas = {
        "delta": lambda q, k, *others: gated_delta(q.relu(), k.relu(), *others),  # its option
        "gated-delta": gated_delta,
        "gated-linear": gated_linear,
        "retention": retention,
        "rfa-gated": gated_rfa(mechanism),
    }
    q, k, v, controls = tokens(mechanism, length, value_width=5)
    leaves = [x.requires_grad_() for x in (q, k, v, *controls.values())]
    out, _ = mechanism(q, k, v, causal=True, controls=controls)
    right = formulas[name](*leaves)
    assert_close(out, right)
    cotangent = torch.randn_like(out)
    mine, theirs = (torch.autograd.grad(x, leaves, cotangent) for x in (out, right))
    assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gated-delta", "gated-linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", [-1e3, -1e6, -1e20, -torch.inf])
def test_what_follows_a_closed_gate_keeps_its_precision(name, dtype, gate):
    mechanism = make(name).to(dtype)
    *rows, controls = tokens(mechanism, 40, value_width=5, dtype=dtype)
    controls["gate"][:, :, [3, 4, 7, 8, 15, 20, 31]] = gate  # neighbours, and chunks' ends
    leaves = [x.requires_grad_() for x in (*rows, *controls.values())]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = {"gated-delta": gated_delta, "gated-linear": gated_linear}[name](*exact)
    cotangent = torch.randn_like(right)
    wanted = torch.autograd.grad(right, exact, cotangent)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    streamed, _ = stream(mechanism, rows, controls, (20, 20))
    for out in (mechanism(*rows, causal=True, controls=controls)[0], streamed):
        assert_close(out.double(), right, **tolerance)
        grads = torch.autograd.grad(out, leaves, cotangent.to(dtype))
        assert_close([x.double() for x in grads], list(wanted), **tolerance)
    dense = mechanism.weights(*rows[:2], causal=True, controls=controls)
    assert_close((dense @ rows[2]).double(), right, **tolerance)


@pytest.mark.parametrize("name", ["delta", "gated-delta", "gated-linear", "retention"])
@pytest.mark.parametrize(("kept", "given"), [("float32", "float64"), ("float64", "float32")])
def test_a_stream_goes_on_in_the_higher_precision(name, kept, given):
    kept, given = getattr(torch, kept), getattr(torch, given)
    mechanism = make(name)
    state = mechanism.empty_state(*tokens(mechanism, 1, dtype=kept)[1:3])
    for dtype in (kept, given):
        before = state
        *rows, controls = tokens(mechanism, 20, dtype=dtype)
        out, state = mechanism(*rows, causal=True, state=before, controls=controls)
        assert out.dtype == dtype
    given_all = [before, rows, controls]
    before, rows, controls = pytree.tree_map_only(torch.Tensor, raised, given_all)
    right, after = mechanism(*rows, causal=True, state=before, controls=controls)
    rounded_gates = given == torch.float32 and "gate" in controls  # each by itself, before any sum
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if rounded_gates else {"rtol": 1e-12, "atol": 1e-12}
    assert_close(out, right.to(given), **tolerance)
    assert_close(state[0], after[0], **tolerance)


def raised(x):
    return x.double() if x.is_floating_point() else x


def test_masked_tokens_leave_a_gated_memory_as_it_is():
    for name in ("rfa-gated", "gated-linear", "delta", "gated-delta"):
        mechanism = make(name)
        q, k, v, controls = tokens(mechanism, 20)
        real = torch.ones(2, 20, dtype=torch.bool)
        real[:, 5:9] = False
        out, _ = mechanism(q, k, v, causal=True, key_mask=real, controls=controls)
        rest = [x[:, :, real[0]] for x in (q, k, v)]
        kept = {key: x[:, :, real[0]] for key, x in controls.items()}
        assert_close(out[:, :, real[0]], mechanism(*rest, causal=True, controls=kept)[0])
