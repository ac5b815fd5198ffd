"""AttentionLayer: the same layer around every mechanism; pieces and steps are the full pass."""

import math

import pytest
import torch
from layer_formula import F64
from layer_formula import draw as tokens
from streaming import in_pieces
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from cosformer.mechanisms import MECHANISMS
from cosformer.nn import AttentionLayer, sinusoids_from

OPTIONS = {"cosformer": {"horizon": 64}, "sparse-strided": {"stride": 4}}
STREAMS = [name for name, kind in MECHANISMS.items() if kind.traits.state != "none"]
KINDS = ["cosformer", "linear", "gated-delta", "retention", "spe", "softmax", "local"]
"""Mechanisms that differ in state, positions, controls or norm; the contract runs over all."""
POSITIONS = ["none", "learned", "sinusoidal", "rotary", "spe"]


def make(name="softmax", embed_dim=16, heads=4, **arguments):
    torch.manual_seed(0)
    options = {**OPTIONS.get(name, {}), **arguments.pop("options", {})}
    if arguments.get("positions") == "learned":
        arguments.setdefault("max_length", 40)
    layer = AttentionLayer(
        embed_dim, heads, mechanism=name, options=options, dtype=F64, **arguments
    )
    return layer.eval()


@pytest.mark.parametrize(("causal", "width"), [(True, None), (False, None), (False, 10)])
def test_with_softmax_it_is_pytorchs_own_layer(causal, width):
    layer = make(context_dim=width)
    theirs = nn.MultiheadAttention(16, 4, kdim=width, vdim=width, batch_first=True, dtype=F64)
    theirs.load_state_dict(layer.state_dict())
    x, real = tokens(2, 11, 16), tokens(2, 11, seed=3) > -1
    real[:, 0] = True  # softmax over nothing is no number
    context = x if width is None else tokens(2, 11, width, seed=2)
    mask = torch.ones(11, 11, dtype=torch.bool).triu(1) if causal else None
    right, _ = theirs(x, context, context, ~real, attn_mask=mask, need_weights=False)
    assert_close(layer(x, context, causal=causal, key_mask=real), right)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("positions", POSITIONS)
@torch.no_grad()
def test_pieces_and_steps_of_a_stream_are_the_full_pass(name, positions):
    layer = make(name, positions=positions, num_kv_heads=2, gate=True)
    x = tokens(2, 20, 16)
    out, state = in_pieces(layer, x, [1, 7, 1, 1, 8, 1, 1], layer.empty_state(2))
    assert_close(out, layer(x, causal=True))
    assert state.position == 20


def test_a_layer_streams_as_it_is_made_by_default():
    layer, x = AttentionLayer(32, 4, dtype=F64), tokens(1, 9, 32)
    out, _ = layer.stream(x)
    assert_close(out, layer(x, causal=True))
    with pytest.raises(ValueError, match=r"cannot attend over 4097 tokens.*larger horizon"):
        layer(torch.zeros(1, 4097, 32, dtype=F64), causal=True)
    paper = AttentionLayer(32, 4, options={"horizon": None}, dtype=F64)
    paper.load_state_dict(layer.state_dict())
    assert not torch.allclose(paper(x), layer(x))
    with pytest.raises(ValueError, match="horizon must be a number for a stream, got None"):
        paper.stream(x)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_parameter_gets_a_gradient(name):
    blind = name in ("synthesizer", "synthesizer-factorised")  # positions move q and k alone
    layer = make(name, gate=True, positions="none" if blind else "learned")
    causal = not MECHANISMS[name].traits.full
    layer(tokens(2, 20, 16), causal=causal).square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


def test_the_norm_and_the_gate_stand_between_the_mechanism_and_the_output():
    layer = make("retention", gate=True)
    with torch.no_grad():
        layer.norm.weight.copy_(tokens(4))
    x = tokens(2, 9, 16)
    q, k, v = layer.project(x, x, x, batched=True)
    heads, _ = layer.mechanism(q, k, v, causal=True)
    heads = F.rms_norm(heads, (4,), layer.norm.weight, 1e-6).transpose(1, 2).flatten(2)
    assert_close(layer(x, causal=True), layer.out_proj(heads * F.silu(layer.gate(x))))
    assert make("retention", norm=False).norm is None
    assert make("softmax").norm is None  # its traits do not ask for one
    assert make("softmax", norm=True).norm is not None


def test_controls_are_projected_from_the_input():
    layer = make("gated-delta", num_kv_heads=2)
    assert set(layer.controls) == {"beta", "gate"}
    x = tokens(2, 9, 16)
    before = layer(x, causal=True)
    with torch.no_grad():
        layer.controls["beta"].bias -= 50  # nothing is written any more
    assert not torch.allclose(layer(x, causal=True), before)
    q, k, v = layer.project(x, x, x, batched=True)
    controls = {name: linear(x).mT for name, linear in layer.controls.items()}
    assert_close(layer.mechanism(q, k, v, causal=True, controls=controls)[0], torch.zeros_like(q))


def exact_sinusoids(position, width):
    """By Python's own mathematics, one number after the other."""
    angles = [position / 1e4 ** (2 * (n // 2) / width) for n in range(width)]
    return [(math.cos if n % 2 else math.sin)(angle) for n, angle in enumerate(angles)]


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "length", "width"), [(0, 1000, 12), (10**6, 513, 7), (5, 3, 4)])
def test_sinusoids_of_a_stretch_are_exact_to_their_rounding(start, length, width, dtype):
    x = torch.zeros(1, length, width, dtype=dtype)
    right = [exact_sinusoids(start + n, width) for n in range(length)]
    right = 0.5 * torch.tensor(right, dtype=F64)
    found = sinusoids_from(start, x, 0.5)
    assert found.dtype == dtype
    # half a unit in the last place of numbers below one half
    assert_close(found[0].double(), right, rtol=0, atol=torch.finfo(dtype).eps / 8 + 1e-9)


def test_each_stream_has_the_sinusoids_of_its_own_positions():
    x, starts = torch.zeros(2, 700, 6, dtype=F64), torch.tensor([3, 2000])
    alone = [sinusoids_from(int(start), x)[0] for start in starts]
    assert_close(sinusoids_from(starts, x), torch.stack(alone))


@pytest.mark.parametrize("start", [0, 300])
def test_sinusoids_of_a_stretch_are_the_same_in_a_graph(start):
    def waves(x):
        return sinusoids_from(start, x)

    x = torch.zeros(1, 600, 6)
    compiled = torch.compile(waves, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_close(compiled(x), waves(x), rtol=0, atol=2.0**-24)
    assert_close(torch.func.vmap(waves)(x[None])[0], waves(x), rtol=0, atol=2.0**-24)


def test_stochastic_positions_are_sums_of_sines_on_average():
    layer = make(positions="spe")
    sines = layer.positions.sines
    sines.noise = torch.zeros(4, 4, 10, 40_000, dtype=F64)
    sines.realizations = 40_000
    sines.redraw(torch.Generator().manual_seed(0))
    q, k = tokens(1, 4, 3, 4), tokens(1, 4, 3, 4, seed=2)
    at = torch.arange(3, dtype=F64)[None]
    found = (sines.queries(q, at) @ sines.keys(k, at).mT)[0, 0]
    gain = F.softplus(sines.gains[0])
    gain = (gain / gain.norm(dim=-1, keepdim=True)).square()
    turn = torch.pi * sines.frequencies[0].sigmoid()
    distance = (at.mT - at)[..., None, None]
    kernel = (gain * torch.cos(turn * distance + sines.phases[0])).sum(-1)  # P_d(i − j)
    right = torch.einsum("id,jd,ijd->ij", q[0, 0], k[0, 0], kernel)
    mean = found * (4 / 40_000) ** 0.5  # the sum over R was divided by √(d R)
    assert_close(mean, right, rtol=0, atol=0.05)


def test_dropout_drops_keys_in_training_only():
    layer = make(dropout=0.5)
    x = tokens(2, 9, 16)
    assert_close(layer(x), layer(x))
    mean = torch.stack([layer.train()(x) for _ in range(600)]).mean(0)
    assert not torch.allclose(layer(x), layer(x))
    assert_close(mean, layer.eval()(x), rtol=0, atol=0.12)


BAD = [
    ({"name": "sofmax"}, ValueError, "mechanism must be one of .*softmax"),
    ({"positions": "nope"}, ValueError, "positions must be one of none, learned, .*, got 'nope'"),
    ({"positions": []}, ValueError, r"positions must be one of none, learned, .*, got \[\]"),
    ({"positions": "rotary", "heads": 16}, ValueError, "a head's width must be even .* got 1"),
    ({"options": {"colour": 1}}, ValueError, "options of softmax are none, got colour"),
    ({"name": "cosformer", "options": {"horizn": 3}}, ValueError, "did you mean 'horizon'"),
    ({"options": {"key_heads": 1}}, ValueError, "options must not have key_heads: .* num_kv_heads"),
    ({"options": {"heads": 1}}, ValueError, "options must not have heads: .* num_heads"),
    ({"name": "retention", "context_dim": 8}, ValueError, "retention cannot attend to another"),
    ({"dropout": 1.5}, ValueError, r"dropout must lie in 0 ... 1, got 1.5"),
    ({"context_dim": 0}, ValueError, "context_dim must be a whole number from 1 on, got 0"),
    ({"context_dim": "8"}, TypeError, "context_dim must be a whole number from 1 on, got '8'"),
    ({"positions": "learned", "max_length": -1}, ValueError, "max_length must be .* 1 on, got -1"),
    ({"positions": "learned", "max_length": "a"}, TypeError, "max_length must be .* 1 on, got 'a'"),
    ({"positions": "learned", "context_dim": 8}, ValueError, "must not be 'learned' where context"),
    ({"positions": "none", "max_length": 4}, ValueError, "max_length must be None unless"),
    ({"heads": 2.0}, TypeError, r"num_heads must be a whole number from 1 on, got 2\.0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)
    with pytest.raises(TypeError, match="options must be a mapping, got NoneType"):
        AttentionLayer(16, 4, options=None)


def test_learned_positions_need_and_keep_a_length():
    with pytest.raises(ValueError, match="max_length must be given for learned positions"):
        AttentionLayer(16, 4, mechanism="softmax", positions="learned")
    layer = make(positions="learned")
    with pytest.raises(ValueError, match="length must be at most max_length=40, got 41"):
        layer(tokens(1, 41, 16))
    _, state = layer.stream(tokens(1, 40, 16))
    with pytest.raises(ValueError, match="length must be at most max_length=40, got 41"):
        layer.stream(tokens(1, 1, 16), state)


def test_bad_inputs_are_named():
    layer = make(context_dim=10)
    x, context = tokens(2, 7, 16), tokens(2, 7, 10)
    with pytest.raises(ValueError, match=r"x must be \[batch, length, 16\], got \[2, 7, 10\]"):
        layer(context, context)
    with pytest.raises(ValueError, match="context must be given, of width 10"):
        layer(x)
    with pytest.raises(ValueError, match="context must have the batch of x, 2, got 3"):
        layer(x, tokens(3, 7, 10))
    for start, error in (("a", TypeError), (-1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=f"start must be a whole .* 0 on, got {start!r}"):
            layer(x, context, start=start)
    with pytest.raises(ValueError, match=r"context must have the dtype of .*64, got torch.float32"):
        layer(x, context.float())
    with pytest.raises(ValueError, match="longer than a context"):
        make(positions="rotary")(x, x[:, 4:], causal=True)


@pytest.mark.parametrize("name", [name for name, x in MECHANISMS.items() if not x.traits.cross])
@pytest.mark.parametrize("length", [7, 20])
def test_another_sequence_is_refused_by_those_that_see_their_own(name, length):
    layer, x = make(name), tokens(2, 20, 16)
    causal = not layer.mechanism.traits.full
    with pytest.raises(ValueError, match=f"{name} cannot attend to another .* the nearest that"):
        layer(x, tokens(2, length, 16, seed=2), causal=causal)
    assert_close(layer(x, x, causal=causal), layer(x, causal=causal))


def test_a_mechanism_made_for_shared_queries_and_keys_gets_them():
    layer = make("reformer", options={"bucket": 16})
    x = tokens(2, 20, 16)
    q = F.linear(x, layer.in_proj_weight[:16], layer.in_proj_bias[:16])
    q = q.unflatten(2, (4, 4)).transpose(1, 2)
    assert_close(layer.weights(x), layer.mechanism.weights(q, q))
    with pytest.raises(ValueError, match=r"num_kv_heads must be num_heads=4 for .*, got 2"):
        make("reformer", num_kv_heads=2)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", ["softmax", "cosformer", "linear"])
def test_the_last_tokens_of_a_causal_context(name, positions):
    layer, x = make(name, positions=positions), tokens(2, 12, 16)
    assert_close(layer(x[:, 8:], x, causal=True), layer(x, causal=True)[:, 8:])


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("given", [{"causal": True}, {"start": 3}, {}])
def test_weights_are_those_that_forward_used(positions, given):
    layer, x, context = make("linear", positions=positions), tokens(2, 4, 16), tokens(2, 9, 16)
    made = layer._project(x, context, 0, causal=False)
    read = layer.weights(x, context, **given) @ made.v
    assert_close(layer._finish(read, layer._gated(made.x)), layer(x, context, **given))


@torch.no_grad()
def test_a_stream_refuses_what_is_no_state_of_its_own():
    layer, x = make("linear"), tokens(2, 20, 16)
    for call in (layer.stream, layer.step):
        with pytest.raises(TypeError, match="state must be a LayerState, got int"):
            call(x[:, :1], 5)
    with pytest.raises(ValueError, match=r"one token \[batch, 1, 16\] in step, got \[2, 20, 16\]"):
        layer.step(x, layer.empty_state(2))
    with pytest.raises(ValueError, match=r"x must be \[batch, length, 16\], got \[2, 20, 8\]"):
        layer.stream(x[..., :8])
    _, state = make("local", options={"window": 4}).stream(x)
    with pytest.raises(ValueError, match="state must "):
        make("softmax").stream(x, state)


def test_a_step_past_the_horizon_is_refused_before_anything_changes():
    layer = AttentionLayer(8, 2, options={"horizon": 3}).eval()
    with torch.no_grad():
        _, state = layer.stream(torch.randn(1, 3, 8))
        before = state.mechanism.key_value.clone()
        with pytest.raises(ValueError, match="cannot attend over 4 tokens"):
            layer.step(torch.randn(1, 1, 8), state)
    assert torch.equal(state.mechanism.key_value, before)


def test_a_step_refuses_the_state_of_another_layer_and_a_forgotten_no_grad():
    x = torch.randn(2, 5, 8)
    layer = AttentionLayer(8, 2, options={"horizon": 10})
    others = {
        "horizon": AttentionLayer(8, 2),
        "LayerState|State": AttentionLayer(8, 2, mechanism="softmax"),
        "one of": AttentionLayer(8, 2, mechanism="linear"),
    }
    with torch.no_grad():
        _, own = layer.stream(x)
        relu = AttentionLayer(8, 2, mechanism="relu")
        for message, other in others.items():
            taker = relu if message == "one of" else layer
            with pytest.raises((ValueError, TypeError), match=message):
                taker.step(x[:, :1], other.stream(x)[1])
        with pytest.raises(ValueError, match="state must hold"):
            layer.step(x[:1, :1], own)
        with pytest.raises(ValueError, match="x must have the dtype"):
            layer.step(x[:, :1].double(), own)
    with pytest.raises(ValueError, match="step records no gradients"):
        layer.step(x[:, :1], own)


WIDTHS = [{"head_dim": 6}, {"value_dim": 10}, {"head_dim": 6, "value_dim": 3, "num_kv_heads": 2}]
WIDTHS += [{"positions": "spe"}]  # which makes keys wider than values


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", MECHANISMS)
@torch.no_grad()
def test_heads_may_have_any_width(name, widths):
    if MECHANISMS[name].traits.shared_qk:
        widths = {**widths, "num_kv_heads": 4}
    layer, x = make(name, gate="sigmoid", **widths), tokens(1, 20, 16)
    causal = layer.mechanism.traits.causal != "no"
    right = layer(x, causal=causal)
    assert right.shape == x.shape
    assert layer.out_proj.in_features == 4 * layer.value_dim
    if name in STREAMS:
        out, state = in_pieces(layer, x, [9, 1, 10], layer.empty_state(1))
        assert_close(out, right, rtol=1e-4, atol=1e-6)
        held = [x for x in tree_leaves(state) if isinstance(x, torch.Tensor)]
        numbers = sum(x.numel() for x in held if x.is_floating_point())
        assert layer.mechanism.state_size(20) == numbers


def test_heads_of_another_width_need_no_division():
    assert make(embed_dim=18, head_dim=4).head_dim == 4
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads=4, got 18"):
        make(embed_dim=18)


def test_queries_and_keys_are_normed_before_they_are_turned():
    layer, x = make(qk_norm=True, positions="rotary"), tokens(2, 9, 16)
    with torch.no_grad():
        layer.q_norm.weight.copy_(tokens(4))
        layer.k_norm.weight.copy_(tokens(4, seed=2))
    q, k, v = layer.project(x, x, x, batched=True)
    q = F.rms_norm(q, (4,), layer.q_norm.weight, 1e-6)
    k = F.rms_norm(k, (4,), layer.k_norm.weight, 1e-6)
    heads, _ = layer.mechanism(*layer.positions.encode(q, k, 0, 0), v, causal=True)
    assert_close(layer(x, causal=True), layer.merge_heads(heads, batched=True))
    assert make("reformer", qk_norm=True).k_norm is None  # its keys are its normed queries


def test_a_gate_is_a_silu_or_a_sigmoid():
    x, outs = tokens(2, 9, 16), {}
    for gate in (True, "silu", "sigmoid"):
        layer = make(gate=gate, options={})
        q, k, v = layer.project(x, x, x, batched=True)
        heads = layer.mechanism(q, k, v, causal=True)[0].transpose(1, 2).flatten(2)
        act = torch.sigmoid if gate == "sigmoid" else F.silu
        outs[gate] = layer(x, causal=True)
        assert_close(outs[gate], layer.out_proj(heads * act(layer.gate(x))))
    assert torch.equal(outs[True], outs["silu"])
    with pytest.raises(ValueError, match="gate must be one of silu, sigmoid, got 'relu'"):
        make(gate="relu")
    with pytest.raises(TypeError, match="gate must be a bool, silu or sigmoid, got int"):
        make(gate=1)
