"""Stochastic positional encoding: one generator for all draws, positions that padding leaves."""

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


def test_a_start_among_padded_keys_counts_from_the_first_real_one():
    mechanism = make("spe")
    q, k, v, _ = tokens(mechanism, 9, keys=20)
    mask = torch.arange(20).expand(2, -1) >= 6
    for start in (None, 0, 8):
        out, _ = mechanism(q, k, v, key_mask=mask, start=start)
        alone, _ = mechanism(q, k[:, :, 6:], v[:, :, 6:], start=(start or 0) - 6)
        assert_close(out, alone)
