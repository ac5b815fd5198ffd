"""Inputs of any strides give the same results and are left as they were."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from formula import IMPLEMENTATIONS, results, tokens
from layouts import batch_last, dense, expanded, heads_inside, in_columns, sliced

from cosformer import State, attention, step

LENGTH = 130
LAYOUTS = (heads_inside, sliced, in_columns, batch_last, expanded)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)


@every_layout
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("which", [(0, 1, 2), (0,), (1,), (2,), ()], ids=str)
def test_strides_of_inputs_and_gradients_change_no_result(layout, impl, causal, which):
    """Those of q, k and v alike, of one of them, or of the gradient alone."""
    inputs = list(tokens(2, 4, LENGTH, kv_heads=2))
    for n in which:
        inputs[n] = layout(inputs[n])
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    before = [dense(x) for x in inputs]
    versions = [x._version for x in inputs]
    layout = torch.clone if which else layout

    def call(*x):
        return attention(*x, causal=causal, key_mask=mask, impl=impl)

    found = results(call, inputs, layout)
    for given, wanted in zip(found, results(call, before, lambda x: dense(layout(x))), strict=True):
        torch.testing.assert_close(given, wanted)
    assert all(map(torch.equal, inputs, before))
    assert versions == [x._version for x in inputs]


@every_layout
def test_a_step_takes_any_strides(layout):
    views = [layout(x) for x in tokens(2, 3, 1)]
    states = [State.empty(2, 3, 4, 4, horizon=9, dtype=torch.float64) for _ in range(2)]
    given = step(*views, states[0])
    torch.testing.assert_close(given, step(*(dense(x) for x in views), states[1]))


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
