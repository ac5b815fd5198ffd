"""Features in groups, as a GPU takes them where they are wider than its kernels."""

import pytest
from mechanism_cases import CASES, make, tokens
from torch.testing import assert_close

from cosformer.mechanisms import family
from cosformer.mechanisms.family import LinearMechanism
from cosformer.ops.fused import MAX_WIDTH

FAMILY = [(name, causal) for name, causal in CASES if isinstance(make(name), LinearMechanism)]


@pytest.mark.parametrize(("name", "causal"), FAMILY)
def test_groups_of_features_add_up(name, causal, monkeypatch):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    whole, _ = mechanism(q, k, v, causal=causal, controls=controls)
    widths = []
    attend = family.linear_attention
    monkeypatch.setattr(family, "is_too_wide", lambda features: True)
    monkeypatch.setattr(family, "GROUP", 4)
    monkeypatch.setattr(
        family,
        "linear_attention",
        lambda q, k, v, **options: (widths.append(q.shape[-1]), attend(q, k, v, **options))[1],
    )
    assert_close(mechanism(q, k, v, causal=causal, controls=controls)[0], whole)
    assert sum(widths) == mechanism.feature_width
    assert max(widths) == 4


def test_the_kernels_width_is_the_one_that_is_known_here():
    assert family.KERNEL_WIDTH == MAX_WIDTH
