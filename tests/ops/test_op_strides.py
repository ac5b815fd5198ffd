"""Inputs of any strides give the same results and are left as they were."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from formula import IMPLEMENTATIONS, tokens

from cosformer import attention, attention_with_state

LENGTH = 130


def dense(x):
    return x.clone(memory_format=torch.contiguous_format)


def transposed(x):
    """[B, H, T, D] as a view of [B, T, H, D], the layout of a projection."""
    return dense(x.transpose(1, 2)).transpose(1, 2)


def sliced(x):
    """Every second element of larger storage."""
    wide = torch.full([2 * size for size in x.shape], torch.nan, dtype=x.dtype)
    view = wide[::2, 1::2, ::2, 1::2]
    view.copy_(x)
    return view


def column_major(x):
    return dense(x.mT).mT


def batch_last(x):
    return dense(x.permute(1, 2, 3, 0)).permute(3, 0, 1, 2)


def expanded(x):
    return x[:1, :, :1].expand(x.shape)


LAYOUTS = (transposed, sliced, column_major, batch_last, expanded)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
both_ways = pytest.mark.parametrize("causal", [True, False])


def gradients(inputs, cotangent=None, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves, **options)
    cotangent = torch.sin(out.detach()) if cotangent is None else cotangent
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


@every_layout
@every_impl
@both_ways
def test_strides_change_no_result(layout, impl, causal):
    views = [layout(x) for x in tokens(2, 3, LENGTH)]
    right = gradients([dense(x) for x in views], causal=causal, impl=impl)
    for given, wanted in zip(gradients(views, causal=causal, impl=impl), right, strict=True):
        torch.testing.assert_close(given, wanted)


@every_layout
def test_gradients_may_arrive_with_any_strides(layout):
    inputs = tokens(2, 3, LENGTH)
    cotangent = layout(tokens(2, 3, LENGTH, seed=1)[2])
    for causal in (True, False):
        right = gradients(inputs, dense(cotangent), causal=causal)
        for given, wanted in zip(gradients(inputs, cotangent, causal=causal), right, strict=True):
            torch.testing.assert_close(given, wanted)


@every_layout
@every_impl
def test_inputs_are_left_as_they_were(layout, impl):
    views = [layout(x).requires_grad_() for x in tokens(2, 2, LENGTH)]
    mask = torch.rand(2, LENGTH) < 0.5
    before = [dense(x.detach()) for x in (*views, mask)]
    versions = [x._version for x in (*views, mask)]
    out, _ = attention_with_state(*views, horizon=LENGTH, key_mask=mask, impl=impl)
    out.sum().backward()
    attention(*views, key_mask=mask, impl=impl).sum().backward()
    for given, kept, version in zip((*views, mask), before, versions, strict=True):
        assert torch.equal(given, kept)
        assert given._version == version


@pytest.mark.slow
def test_tensor_cores_read_no_narrow_operand_row_by_row():
    """The code that Triton 3.6 and 3.7 make of that reads shared memory out of range (Hopper)."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("narrow_operands_script.py")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
