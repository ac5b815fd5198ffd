"""Compiled blocks, and blocks that are computed again: the same numbers, for less."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from training_cases import config

from cosformer.models import ModelConfig, create_model, token_loss
from cosformer.training import Trainer, train
from cosformer.training.learner import Compiled

MECHANISMS = ["cosformer-gated", "cosformer-gated softmax", "softmax"]


def make(mechanism="cosformer", **changes):
    torch.manual_seed(0)
    given = {"layers": 4, "width": 16, "heads": 2, "mechanism": mechanism, "positions": "auto"}
    return create_model(ModelConfig(**given | changes)).double()


def gradients(model):
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # of dropout
    loss = model.summed_loss(tokens[:, :-1], tokens[:, 1:])
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


@pytest.fixture
def graphs(monkeypatch):
    """Of torch.compile, counted."""
    torch.compiler.reset()
    counter, compile = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda what: compile(what, backend=counter))
    return counter


@pytest.mark.slow
@pytest.mark.parametrize("most", [2**24, 256 * 10])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_blocks_that_are_alike_are_compiled_once_and_the_loss_too(
    mechanism, most, graphs, monkeypatch
):
    monkeypatch.setattr(token_loss, "MOST_LOGITS", {"cpu": most})
    model = make(mechanism, conv=4)
    right, compiled = gradients(model), Compiled(model)
    for recompute in (False, True):
        model.backbone.recompute = recompute
        with compiled:
            assert_close(gradients(model), right)
    assert graphs.frame_count == len(set(mechanism.split())) + 1
    assert_close(gradients(model), right)
    assert model.backbone.calls is None
    assert model.token_loss == token_loss.TokenLoss()


@pytest.mark.slow
def test_backward_passes_of_compiled_blocks_are_not_rounded_by_autocast(graphs):
    model = make("longformer", layers=1, kind="masked-lm").float()
    compiled = Compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        right = gradients(model)
        with compiled:
            assert_close(gradients(model), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_blocks_that_compute_again_keep_little_and_have_the_same_gradients(dropout):
    model, kept = make(dropout=dropout), []
    for recompute in (False, True):
        model.backbone.recompute, sizes = recompute, []
        with saved_tensors_hooks(
            lambda x, sizes=sizes: (sizes.append(x.numel()), x)[1], lambda x: x
        ):
            kept.append(gradients(model))
        kept.append(sum(sizes))
    right, usual, found, little = kept
    assert_close(found, right)
    assert 2 * little < usual


def test_a_compiled_block_keeps_17_numbers_of_16_bits_for_each_column_of_x():
    """x 2, its norm 1, q, k, v 3, out 1, its projection 1, the norm 1, both sides of gelu 8.

    With softmax, which is one operator here, as cosFormer is on a GPU.
    """
    torch.compiler.reset()
    length, width, kept = 1009, 64, {}
    model = create_model(ModelConfig(layers=1, width=width, heads=1, mechanism="softmax"))
    block = torch.compile(model.backbone.blocks[0], backend="aot_eager_decomp_partition")

    def keep(x):
        if x.numel() % length == 0:  # no weight
            kept[x.data_ptr()] = x.numel() * x.itemsize
        return x

    x = torch.randn(1, length, width, requires_grad=True)
    with saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        block(x, causal=True)
    assert 17 <= sum(kept.values()) / (2 * length * width) < 17.5


@pytest.mark.slow
def test_a_run_may_go_on_compiled_or_computing_again(tmp_path, graphs):
    """Nothing is compiled on a CPU unless that is asked for."""
    given = {"model": {"layers": 1, "width": 16, "heads": 2}}
    whole = train(config(tmp_path / "whole", **given)).place.metrics["loss"]
    assert graphs.frame_count == 0
    out = tmp_path / "parts"
    stopped = Trainer(config(out, **given)).events()
    list(itertools.islice(stopped, 3))
    stopped.close()
    again = train(config(out, compile=True, recompute=True, **given))
    assert graphs.frame_count > 0
    assert again.place.metrics["loss"] == pytest.approx(whole, rel=1e-4)
