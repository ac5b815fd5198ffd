"""The contract: what holds for every mechanism of the table, by what its traits claim."""

import pytest
import torch
from mechanism_cases import (
    CASES,
    F64,
    HEADS,
    LENGTH,
    NAMES,
    STREAMS,
    by_steps,
    cases_where,
    cut,
    draw,
    make,
    names_where,
    stream,
    tokens,
)
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from cosformer.mechanisms.linear import delta_rule
from cosformer.ops.chunked import chunks as span

every_case = pytest.mark.parametrize(("name", "causal"), CASES)
PADDED = cases_where(mask=(True,))
NOISE = 1e3  # what stands where nobody may look


@pytest.mark.parametrize("name", names_where(causal=("exact",)))
def test_future_tokens_do_not_change_the_past(name):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    before, _ = mechanism(q, k, v, causal=True, controls=controls)
    for seed, cut_at in enumerate((1, 16, 17, LENGTH - 1)):
        changed = [x.clone() for x in (q, k, v)]
        others = {key: value.clone() for key, value in controls.items()}
        for x in (*changed, *others.values()):
            future = x[:, :, cut_at:]
            future += 10 * draw(*future.shape, seed=seed)
        after, _ = mechanism(*changed, causal=True, controls=others)
        assert_close(after[:, :, :cut_at], before[:, :, :cut_at])
        assert not torch.allclose(after[:, :, cut_at:], before[:, :, cut_at:])


SIZES = [(False, 0), (False, 1), (False, 2), (False, LENGTH), (True, LENGTH)]


@pytest.mark.parametrize(
    ("name", "causal", "masked", "length"),
    [(*case, *size) for size in SIZES for case in cases_where(mask=(size[0], True))],
)
def test_the_fast_path_is_the_dense_matrix_times_v(name, causal, masked, length):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism, length, value_width=5)
    mask = draw(2, length, seed=9) > -0.8 if masked else None
    options = {"causal": causal, "key_mask": mask, "controls": controls}
    out, state = mechanism(q, k, v.requires_grad_(), **options)
    assert state is None
    weights = mechanism.weights(q, k, **options)
    assert weights.shape == (2, HEADS, length, length)
    assert_close(out, weights @ v)
    if masked:
        assert not weights.movedim(1, -1)[~mask[:, None].expand(-1, length, -1)].any()
    out.sum().backward()


@pytest.mark.parametrize(("name", "causal"), cases_where(cross=(True,)))
@pytest.mark.parametrize(("queries", "keys"), [(9, 20), (20, 9), (9, 0), (0, 9)])
def test_queries_of_another_sequence(name, causal, queries, keys):
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, queries, keys=keys)
    out, _ = mechanism(q, k, v, causal=causal)
    assert_close(out, mechanism.weights(q, k, causal=causal) @ v)
    if causal:  # the last query stands at the last key, unless start says otherwise
        assert_close(out, mechanism(q, k, v, causal=True, start=keys - queries)[0])
        early = mechanism.weights(q, k, causal=True, start=0)
        assert not early.triu(1).any()
        assert_close(mechanism(q, k, v, causal=True, start=0)[0], early @ v)


@every_case
def test_grouped_heads_are_repeated_heads(name, causal):
    grouped, plain = make(name, heads=4, key_heads=2), make(name, heads=4)
    q, k, v, controls = tokens(grouped)
    out, _ = grouped(q, k, v, causal=causal, controls=controls)
    assert_close(out, grouped.weights(q, k, causal=causal, controls=controls)
                 @ v.repeat_interleave(2, 1))  # fmt: skip
    shared = [p.shape for p in grouped.parameters()] == [p.shape for p in plain.parameters()]
    if shared and grouped.traits.positions != "relative":  # a decay per head is one per key head
        repeated = {key: x.repeat_interleave(2, 1) for key, x in controls.items()}
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        plain.load_state_dict(grouped.state_dict())
        assert_close(out, plain(q, k, v, causal=causal, controls=repeated)[0])


@pytest.mark.parametrize("name", STREAMS)
def test_gradients_flow_through_the_state_of_a_stream(name):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    leaves = [x.requires_grad_() for x in (q, k, v, *controls.values())]
    cotangent = draw(*v.shape, seed=8)
    whole, _ = mechanism(q, k, v, causal=True, controls=controls)
    parts, _ = stream(mechanism, (q, k, v), controls, (13, 1, LENGTH - 14))
    streamed, right = (
        torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)
        for out in (parts, whole)
    )
    assert_close(streamed, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name, causal in PADDED if causal and name in STREAMS])
def test_a_stream_goes_on_from_a_padded_prompt(name):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, :5] = False
    whole, _ = mechanism(q, k, v, causal=True, key_mask=mask, controls=controls)
    state = mechanism.empty_state(k, v)
    for now in (slice(0, 12), slice(12, 20)):
        given = (x[:, :, now] for x in (q, k, v))
        out, state = mechanism(
            *given, causal=True, state=state, key_mask=mask[:, now] if now.start == 0 else None,
            controls=cut(controls, now),
        )  # fmt: skip
        assert_close(out, whole[:, :, now])
    with torch.no_grad():
        rest = by_steps(mechanism, (q, k, v), controls, state, first=20)
    assert_close(rest, whole[:, :, 20:])
    short = [x[1:, :, 5:] for x in (q, k, v)]
    alone, _ = mechanism(*short, causal=True, controls=cut({n: c[1:] for n, c in controls.items()},
                                                           slice(5, None)))  # fmt: skip
    assert_close(whole[1:, :, 5:], alone)


@pytest.mark.parametrize("name", STREAMS)
def test_the_state_is_as_large_as_it_is_said_to_be(name):
    mechanism = make(name)
    sizes = []
    for length in (5, LENGTH):
        q, k, v, controls = tokens(mechanism, length, batch=1)
        _, state = stream(mechanism, (q, k, v), controls, (length,))
        found = filter(torch.is_tensor, pytree.tree_leaves(state))
        sizes.append(sum(x.numel() for x in found if x.is_floating_point()))
        assert sizes[-1] == mechanism.state_size(length)
    if mechanism.traits.state == "constant":
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("name", "causal"), PADDED)
def test_padding_changes_nothing(name, causal, side):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism, 20)
    out, _ = mechanism(q, k, v, causal=causal, controls=controls)
    noise = [NOISE * x[:, :, :7] for x in (q, k, v)]
    order = slice(None, None, -1) if side == "left" else slice(None)

    def pad(x, other):
        return torch.cat([x, other][order], 2)

    longer = [pad(x, n) for x, n in zip((q, k, v), noise, strict=True)]
    controls = {key: pad(x, x[:, :, :7]) for key, x in controls.items()}
    real = torch.cat([torch.ones(2, 20), torch.zeros(2, 7)][order], 1).bool()
    padded, _ = mechanism(*longer, causal=causal, key_mask=real, controls=controls)
    assert_close(padded[:, :, real[0]], out)


@every_case
def test_the_length_of_chunks_does_not_matter(name, causal, monkeypatch):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    out, _ = mechanism(q, k, v, causal=causal, controls=controls)
    for length in (5, 64):
        for module in (span, delta_rule):
            monkeypatch.setattr(module, "CHUNK_LENGTH", length)
        assert_close(mechanism(q, k, v, causal=causal, controls=controls)[0], out)


@every_case
def test_items_of_a_batch_do_not_see_each_other(name, causal):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism, batch=3)
    k = k * torch.tensor([1.0, 3.0, 0.2], dtype=F64)[:, None, None, None]
    out, _ = mechanism(q, k, v, causal=causal, controls=controls)
    for n in range(3):
        one = slice(n, n + 1)
        mine = {key: x[one] for key, x in controls.items()}
        alone, _ = mechanism(q[one], k[one], v[one], causal=causal, controls=mine)
        assert_close(out[one], alone)


@every_case
def test_constant_values(name, causal):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    zeros, _ = mechanism(q, k, torch.zeros_like(v), causal=causal, controls=controls)
    assert not zeros.any()
    ones, _ = mechanism(q, k, torch.ones_like(v), causal=causal, controls=controls)
    assert torch.allclose(ones, torch.ones_like(ones)) == mechanism.traits.normalised


@pytest.mark.parametrize("name", names_where(positions=("none",), full=(True,)))
def test_keys_without_positions_may_stand_in_any_order(name):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    out, _ = mechanism(q, k, v, controls=controls)
    mixed = {key: x[:, :, order] for key, x in controls.items()}
    assert_close(mechanism(q, k[:, :, order], v[:, :, order], controls=mixed)[0], out)


@every_case
def test_gradients_are_those_of_finite_differences(name, causal):
    mechanism = make(name, heads=1, width=4)
    q, k, v, controls = tokens(mechanism, 9, batch=1)
    parameters = [p for p in mechanism.parameters() if p.requires_grad]
    inputs = [x.requires_grad_() for x in (q, k, v, *controls.values())]

    def attend(q, k, v, *rest):
        given = dict(zip(controls, rest, strict=False))
        return mechanism(q, k, v, causal=causal, controls=given)[0]

    assert torch.autograd.gradcheck(attend, (*inputs, *parameters), fast_mode=True)


@every_case
@pytest.mark.parametrize("length", [5, 20])
def test_a_batch_of_nothing(name, causal, length):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism, length, batch=0, value_width=3)
    options = {"causal": causal, "controls": controls}
    masks = [None, torch.ones(0, length, dtype=torch.bool)] if mechanism.traits.mask else [None]
    for mask in masks:
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out, _ = mechanism(*given, key_mask=mask, **options)
        assert out.shape == (0, HEADS, length, 3)
        out.sum().backward()
        weights = mechanism.weights(q, k, key_mask=mask, **options)
        assert weights.shape == (0, HEADS, length, length)
        if causal and name in STREAMS:
            state = mechanism.empty_state(k, v)
            out, _ = mechanism(q, k, v, state=state, key_mask=mask, **options)
            assert out.shape == (0, HEADS, length, 3)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_are_made_of_inputs_in_any_dtype(name, causal, dtype):
    """As outputs are: parameters have one of their own."""
    mechanism = make(name).float()
    q, k, v, controls = tokens(mechanism, dtype=dtype)
    weights = mechanism.weights(q, k, causal=causal, controls=controls)
    out, _ = mechanism(q, k, v, causal=causal, controls=controls)
    assert weights.dtype == out.dtype == dtype
    assert_close((weights @ v).float(), out.float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", names_where(full=(True,), cross=(True,)))
def test_queries_may_be_cut_anywhere_among_padded_keys(name):
    mechanism = make(name)
    for queries in (9, 20):  # fewer than keys, or by chance as many
        q, k, v, _ = tokens(mechanism, queries, keys=20)
        mask = torch.arange(20) >= torch.tensor([[0], [6]])
        whole, _ = mechanism(q, k, v, key_mask=mask)
        for start, piece in zip((0, 1, 4), q.split([1, 3, queries - 4], 2), strict=True):
            out, _ = mechanism(piece, k, v, key_mask=mask, start=start)
            assert_close(out, whole[:, :, start : start + piece.shape[2]])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [-1, 1.5, "4", True, None])
def test_only_a_length_has_a_cost(name, length):
    mechanism = make(name)
    counts = [mechanism.cost]
    if mechanism.traits.state != "none":
        counts.append(mechanism.state_size)
    for count in counts:
        with pytest.raises((ValueError, TypeError), match="length must be"):
            count(length)
