"""Features in groups, as a GPU takes them where they are wider than its kernels."""

import pytest
from mechanism_cases import CASES, make, tokens
from torch.testing import assert_close

from cosformer.mechanisms import family, groups
from cosformer.mechanisms.family import LinearMechanism
from cosformer.ops.hopper import MAX_WIDTH

FAMILY = [(name, causal) for name, causal in CASES if isinstance(make(name), LinearMechanism)]


@pytest.mark.parametrize(("name", "causal"), FAMILY)
@pytest.mark.parametrize("room", [8, 16])  # for v and the sum of weights at once, or not
def test_groups_of_features_add_up(name, causal, room, monkeypatch):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    whole, _ = mechanism(q, k, v, causal=causal, controls=controls)
    widths = []
    attend = groups.linear_attention
    monkeypatch.setattr(family, "goes_in_groups", lambda features, options: True)
    monkeypatch.setattr(groups, "GROUP", room)
    monkeypatch.setattr(
        groups,
        "linear_attention",
        lambda q, k, v, **options: (widths.append(q.shape[-1]), attend(q, k, v, **options))[1],
    )
    assert_close(mechanism(q, k, v, causal=causal, controls=controls)[0], whole)
    assert max(widths) <= room
    if mechanism.feature_map == "identity":
        assert not any(width % groups.ALIGNED for width in widths)


def test_a_group_is_as_wide_as_the_fastest_kernels_take():
    assert groups.GROUP == MAX_WIDTH
