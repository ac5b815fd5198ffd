"""The mechanism cosFormer with a decay: the op's output, streams, states, traits, the commands."""

import math

import pytest
import torch
from mechanism_cases import HEADS, LENGTH, make, stream, tokens
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from cosformer import attention, multiscale_decays
from cosformer.config import merge, parse
from cosformer.models import ModelConfig, create_model

OPTIONS = {
    "number": {"decay": 0.9},
    "multiscale": {"decay": "multiscale"},
    "no cosine": {"decay": "multiscale", "horizon": math.inf},
}
every_decay = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_decay
@pytest.mark.parametrize("causal", [True, False])
def test_a_decay_is_that_of_the_op(options, causal):
    mechanism = make("cosformer", **options)
    q, k, v, _ = tokens(mechanism)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [20]])
    rates = multiscale_decays(HEADS) if options["decay"] == "multiscale" else 0.9
    about = {"causal": causal, "key_mask": mask}
    right = attention(q, k, v, **about, horizon=mechanism.horizon, decay=rates)
    assert_close(mechanism(q, k, v, **about)[0], right)
    assert_close(mechanism.weights(q, k, **about) @ v, right)


@every_decay
def test_a_stream_with_a_decay_is_the_full_pass_and_its_state_has_the_size_it_says(options):
    mechanism = make("cosformer", heads=4, key_heads=2, **options)
    *rows, _ = tokens(mechanism, batch=1)
    out, state = stream(mechanism, rows, {}, (20, 1, 16))
    assert_close(out, mechanism(*rows, causal=True)[0])
    numbers = [x.numel() for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]
    assert sum(numbers) - 1 == mechanism.state_size(LENGTH)  # a position
    without = make("cosformer", heads=4, key_heads=2, horizon=mechanism.horizon)
    with pytest.raises(ValueError, match=r"decay must be the state's .*, got 1"):
        without(*rows, causal=True, state=state)
    with pytest.raises(ValueError, match=r"decay must be the state's 1\.0, got"):
        mechanism(*rows, causal=True, state=without.empty_state(*rows[1:]))


def test_with_a_decay_it_refuses_cross_attention():
    mechanism = make("cosformer", decay=0.9)
    q, k, v, _ = tokens(mechanism, 9, keys=20)
    with pytest.raises(ValueError, match="cosformer cannot attend from 9 queries to 20 keys"):
        mechanism(q, k, v)


def test_an_infinite_horizon_is_no_limit():
    assert make("cosformer", horizon=math.inf).traits.max_length is None


@pytest.mark.parametrize(("text", "decay"), [("multiscale", None), ("[0.5, 0.75]", (0.5, 0.75))])
def test_the_command_line_can_set_a_decay(text, decay):
    config = merge(ModelConfig(), parse([f"options.decay={text}", "options.horizon=inf"]))
    mechanism = create_model(config).backbone.blocks[0].attention.mechanism
    assert mechanism.decay == (decay or multiscale_decays(config.heads))
    assert mechanism.horizon == math.inf
