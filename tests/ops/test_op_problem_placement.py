"""Where queries and keys stand: unequal lengths, query_start, horizons, conventions."""

import math

import pytest
import torch
from formula import IMPLEMENTATIONS, agree, cosformer, tokens

from cosformer import attention

SIDES = [(1, 7), (7, 1), (5, 130), (257, 129)]
STARTS = [-300, -7, 0, 4, 128, 400]


def formula(**options):
    return lambda q, k, v: cosformer(q, k, v, **options)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("queries", "keys"), SIDES)
def test_the_last_causal_query_stands_at_the_last_key(queries, keys, impl):
    inputs = tokens(1, 2, queries, keys=keys, value_width=3)
    agree(lambda *x: attention(*x, causal=True, impl=impl), formula(causal=True), *inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("causal", [True, False])
def test_queries_start_anywhere_before_among_and_behind_the_keys(start, causal, impl):
    inputs = tokens(1, 4, 20, keys=290, kv_heads=2, width=3)
    mask = torch.rand(1, 290, generator=torch.Generator().manual_seed(0)) < 0.8
    options = {"causal": causal, "query_start": start, "horizon": 1000.0, "key_mask": mask}
    agree(lambda *x: attention(*x, **options, impl=impl), formula(**options), *inputs)
    options["horizon"] = torch.tensor([700.0, 800.0, 900.0, 1000.0])
    agree(lambda *x: attention(*x, **options, impl=impl), formula(**options), *inputs)


def test_queries_before_the_first_key_get_zeros():
    q, k, v = tokens(length=5, keys=3)
    assert not attention(q, k, v, causal=True)[:, :, :2].any()
    assert not attention(q, k, v, causal=True, query_start=-9, horizon=20).any()


@pytest.mark.parametrize(("queries", "keys"), [*SIDES, (0, 4), (4, 0)])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_stretched_positions_are_scaled_to_the_longer_side(queries, keys, impl):
    inputs = tokens(1, 2, queries, keys=keys)
    agree(lambda *x: attention(*x, positions="stretch", impl=impl), formula(stretch=True), *inputs)


def test_stretching_turns_the_peak_from_equal_indices_to_equal_shares():
    q, k = torch.ones(1, 1, 4, 1), torch.ones(1, 1, 16, 1)
    picks = torch.eye(16)[None, None]
    by_index, by_share = (
        attention(q, k, picks, positions=name).argmax(-1)[0, 0] for name in ("index", "stretch")
    )
    assert by_index.tolist() == [0, 1, 2, 3]
    assert by_share.tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_head_may_have_its_own_horizon(causal, impl):
    inputs = tokens(2, 4, 140, kv_heads=2)
    for horizon in (torch.tensor([140.0, 150.5, 300.0, 9e9]), torch.tensor([140, 1000])):
        options = {"causal": causal, "horizon": horizon}
        agree(lambda *x, o=options: attention(*x, **o, impl=impl), formula(**options), *inputs)
    one = attention(*inputs, causal=causal, horizon=torch.full((4,), 150.0), impl=impl)
    torch.testing.assert_close(one, attention(*inputs, causal=causal, horizon=150, impl=impl))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9), (9, 4)])
def test_no_horizon_means_the_longer_length(queries, keys, causal):
    inputs = tokens(length=queries, keys=keys)
    assert torch.equal(
        attention(*inputs, causal=causal), attention(*inputs, causal=causal, horizon=9)
    )


PAST = [
    ({"horizon": 9}, 10, 10, 10),
    ({"horizon": 9, "causal": True}, 10, 10, 10),
    ({"horizon": 9.5}, 3, 10, 10),
    ({"horizon": 9}, 10, 3, 10),
    ({"horizon": 9, "causal": True}, 10, 3, 10),
    ({"horizon": torch.tensor([20.0, 9.0])}, 10, 10, 10),
    ({"horizon": 20, "causal": True, "query_start": 12}, 10, 10, 22),
    ({"horizon": 20, "query_start": -11}, 3, 10, 21),
    ({"horizon": 5, "cu_seqlens": torch.tensor([0, 4, 10])}, 10, 10, 6),
]


@pytest.mark.parametrize(("options", "queries", "keys", "length"), PAST)
def test_a_short_horizon_is_refused_by_name_with_length_and_remedy(options, queries, keys, length):
    inputs = tokens(1, length=queries, keys=keys)
    horizon = options["horizon"]
    smallest = horizon.min().item() if isinstance(horizon, torch.Tensor) else horizon
    message = rf"horizon .*length {length}, got {smallest:g}: .*raise horizon.*raised_cosine"
    for impl in IMPLEMENTATIONS:
        with pytest.raises(ValueError, match=message):
            attention(*inputs, **options, impl=impl)
        attention(*inputs, **options, weight="raised_cosine", impl=impl)


@pytest.mark.parametrize(("options", "queries", "keys", "length"), PAST)
def test_a_horizon_of_just_the_length_is_enough(options, queries, keys, length):
    attention(*tokens(1, length=queries, keys=keys), **options | {"horizon": length})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("horizon", [47.5, torch.tensor([5.0, 1e4])])
def test_the_raised_cosine_is_its_formula_at_any_distance(horizon, causal, impl):
    inputs = tokens(2, 2, 300)
    options = {"horizon": horizon, "causal": causal}
    agree(
        lambda *x: attention(*x, **options, weight="raised_cosine", impl=impl),
        formula(**options, raised=True),
        *inputs,
        argument=math.pi * 300 / float(torch.as_tensor(horizon).min()),
    )
