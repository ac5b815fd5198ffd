"""The decays that have a name."""

from itertools import pairwise

import pytest

from cosformer import multiscale_decays


def test_multiscale_decays_reach_from_2_tokens_to_362_by_equal_factors():
    for heads in (2, 3, 8, 16):
        reach = [1 / (1 - rate) for rate in multiscale_decays(heads)]
        assert reach[0] == 2
        assert reach[-1] == pytest.approx(2**8.5)
        factors = [b / a for a, b in pairwise(reach)]
        assert factors == pytest.approx([2 ** (7.5 / (heads - 1))] * (heads - 1))


def test_a_single_head_has_the_longest_reach():
    assert multiscale_decays(1) == multiscale_decays(8)[-1:]


def test_a_wrong_number_of_heads_is_named():
    with pytest.raises(ValueError, match="heads must be a whole number from 1 on, got 0"):
        multiscale_decays(0)
    with pytest.raises(TypeError, match=r"heads must be a whole number from 1 on, got 2\.0"):
        multiscale_decays(2.0)
