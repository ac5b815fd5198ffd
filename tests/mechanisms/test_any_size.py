"""Properties at any length, any cut of a stream, any mask and grouping, over the whole table."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mechanism_cases import CASES, STREAMS, draw, make, stream, tokens
from torch.testing import assert_close

PROPERTY = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # chunk lengths, the same for all
)
LONGEST = 60


@PROPERTY
@given(
    name=st.sampled_from(STREAMS),
    length=st.integers(1, LONGEST),
    cuts=st.lists(st.integers(0, LONGEST), max_size=4),
    grouped=st.booleans(),
)
def test_any_cut_of_a_stream_is_the_full_pass(name, length, cuts, grouped):
    mechanism = make(name, key_heads=1 if grouped else 2)
    q, k, v, controls = tokens(mechanism, length, batch=1)
    whole, _ = mechanism(q, k, v, causal=True, controls=controls)
    ends = sorted({min(c, length) for c in cuts} | {length})
    pieces = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert_close(stream(mechanism, (q, k, v), controls, pieces)[0], whole, rtol=1e-6, atol=1e-6)


@PROPERTY
@given(case=st.sampled_from(CASES), length=st.integers(1, LONGEST), seed=st.integers(0, 99))
def test_any_mask_leaves_the_dense_matrix_times_v(case, length, seed):
    name, causal = case
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism, length, seed=seed)
    mask = draw(2, length, seed=seed + 50) > -0.5
    options = {"causal": causal, "key_mask": mask, "controls": controls}
    out, _ = mechanism(q, k, v, **options)
    weights = mechanism.weights(q, k, **options)
    assert torch.isfinite(out).all()
    assert_close(out, weights @ v, rtol=1e-6, atol=1e-6)
    assert not weights.masked_fill(mask[:, None, None], 0).any()
