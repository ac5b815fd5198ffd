"""Compiled steps on a GPU, recorded or not: the loss of 300 steps is that of float32."""

import pytest
import torch
from training_cases import log

from cosformer.models import recommended
from cosformer.training import Budget, Evaluation, RunConfig, TaskConfig, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 300


def curve(out, mechanism, length=256, steps=STEPS, **given):
    """The loss of every ten steps."""
    model = {"layers": 2, "width": 64, "heads": 2, **recommended("lm", mechanism)}
    train(
        RunConfig(
            TaskConfig("lm", {"text": "python", "length": length}),
            out,
            model=model,
            budget=Budget(steps=steps, batch=8),
            evaluation=Evaluation(every=steps, batches=1),
            device="cuda",
            **given,
        )
    )
    return torch.tensor([row["loss"] for row in log(out) if "loss" in row], dtype=torch.float64)


@pytest.mark.parametrize("mechanism", ["cosformer-gated", "cosformer-gated softmax", "softmax"])
def test_the_loss_of_compiled_steps_is_that_of_float32_up_to_rounding(mechanism, tmp_path):
    exact = curve(tmp_path / "exact", mechanism, compile=False)
    usual = curve(tmp_path / "usual", mechanism, compile=False, precision="bfloat16")
    allowed = max(2 * (usual - exact).abs().mean(), 0.005 * exact.mean())  # errors grow by chance
    assert exact[-1] < 0.7 * exact[0]
    for graph in (False, True):
        found = curve(tmp_path / f"{graph}", mechanism, precision="bfloat16", graph=graph)
        assert (found - exact).abs().mean() <= allowed
        assert not torch.equal(found, usual)  # it was compiled, unasked


def test_long_gates_are_compiled(tmp_path):
    """Of such rows inductor's own running sums fail (PyTorch 2.11)."""
    given = {"length": 16_384, "steps": 20, "precision": "bfloat16"}
    usual, found = (
        curve(tmp_path / f"{compile}", "cosformer-gated", compile=compile, **given)
        for compile in (False, True)
    )
    torch.testing.assert_close(found, usual, rtol=0.02, atol=0)
