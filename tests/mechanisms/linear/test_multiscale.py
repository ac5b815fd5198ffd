"""cosFormer with a decay per head or per token: the op's formula, learning, streams without end."""

import math

import pytest
import torch
from mechanism_cases import F64, by_steps, draw, make, stream, tokens
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from cosformer import attention, multiscale_decays
from cosformer.config import merge, parse
from cosformer.mechanisms import create
from cosformer.models import ModelConfig, create_model
from cosformer.nn import AttentionLayer
from cosformer.ops import vanishing_decay

LONG = 150
every_way = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
DEFAULTS = {"horizon": 65_536.0, "decay": "multiscale", "learned": False}
MULTISCALE = {"decay": "multiscale"}
OF_HEADS = [
    ("cosformer", {"decay": 0.9, "horizon": 64}),
    ("cosformer", {**MULTISCALE, "horizon": 64}),
    ("cosformer", {**MULTISCALE, "horizon": math.inf}),
    ("cosformer-multiscale", {}),
    ("cosformer-multiscale", {"learned": True}),
]
of_heads = pytest.mark.parametrize(("name", "options"), OF_HEADS)


@of_heads
@every_way
def test_a_decay_per_head_is_that_of_the_op(name, options, causal):
    mechanism = create(name, 4, 6, key_heads=2, **options).double()
    q, k, v, _ = tokens(mechanism)
    rates = options["decay"] if options.get("decay") == 0.9 else multiscale_decays(2)
    about = {"causal": causal, "key_mask": torch.arange(37) < torch.tensor([[37], [20]])}
    right = attention(q, k, v, **about, horizon=mechanism.horizon, decay=rates)
    assert_close(mechanism(q, k, v, **about)[0], right, rtol=1e-6, atol=1e-6)
    weights = mechanism.weights(q, k, **about)
    assert_close(weights @ v.repeat_interleave(2, 1), right, rtol=1e-6, atol=1e-6)


@of_heads
def test_a_state_has_the_size_it_says_and_the_decay_of_no_other(name, options):
    mechanism = create(name, 4, 6, key_heads=2, **options).double()
    *rows, _ = tokens(mechanism, batch=1)
    state = stream(mechanism, rows, {}, (37,))[1]
    held = [x for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]
    numbers = sum(x.numel() for x in held if x.is_floating_point())
    assert numbers == mechanism.state_size(37)
    horizon, one = mechanism.horizon, [x[:, :, :1] for x in rows]
    without = create(name, 4, 6, key_heads=2, horizon=horizon, decay=1).double()
    with torch.no_grad(), pytest.raises(ValueError, match=r"decay must be the state's .*, got 1"):
        without(*one, causal=True, state=state)
    with torch.no_grad(), pytest.raises(ValueError, match=r"decay must be the state's 1\.0, got"):
        mechanism(*one, causal=True, state=without.empty_state(*rows[1:]))


@every_way
def test_gated_is_the_op_with_a_decay_per_token_and_a_floor_of_forgetting(causal):
    mechanism = make("cosformer-gated", horizon=64)
    q, k, v, controls = tokens(mechanism)
    log_decay = F.logsigmoid(controls["gate"]) - 24 * math.log(2) / 64
    right = attention(q, k, v, causal=causal, horizon=64, log_decay=log_decay)
    assert_close(mechanism(q, k, v, causal=causal, controls=controls)[0], right)


ENDLESS = [
    ("cosformer-multiscale", {"horizon": 20, "decay": [0.2, 0.43], "learned": False}),
    ("cosformer-multiscale", {"horizon": 20}),  # learned, by the cases' options
    ("cosformer-multiscale", DEFAULTS),
    ("cosformer-gated", {"horizon": 20}),
    ("cosformer-gated", {"horizon": math.inf}),
]
endless = pytest.mark.parametrize(("name", "options"), ENDLESS)


@endless
@every_way
@torch.no_grad()
def test_the_horizon_may_be_passed_and_nothing_beyond_it_is_seen(name, options, causal):
    mechanism = make(name, **options)
    assert mechanism.traits.max_length is None
    q, k, _, controls = tokens(mechanism, LONG)
    controls = {key: x + 20 for key, x in controls.items()}  # gates that are all but open
    weights = mechanism.weights(q, k, causal=causal, controls=controls)
    index = torch.arange(LONG)
    far = (index[:, None] - index).abs() > mechanism.horizon
    assert (weights.abs() * far).sum(-1).max() < 2.0**-19


def test_a_decay_near_one_makes_the_horizon_the_longest_sequence_again():
    mechanism = create("cosformer-multiscale", 2, 6, horizon=4096)
    assert mechanism.traits.max_length == 4096  # γ = 0.9972 leaves 2^-16 there
    assert create("cosformer-multiscale", 2, 6, horizon=6100).traits.max_length is None
    short = make("cosformer-multiscale", horizon=20, decay=0.9, learned=False)
    *rows, _ = tokens(short, 30)
    with pytest.raises(
        ValueError, match=r"cosformer-multiscale cannot attend over 30 tokens.*24/h"
    ):
        short(*rows)
    state = stream(short, [x[:, :, :20] for x in rows], {}, (20,))[1]
    with pytest.raises(ValueError, match="stands at position 20, 1 more would pass its horizon 20"):
        short(*(x[:, :, :1] for x in rows), causal=True, state=state)


def test_learned_decays_begin_as_given_and_stay_below_the_vanishing_decay():
    mechanism = create("cosformer-multiscale", 8, 6, learned=True)
    assert_close(mechanism.rates.detach(), torch.tensor(multiscale_decays(8), dtype=F64), rtol=1e-6,
                 atol=0)  # fmt: skip
    most = vanishing_decay(65_536)
    with torch.no_grad():
        mechanism.logit.fill_(1e4)
        assert (mechanism.rates <= most).all()
        mechanism.logit.fill_(-60)
        assert (mechanism.rates > 0).all()
    with pytest.raises(
        ValueError, match=r"decay must be below 2\^\(-24/horizon\) = 0\.98.*raise h"
    ):
        create("cosformer-multiscale", 8, 6, horizon=1024, learned=True)


def test_a_learned_decay_moves_every_head_by_the_same_share_where_it_looks():
    mechanism = create("cosformer-multiscale", 8, 6, learned=True).double()
    reach = 1 / (1 - mechanism.rates.detach())
    (moved,) = torch.autograd.grad((reach * mechanism.rates.log()).sum(), mechanism.logit)
    assert moved.min() > 0.8
    assert moved.max() < 1.2


def test_steps_follow_decays_that_have_been_learned_since():
    mechanism = make("cosformer-multiscale")
    *rows, _ = tokens(mechanism, 9)
    with torch.no_grad():
        by_steps(mechanism, rows, {}, mechanism.empty_state(*rows[1:]))
        mechanism.logit += 1
        right, _ = mechanism(*rows, causal=True)
        out = by_steps(mechanism, rows, {}, mechanism.empty_state(*rows[1:]))
    assert_close(out, right)


def test_a_layer_of_gates_begins_with_the_multiscale_decays_for_every_token():
    torch.manual_seed(0)
    layer = AttentionLayer(64, 8, mechanism="cosformer-gated", num_kv_heads=4, bias=False)
    gate = layer.controls["gate"]
    assert_close(gate(torch.randn(5, 64)).sigmoid().detach(),
                 torch.tensor(multiscale_decays(4)).expand(5, -1))  # fmt: skip
    x = draw(2, 40, 64, dtype=torch.float32)
    fixed = [rate * vanishing_decay(65_536) for rate in multiscale_decays(4)]
    options = {"decay": fixed}
    other = AttentionLayer(64, 8, mechanism="cosformer-multiscale", num_kv_heads=4, options=options,
                           bias=False)  # fmt: skip
    other.load_state_dict(layer.state_dict(), strict=False)
    assert_close(layer(x, causal=True), other(x, causal=True), rtol=1e-4, atol=1e-6)
    layer(x).square().sum().backward()
    assert gate.weight.grad.any(1).all()


def test_a_long_stretch_of_padding_in_a_gated_stream_fades_the_past():
    mechanism = make("cosformer-gated", horizon=20)
    q, k, _, controls = tokens(mechanism, 60)
    controls["gate"] = controls["gate"] + 20
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[:, 10:40] = False
    weights = mechanism.weights(q, k, causal=True, key_mask=mask, controls=controls)
    assert weights[:, :, 45, :10].abs().max() < 2.0**-20


def test_cosformer_with_a_decay_refuses_cross_attention():
    mechanism = make("cosformer", decay=0.9)
    q, k, v, _ = tokens(mechanism, 9, keys=20)
    with pytest.raises(ValueError, match="cosformer cannot attend from 9 queries to 20 keys"):
        mechanism(q, k, v)


def test_an_infinite_horizon_of_cosformer_is_no_limit():
    assert make("cosformer", horizon=math.inf).traits.max_length is None


@pytest.mark.parametrize(("text", "decay"), [("multiscale", None), ("[0.5, 0.75]", (0.5, 0.75))])
def test_the_command_line_can_set_a_decay(text, decay):
    config = merge(ModelConfig(), parse([f"options.decay={text}", "options.horizon=inf"]))
    mechanism = create_model(config).backbone.blocks[0].attention.mechanism
    assert mechanism.decay == (decay or multiscale_decays(config.heads))
    assert mechanism.horizon == math.inf
