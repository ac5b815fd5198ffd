"""Layers and models over many ranks: exact, and refused by name where they cannot be."""

import copy

import pytest
import torch
from model_checks import CHECKS
from ranks import alternating, failures
from torch import nn

import cosformer
from cosformer import distributed
from cosformer.distributed import exchange
from cosformer.models import ModelConfig, Sampling, create_model, generate_tokens, recommended
from cosformer.nn import AttentionLayer


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_output_and_gradients_are_those_of_one_process(ranks):
    assert failures(alternating(CHECKS, ranks), ranks) == {}


@pytest.mark.parametrize("length", [8, 256])
def test_what_travels_through_a_model_does_not_grow_with_the_length(group, sent, length):
    fields = {"layers": 3, "width": 16, "heads": 2} | recommended("recall", "cosformer-gated")
    found = distributed.split(create_model(ModelConfig(**fields)))
    found(torch.zeros(1, length, dtype=torch.long)).sum().backward()
    header, float32 = 8, 4
    inputs = header + header + float32 * 3 * (3 * 16)  # of q, k and v for a convolution of 4
    state = header + 2 * header + float32 * 2 * 2 * 8 * (8 + 1)
    assert sorted(sent) == sorted([inputs, state] * 2 * 3)  # forward and back, of three layers


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mechanism", ["cosformer", "cosformer-multiscale", "cosformer-gated"])
def test_queries_and_gate_are_made_while_messages_travel(group, note, mechanism, causal):
    """Forward and back, in the precision of the layer."""
    layer = AttentionLayer(16, 4, mechanism=mechanism, gate=True, qk_norm=True)
    x, seen = torch.randn(2, 24, 16), note.seen
    with torch.autocast("cpu", torch.bfloat16):
        wanted = layer(x, causal=causal)
    distributed.split(layer)
    note(exchange, "_all_gather", "sent")
    note(exchange._Told, "wait", "waited")
    note(exchange._Summing, "begin", "sent")
    note(exchange._Summing, "wait", "waited")
    note(layer, "project_queries", "queries", torch.bfloat16)
    note(layer.gate, "forward", "gate", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, causal=causal)
    torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)
    assert seen == ["sent", "gate", "queries", "waited"]
    seen.clear()
    out.sum().backward()
    assert (seen[0], *sorted(seen[1:-1]), seen[-1]) == ("sent", "gate", "queries", "waited")


class Flipped:
    def attend_split(self, q, k, v, request, split):
        return super().attend_split(-q, k, v, request, split)


@pytest.mark.parametrize("name", ["cosformer", "relu"])
def test_a_mechanism_that_changes_queries_over_ranks_gets_them(group, name):
    layer, x = AttentionLayer(16, 4, mechanism=name), torch.randn(2, 24, 16)
    plain = type(layer.mechanism)
    layer.mechanism.__class__ = type("Mine", (Flipped, plain), {})
    found = distributed.split(layer)(x, causal=True)
    distributed.unsplit(layer).mechanism.__class__ = plain
    with torch.no_grad():
        layer.in_proj_weight[:16].neg_()
        layer.in_proj_bias[:16].neg_()
    torch.testing.assert_close(found, layer(x, causal=True))


def test_a_prompt_over_ranks_is_no_beginning_of_a_stream(group):
    model = create_model(ModelConfig(layers=1, width=16, heads=2))
    tokens = torch.zeros(1, 5, dtype=torch.long)
    wanted, _ = model.eval().stream(tokens)
    distributed.split(model)
    with pytest.raises(ValueError, match=r"a stream needs whole sequences, got a layer"):
        model.stream(tokens)
    with pytest.raises(ValueError, match=r"a stream needs whole .*cosformer.distributed.unsplit"):
        next(generate_tokens(model, [0], Sampling(max_new_tokens=1)))
    found, _ = distributed.unsplit(model).stream(tokens)
    assert torch.equal(found, wanted)


def test_a_rank_has_as_many_tokens_as_it_was_said_to_have(group):
    model = create_model(ModelConfig(layers=1, width=16, heads=2))
    distributed.split(model, lengths=[7])
    with pytest.raises(ValueError, match=r"lengths\[0\] must be the tokens of this rank, 5, got 7"):
        model(torch.zeros(1, 5, dtype=torch.long))


def test_a_copy_of_a_split_model_is_split(group):
    layer = copy.deepcopy(distributed.split(AttentionLayer(16, 4)))
    assert layer.split is not None
    assert distributed.unsplit(layer).split is None


def test_the_horizon_is_that_of_all_ranks(group):
    layer = distributed.split(AttentionLayer(16, 4, options={"horizon": 8}))
    assert layer(torch.randn(1, 8, 16)).shape == (1, 8, 16)
    with pytest.raises(ValueError, match="cannot attend over 9 tokens"):
        layer(torch.randn(1, 9, 16))


def model(**fields):
    return create_model(ModelConfig(layers=1, width=16, heads=2, **fields))


def converted():
    found = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    cosformer.convert(found, horizon=64)
    return found


REFUSED = {
    "model must have an AttentionLayer, got Linear": lambda: nn.Linear(2, 2),
    "model must have an AttentionLayer, got TransformerEncoderLayer": converted,
    "model must have no attention but AttentionLayer to be split, got CosformerAttention at '1": (
        lambda: nn.Sequential(AttentionLayer(16, 4), converted())
    ),
    "model must have no cls token to be split": lambda: model(
        kind="classifier", classes=2, pooling="cls"
    ),
    "model must have no cross attention to be split": lambda: model(kind="encoder-decoder"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_split_is_refused_before_it_is_called(group, message):
    made = REFUSED[message]()
    with pytest.raises(ValueError, match=f"^{message}"):
        distributed.split(made)
    assert all(getattr(part, "split", None) is None for part in made.modules())


def test_one_vector_of_a_whole_sequence_is_refused(group):
    classifier = distributed.split(model(kind="classifier", classes=2, pooling="mean"))
    with pytest.raises(ValueError, match="must have an output for each token"):
        classifier(torch.zeros(1, 4, dtype=torch.long))


def test_a_layer_over_ranks_has_neither_a_context_nor_weights(group):
    for call in (distributed.split, distributed.unsplit):
        with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
            call(3)
    layer, x = distributed.split(AttentionLayer(16, 4)), torch.randn(1, 4, 16)
    with pytest.raises(ValueError, match=r"context must be None .*, got \[1, 3, 16\]"):
        layer(x, x[:, :3])
    with pytest.raises(ValueError, match="weights need whole sequences, got a layer that is split"):
        layer.weights(x)
