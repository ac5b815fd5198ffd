"""Stochastic positional encoding: one generator for all draws, positions that padding leaves."""

import pytest
import torch
from mechanism_cases import make, tokens
from torch.testing import assert_close

from cosformer.mechanisms import create


def test_one_generator_draws_everything():
    made = []
    for _ in range(2):
        torch.randn(3)  # torch's own generator has nothing to do with it
        made.append(create("spe", 2, 6, realizations=8, generator=torch.Generator().manual_seed(5)))
    for name, x in made[0].state_dict().items():
        assert torch.equal(x, made[1].state_dict()[name]), name
    torch.manual_seed(1)
    other = create("spe", 2, 6, realizations=8)
    for name in ("frequencies", "phases", "noise"):
        one, two = (getattr(x.encoding, name) for x in (made[0], other))
        assert not torch.equal(one, two), name


@pytest.mark.parametrize("causal", [False, True])
def test_padding_in_front_does_not_shift_positions(causal):
    mechanism = make("spe")
    q, k, v, _ = tokens(mechanism, 20)
    mask = torch.arange(20) >= torch.tensor([[0], [6]])
    out, _ = mechanism(q, k, v, causal=causal, key_mask=mask)
    alone, _ = mechanism(*(x[1:, :, 6:] for x in (q, k, v)), causal=causal)
    assert_close(out[1:, :, 6:], alone)
    assert_close(out[:1], mechanism(*(x[:1] for x in (q, k, v)), causal=causal)[0])
    weights = mechanism.weights(q, k, causal=causal, key_mask=mask)
    assert_close(weights @ v, out)


def test_a_start_among_padded_keys_counts_from_the_first_real_one():
    mechanism = make("spe")
    q, k, v, _ = tokens(mechanism, 9, keys=20)
    mask = torch.arange(20).expand(2, -1) >= 6
    for start in (None, 0, 8):
        out, _ = mechanism(q, k, v, key_mask=mask, start=start)
        alone, _ = mechanism(q, k[:, :, 6:], v[:, :, 6:], start=(start or 0) - 6)
        assert_close(out, alone)
