"""A stream in pieces, by steps, merged and on its own position is the full pass."""

import math
from itertools import pairwise

import pytest
import torch
from formula import IMPLEMENTATIONS, agree, by_steps, cosformer, in_pieces, tokens, uniform
from hypothesis import given
from hypothesis import strategies as st
from properties import FEW

from cosformer import (
    State,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
    step,
)

LENGTH = 150
KINDS = {
    "cosine": {"horizon": 200.0},
    "horizon per key head": {"horizon": torch.tensor([150.0, 900.0])},
    "raised": {"horizon": 7.0, "weight": "raised_cosine"},
    "decay": {"horizon": 200.0, "decay": [0.9, 0.999]},
    "past the horizon": {"horizon": 60.0, "decay": [0.3, 0.7]},
    "endless": {"horizon": math.inf, "decay": 0.97},
    "raised decay": {"horizon": 7.0, "weight": "raised_cosine", "decay": torch.tensor([0.5, 1.0])},
    "gates": {"horizon": 200.0, "log_decay": -0.2 * uniform(2, 2, LENGTH)},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def inputs():
    return tokens(2, 4, LENGTH, kv_heads=2, width=3, value_width=2)


def stretch(x, start, stop):
    return [t[:, :, start:stop] for t in x]


def formula(q, k, v, weight="cosine", **options):
    return cosformer(q, k, v, causal=True, raised=weight == "raised_cosine", **options)


def gates(options, start, stop):
    """The decays of these tokens, as an option, where each has its own."""
    if "log_decay" not in options:
        return {}
    return {"log_decay": options["log_decay"][..., start:stop]}


def empty(log_decay=None, **options):
    per_token = log_decay is not None
    return State.empty(2, 2, 3, 2, dtype=torch.float64, per_token=per_token, **options)


def same(one, other):
    for a, b in zip(one.tensors, other.tensors, strict=True):
        torch.testing.assert_close(a, b)


@every_kind
@every_impl
def test_one_stretch_is_the_formula_and_leaves_the_sums(options, impl):
    q, k, v = inputs()
    out, state = attention_with_state(q, k, v, **options, impl=impl)
    torch.testing.assert_close(out, formula(q, k, v, **options))
    assert int(state.position) == LENGTH
    later = torch.arange(LENGTH - 1, -1, -1)
    rate = torch.as_tensor(options.get("decay", 1.0), dtype=torch.float64)
    fade = rate.reshape(-1, 1) ** later
    if "log_decay" in options:
        after = options["log_decay"].flip(-1).cumsum(-1).flip(-1) - options["log_decay"]
        fade = after.exp()
    theta = torch.pi / 2 / torch.as_tensor(options["horizon"]).double().reshape(-1, 1)
    angle = theta * torch.arange(LENGTH)
    parts = [angle.cos(), angle.sin()] if theta.any() else [torch.ones_like(angle)]
    if options.get("weight") == "raised_cosine":
        parts = [torch.ones_like(angle), (2 * angle).cos(), (2 * angle).sin()]
    for r, part in enumerate(parts):
        keys = k.relu() * (part * fade)[..., None]
        torch.testing.assert_close(state.key_value[:, :, r], keys.mT @ v)
        torch.testing.assert_close(state.key_sum[:, :, r], keys.sum(2))


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(
    pieces=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=6),
    impl=st.sampled_from(IMPLEMENTATIONS),
)
def test_any_mix_of_steps_and_stretches_is_the_full_pass(kind, pieces, impl):
    options, x = KINDS[kind], inputs()
    state, outs, at = empty(**options), [], 0
    for size, by_step in pieces:
        stop = min(at + size, LENGTH)
        if by_step:
            for t in range(at, stop):
                outs.append(step(*stretch(x, t, t + 1), state, **gates(options, t, t + 1)))
        else:
            about = {"state": state, "impl": impl, **gates(options, at, stop)}
            out, state = attention_with_state(*stretch(x, at, stop), **about)
            outs.append(out)
        at = stop
    if outs:
        torch.testing.assert_close(torch.cat(outs, 2), formula(*x, **options)[:, :, :at])
    whole = options | gates(options, 0, at)
    same(state, attention_with_state(*stretch(x, 0, at), **whole)[1])


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(
    cuts=st.lists(st.integers(0, LENGTH), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_states_of_stretches_add_in_any_order(kind, cuts, order):
    options, x = KINDS[kind], inputs()
    states = []
    for start, stop in pairwise([0, *sorted(cuts), LENGTH]):
        begin = empty(position=start, **options)
        here = {"state": begin, **gates(options, start, stop)}
        states.append(attention_with_state(*stretch(x, start, stop), **here)[1])
    if "log_decay" not in options:  # neighbours alone know what lies between them
        order.shuffle(states)
    while len(states) > 1:
        at = order.randrange(len(states) - 1)
        pair = states[at : at + 2]
        order.shuffle(pair)
        states[at : at + 2] = [pair[0] + pair[1]]
    (merged,) = states
    same(merged, attention_with_state(*x, **options)[1])


@every_impl
def test_streams_of_one_batch_may_stand_at_positions_of_their_own(impl):
    x, starts = inputs(), [0, 90]
    rows = [[t[row : row + 1] for t in x] for row in range(2)]
    alone = [
        attention_with_state(*stretch(row, 0, start), horizon=200)[1]
        for row, start in zip(rows, starts, strict=True)
    ]
    sums = (torch.cat(parts) for parts in zip(*(a[:2] for a in alone), strict=True))
    state = State(*sums, torch.tensor(starts), 200.0)
    tail = [
        torch.cat([r[n][:, :, s : s + 60] for r, s in zip(rows, starts, strict=True)])
        for n in range(3)
    ]
    right = torch.cat(
        [formula(*rows[row], horizon=200)[:, :, s : s + 60] for row, s in enumerate(starts)]
    )
    out, last = attention_with_state(*tail, state=state, impl=impl)
    torch.testing.assert_close(out, right)
    assert last.position.tolist() == [60, 150]
    torch.testing.assert_close(by_steps(step, tail, state), right)
    same(state, last)
    with pytest.raises(ValueError, match="position 150, 60 more"):
        attention_with_state(*tail, state=last)


@every_impl
def test_a_left_padded_prefill_decodes_as_if_unpadded(impl):
    x, pads = inputs(), (0, 7)
    padded = [torch.full_like(t[:, :, :40], torch.nan if n else 0.0) for n, t in enumerate(x)]
    for to, t in zip(padded, x, strict=True):
        for row, pad in enumerate(pads):
            to[row, :, pad:] = t[row, :, : 40 - pad]
    mask = torch.arange(40) >= torch.tensor(pads)[:, None]
    right = formula(*x, horizon=200)
    out, state = attention_with_state(*padded, horizon=200, key_mask=mask, impl=impl)
    for row, pad in enumerate(pads):
        torch.testing.assert_close(out[row, :, pad:], right[row, :, : 40 - pad])
    for t in range(40, 45):
        token = [torch.stack([y[row, :, t - pad] for row, pad in enumerate(pads)]) for y in x]
        out = step(*token, state)
        for row, pad in enumerate(pads):
            torch.testing.assert_close(out[row], right[row, :, t - pad])


FAMILY = {
    "retention": {"gamma": torch.tensor([0.9, 0.99]), "normaliser": "none"},
    "gates": {"log_decay": -uniform(2, 2, LENGTH), "feature_map": "1+elu"},
    "turning gates": {"log_decay": -uniform(2, 2, LENGTH), "theta": 0.02, "normaliser": "none"},
    "scaled gates": {"log_decay": -uniform(2, 2, LENGTH), "normaliser": "none", "scale": 0.3},
    "cosine": {"feature_map": "relu", "theta": torch.tensor([0.01, 0.02])},
    "raised": {"feature_map": "relu", "theta": 0.3, "raised": True},
    "wider": {"feature_map": lambda x: torch.cat([x.exp(), (-x).exp()], -1)},
}


@every_impl
@pytest.mark.parametrize("options", FAMILY.values(), ids=FAMILY)
def test_streams_of_the_whole_family_equal_their_full_pass_with_gradients(options, impl):
    def split(*x):
        cuts = (0, 0, 1, 66, LENGTH)
        return in_pieces(linear_attention_with_state, x, cuts, impl=impl, **options)[0]

    def whole(*x):
        return linear_attention(*x, causal=True, impl="reference", **options)

    agree(split, whole, *inputs(), argument=LENGTH / 2)
