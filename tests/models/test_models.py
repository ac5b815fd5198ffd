"""Models: padding changes nothing, every parameter learns, shapes and errors are as said."""

import dataclasses
import math

import pytest
import torch
from model_cases import F64, HYBRIDS, OPTIONS, STREAMS, VOCABULARY, config, draw, make, pad
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, create_model, recommended

KINDS = ("decoder", "masked-lm", "classifier", "pairs", "encoder-decoder")
SIDES = ("left", "right", "between")


ENCODERS = [name for name in HYBRIDS if name != "gates"]  # the delta rule is causal
POSSIBLE = [
    *((name, {}) for name in OPTIONS if MECHANISMS[name].traits.causal != "no"),
    *((name, {}) for name in HYBRIDS),
    *((name, {"kind": "masked-lm"}) for name in OPTIONS if MECHANISMS[name].traits.full),
    *((name, {"kind": "masked-lm", "conv": 5 * ("conv" in HYBRIDS[name])}) for name in ENCODERS),
]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "given"), POSSIBLE)
def test_padding_changes_nothing(name, given, side):
    model, tokens = make(name, **given), draw(2, 13)
    padded, mask = pad(tokens, side)
    assert_close(model(padded, mask)[mask].view(2, 13, -1), model(tokens))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pooling", ["mean", "cls", "first"])
def test_padding_changes_nothing_in_a_classifier(pooling, side):
    model, tokens = make(kind="classifier", pooling=pooling), draw(2, 13)
    right = model(tokens)
    assert right.shape == (2, 5)
    assert_close(model(*pad(tokens, side)), right)
    pairs, second = make(kind="pairs", pooling=pooling), draw(2, 7, seed=2)
    (a, a_mask), (b, b_mask) = pad(tokens, side), pad(second, side)
    assert_close(pairs(a, b, a_mask, b_mask), pairs(tokens, second))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["cosformer", "softmax", "spe"])
def test_padding_changes_nothing_in_an_encoder_decoder(name, side):
    model, source, tokens = make(name, kind="encoder-decoder"), draw(2, 9), draw(2, 13, seed=2)
    (a, a_mask), (b, b_mask) = pad(source, side), pad(tokens, side)
    out = model(a, b, a_mask, b_mask)[b_mask].view(2, 13, -1)
    assert_close(out, model(source, tokens))


@pytest.mark.parametrize("side", SIDES)
def test_vectors_stand_where_their_tokens_do_behind_a_cls(side):
    model, tokens = make(kind="classifier", pooling="cls").backbone, draw(2, 13)
    padded, mask = pad(tokens, side)
    whole = torch.cat([torch.ones(2, 1, dtype=torch.bool), mask], 1)
    assert_close(model(padded, mask)[whole].view(2, 14, -1), model(tokens))


def test_a_batch_of_different_lengths_is_each_alone():
    model, tokens = make(kind="classifier"), draw(3, 12)
    mask = torch.arange(12) < torch.tensor([[12], [4], [7]])
    out = model(tokens, mask)
    for row, length in enumerate((12, 4, 7)):
        assert_close(out[row], model(tokens[row : row + 1, :length])[0])
    assert_close(model(tokens, mask & False)[0], model.head(torch.zeros(16, dtype=F64)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "first"])
def test_pooling_reads_what_it_says(pooling):
    model, tokens = make(kind="classifier", pooling=pooling), draw(2, 6)
    x = model.backbone(tokens)
    assert x.shape[1] == 6 + (pooling == "cls")
    vector = {"mean": x.mean(1), "cls": x[:, 0], "first": x[:, 0]}[pooling]
    assert_close(model(tokens), model.head(vector))


def test_the_head_of_pairs_reads_both_their_product_and_their_difference():
    model, first, second = make(kind="pairs"), draw(2, 13), draw(2, 7, seed=2)
    a, b = model.backbone(first).mean(1), model.backbone(second).mean(1)
    assert_close(model(first, second), model.head(torch.cat([a, b, a * b, a - b], -1)))


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rotary"])
def test_positions_are_as_the_config_says(positions):
    """Softmax alone knows no order: without positions, tokens may be swapped."""
    model, tokens = make("softmax", positions=positions, kind="masked-lm"), draw(1, 6)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert tokens[0, 0] != tokens[0, 1]
    same = torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])
    assert same == (positions == "none")


def test_waves_of_a_long_sequence_are_those_of_its_pieces():
    model, tokens = make("cosformer", positions="sinusoidal", max_length=600), draw(2, 600)
    whole, (start, state) = model(tokens), model.stream(tokens[:, :290])
    middle, state = model.stream(tokens[:, 290:599], state)
    end, _ = model.stream(tokens[:, 599:], state)
    assert_close(torch.cat([start, middle, end], 1), whole)


def inputs(kind, tokens):
    return (tokens, tokens.flip(1)) if kind in ("pairs", "encoder-decoder") else (tokens,)


@pytest.mark.parametrize(
    ("name", "kind"), [("softmax", "decoder"), *(("cosformer", kind) for kind in KINDS)]
)
def test_every_parameter_gets_a_gradient(name, kind):
    cls = {"pooling": "cls"} if kind in ("classifier", "pairs") else {}
    given = {"glu": True, "tied": False} if kind == "decoder" else cls
    model = create_model(config(name, kind=kind, **given)).double()
    out = model(*inputs(kind, draw(4, 20)))
    # Random weights, so that no sum of gradients is zero by symmetry (that over a softmax is).
    (out * torch.randn_like(out)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


def test_the_first_loss_is_that_of_guessing():
    torch.manual_seed(0)
    model = create_model(config(layers=8, width=64))
    tokens = draw(8, 40)
    logits = model(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(VOCABULARY)) < 0.1


def test_the_residual_stream_does_not_grow_with_depth():
    spread = {}
    for layers in (2, 16):
        torch.manual_seed(0)
        model = create_model(config(layers=layers, width=64))
        seen = []
        model.backbone.norm.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0]))
        model(draw(4, 40))
        spread[layers] = seen[0].std().item()
    assert 0.5 < spread[16] / spread[2] < 2


def test_tied_models_have_one_table():
    tied, untied = (create_model(config(tied=tied)) for tied in (True, False))
    assert tied.head.weight is tied.backbone.embedding.weight
    assert untied.head.weight is not untied.backbone.embedding.weight
    assert not torch.equal(untied.head.weight, untied.backbone.embedding.weight)
    both = create_model(config(kind="encoder-decoder"))
    assert both.encoder.embedding.weight is both.backbone.embedding.weight is both.head.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "masked"), [("cosformer", False), ("softmax", False), ("softmax", True)]
)
def test_a_decoder_compiles_to_one_graph(name, masked):
    model, tokens = make(name, layers=1), draw(2, 16)
    mask = pad(draw(2, 11), "left")[1] if masked else None
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        out = run(tokens, mask)
        gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        results.append((out, gradients))
    assert_close(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_runs_and_stays_near(kind):
    model, given = make(kind=kind).float(), inputs(kind, draw(2, 20))
    right = model(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(*given)
    assert out.dtype == torch.bfloat16
    assert (out.float() - right).norm() < 0.1 * right.norm()
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_autocast_streams_with_every_mechanism(name):
    """Without a warning: those are errors here."""
    model, tokens = create_model(config(name)), draw(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = model.stream(tokens[:, :7])
        out, state = model.stream(tokens[:, 7:8], state)
        assert out.dtype == model.step(tokens[:, 8:], state)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bigbird", "reformer"])
def test_no_two_layers_draw_the_same(name):
    """As those whose numbers are parameters; a checkpoint has the seeds."""
    given = dataclasses.replace(config(name, kind="masked-lm", layers=3), options={"seed": 5})
    model = create_model(given)
    seeds = [block.attention.mechanism.seed for block in model.backbone.blocks]
    assert seeds == [5, 6, 7]
    other = create_model(dataclasses.replace(given, options={}))
    other.load_state_dict(model.state_dict())
    assert [block.attention.mechanism.seed for block in other.backbone.blocks] == seeds


def test_a_limit_of_cross_attention_is_named_as_such():
    limited = {"max_length": 16, "mechanism": "cosformer-gated", "positions": "auto"}
    decoder = create_model(ModelConfig(kind="encoder-decoder", **limited)).backbone
    assert (decoder.limit, decoder.limited_by) == (16, "cosformer in cross attention")


def test_attention_weights_are_those_that_a_language_model_uses():
    torch.manual_seed(0)
    sizes = {"layers": 1, "width": 16, "heads": 2}
    model = create_model(ModelConfig(**sizes, **recommended("lm"))).eval()
    [[weights]] = model.attention_weights(torch.arange(9)[None])
    assert_close(weights.sum(2), torch.ones(2, 9))
    block = model.backbone.blocks[0]
    x = block.attention_norm(model.backbone.embedding(torch.arange(9)))[None]
    made = block.attention._project(x, None, 0, causal=True)
    out = block.attention._finish(weights[None] @ made.v, block.attention._gated(made.x))
    assert_close(out, block.attention(x, causal=True))


@pytest.mark.parametrize("mechanism", ["cosformer", "softmax", "gated-delta"])
def test_vectors_stand_for_tokens_and_hidden_ones_are_told(mechanism):
    backbone = make(mechanism, layers=3, positions="learned").backbone
    tokens, key_mask = pad(draw(2, 9), "between")
    vectors = backbone.embedding(tokens)
    hidden = []
    out = backbone(vectors, key_mask, hidden=hidden)
    assert torch.equal(out, backbone(tokens, key_mask))
    assert [x.shape for x in hidden] == 4 * [out.shape]
    assert torch.equal(backbone.norm(hidden[-1]), out)
    pieces, state = [], None
    for piece in backbone.embedding(tokens).split((6, 1, 7), 1):
        told = []
        _, state = backbone.stream(piece, state, hidden=told)
        pieces.append(told)
    hidden = []
    backbone(tokens, hidden=hidden)
    for layer, expected in enumerate(hidden):
        found = torch.cat([told[layer] for told in pieces], 1)
        assert_close(found, expected, atol=1e-9, rtol=1e-9)
