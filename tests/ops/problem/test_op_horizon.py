"""A decay whose weights vanish before the horizon ends its rule: no length is too long."""

import pytest
import torch
from formula import IMPLEMENTATIONS, cosformer, cosine_weight, tokens

from cosformer import State, attention, attention_weights, attention_with_state, step
from cosformer.nn import CosformerAttention
from cosformer.ops import vanishing_decay

HORIZON = 40.0
MOST = vanishing_decay(HORIZON)  # 0.66
RATES = [0.3, MOST]
LENGTH = 300
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
every_way = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])


def within(q, k, v, *, causal, decay=RATES, eps=1e-6):
    """The formula in float64 without the keys beyond the horizon."""
    weight = cosine_weight(q, k, causal=causal, decay=decay, horizon=HORIZON)
    index = torch.arange(q.shape[2])
    near = (index[:, None] - index).abs() <= HORIZON
    score = (q.relu() @ k.relu().mT) * weight.to(q.dtype) * near
    return score @ v / score.sum(-1, keepdim=True).clamp(min=eps)


def test_a_decay_vanishes_if_its_power_at_the_horizon_is_half_a_unit_in_the_last_place():
    assert vanishing_decay(HORIZON) ** HORIZON == pytest.approx(2.0**-24)
    assert torch.tensor(1.0) + vanishing_decay(HORIZON) ** HORIZON == 1
    assert vanishing_decay(torch.inf) == 1


@every_impl
@every_way
def test_what_lies_beyond_the_horizon_cannot_be_seen_in_float32(causal, impl):
    about = {"causal": causal, "horizon": HORIZON, "decay": RATES}
    x = tokens(length=LENGTH)
    right = within(*x, causal=causal)
    torch.testing.assert_close(cosformer(*x, **about), right, rtol=0, atol=2.0**-22)
    out = attention(*(y.float() for y in x), **about, impl=impl)
    plain = within(*(y.float() for y in x), causal=causal)
    allowed = 2 * (plain - right).abs().max() + 8 * 2.0**-23 * x[2].abs().max()
    assert (out - right).abs().max() <= allowed


def test_states_in_slots_and_sums_of_states_stay_endless():
    about = {"horizon": HORIZON, "decay": RATES, "dtype": torch.float64}
    slotted = State.empty(2, 2, 4, 4, position=torch.tensor([500, 1000]), **about)
    assert (slotted + slotted).endless
    step(*tokens(1, length=1), slotted, slots=torch.tensor([1]))
    assert slotted.position.tolist() == [500, 1001]


def test_a_position_of_a_billion_changes_nothing():
    x = tokens(length=LENGTH)
    about = {"horizon": HORIZON, "decay": RATES, "dtype": torch.float64}
    out, _ = attention_with_state(*x, state=State.empty(2, 2, 4, 4, position=10**9, **about))
    right = cosformer(*x, causal=True, horizon=HORIZON, decay=RATES)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-6)


REFUSED = {
    "none": {},
    "one head too slow": {"decay": [0.3, MOST + 1e-4]},
    "a tensor": {"decay": torch.tensor(RATES)},
    "gates": {"log_decay": torch.full((2, 2, LENGTH), -9.0, dtype=torch.float64)},
}
refused = pytest.mark.parametrize("fading", REFUSED.values(), ids=REFUSED)


@refused
def test_a_decay_that_the_op_does_not_know_to_vanish_keeps_the_limit(fading):
    x = tokens(length=LENGTH)
    with pytest.raises(ValueError, match="at least the sequence length 300, got 40: raise horizon"):
        attention(*x, causal=True, horizon=HORIZON, **fading)
    with pytest.raises(ValueError, match="300 more would pass its horizon 40: raise horizon"):
        attention_with_state(*x, horizon=HORIZON, **fading)


def test_the_decay_that_the_error_names_is_small_enough():
    x = tokens(length=LENGTH)
    with pytest.raises(ValueError, match="or a decay given as a number of at most 2") as error:
        attention(*x, causal=True, horizon=HORIZON)
    named = float(str(error.value).split("2^(-24/horizon) = ")[1].split()[0])
    assert MOST - 1e-5 < named <= MOST
    attention(*x, causal=True, horizon=HORIZON, decay=named)


def test_the_error_names_the_horizon_in_all_its_digits():
    x = tokens(1, 1, 2, width=1)
    end = torch.tensor(1_234_567)
    state = State.empty(1, 1, 1, 1, horizon=1_234_568, position=end, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"position 1234567, .* its horizon 1234568: "):
        attention_with_state(*x, state=state)
    with pytest.raises(ValueError, match=r"sequence length 1234569, got 1234567\.5: "):
        attention(*x, causal=True, horizon=1_234_567.5, query_start=1_234_567)


@pytest.mark.parametrize(
    "more",
    [
        {"cu_seqlens": torch.tensor([0, 100, 300])},
        {"causal": True, "query_start": 20},
        {"horizon": torch.tensor([HORIZON, 90.0])},
    ],
    ids=["packed", "started", "horizon per head"],
)
def test_packed_sequences_later_starts_and_horizons_per_head_may_pass_too(more):
    x = tokens(1, length=LENGTH)
    about = {"horizon": HORIZON, "decay": RATES, **more}
    torch.testing.assert_close(attention(*x, **about), cosformer(*x, **about))
    torch.testing.assert_close(attention_weights(*x[:2], **about) @ x[2], cosformer(*x, **about))


def test_a_layer_with_vanishing_decays_streams_past_its_horizon():
    layer = CosformerAttention(8, 2, batch_first=True, horizon=10, decay=[0.1, 0.15])
    x = torch.randn(1, 50, 8)
    right, _ = layer(x, x, x, is_causal=True, need_weights=False)
    out, state = layer.stream(x[:, :49])
    with torch.no_grad():
        last = layer.step(x[:, 49:], state)
    torch.testing.assert_close(torch.cat([out, last], 1), right)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    given = torch.randn(3, 1, 2, 50, 4)
    about = {"causal": True, "horizon": 10.0, "decay": [0.1, 0.15]}
    torch.testing.assert_close(compiled(*given, **about), attention(*given, **about))
