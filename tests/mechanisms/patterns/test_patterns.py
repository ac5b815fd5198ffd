"""Masked patterns: the pairs of the formula and no others, by every implementation."""

import pytest
import torch
from mechanism_cases import LENGTH, OPTIONS, cases_where, draw, make, results, tokens
from torch.testing import assert_close

from cosformer.mechanisms.patterns import blocked

PATTERNS = ("local", "longformer", "sparse", "sparse-strided", "bigbird")
CASES = [case for case in cases_where() if case[0] in PATTERNS]
every_pattern = pytest.mark.parametrize("name", PATTERNS)
every_case = pytest.mark.parametrize(("name", "causal"), CASES)


def formula(mechanism, i, j, length):
    """Whether i sees j, in the words of the papers."""
    match type(mechanism).__name__:
        case "Local":
            return abs(i - j) <= 4
        case "Longformer":
            return abs(i - j) <= 3 or i < 2 or j < 2
        case "SparseFixed":
            return i // 6 == j // 6 or j % 6 in (4, 5)
        case "SparseStrided":
            return abs(i - j) < 5 or (i - j) % 5 == 0
        case "BigBird":
            row, column, last = i // 3, j // 3, (length - 1) // 3
            near = abs(row - column) <= 1 or {row, column} & {0, last}
            return near or column in mechanism.drawn(length)[row]


def dense_mask(mechanism, length, causal):
    rows = [
        [formula(mechanism, i, j, length) and (j <= i or not causal) for j in range(length)]
        for i in range(length)
    ]
    return torch.tensor(rows, dtype=torch.bool)


@every_case
@pytest.mark.parametrize("length", [1, 2, 17, 36, 37])
@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_the_pairs_are_those_of_the_formula(name, causal, length, impl):
    mechanism = make(name, impl=impl)
    q, k, _, _ = tokens(mechanism, length)
    v = torch.eye(length, dtype=q.dtype).expand(2, 2, -1, -1)  # out = weights
    out, _ = mechanism(q, k, v, causal=causal)
    mask = dense_mask(mechanism, length, causal)
    assert torch.equal(out != 0, mask.expand_as(out))
    score = (q @ k.mT / mechanism.width**0.5).masked_fill(~mask, -torch.inf)
    rows = slice(2, None) if name == "longformer" else slice(None)  # global rows: see below
    assert_close(out[:, :, rows], score.softmax(-1)[:, :, rows])


@every_case
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_have_the_gradients_of_the_reference(name, causal, masked, monkeypatch):
    monkeypatch.setattr(blocked, "SLICE", 500)  # several slices
    mask = draw(2, LENGTH, seed=3) > -0.7 if masked else None
    both = [make(name, impl=impl, heads=4, key_heads=2) for impl in ("reference", "blocked")]
    inputs = tokens(both[0], value_width=3)[:3]
    assert_close(*(results(each, inputs, causal=causal, key_mask=mask) for each in both))


@pytest.mark.parametrize("name", ["local", "sparse-strided"])
def test_blocks_have_gradients_of_gradients(name):
    mechanism = make(name, impl="blocked", heads=1, width=2)
    inputs = [x.requires_grad_() for x in tokens(mechanism, 9, batch=1)[:3]]
    assert torch.autograd.gradgradcheck(lambda *x: mechanism(*x, causal=True)[0], inputs)


@every_pattern
def test_blocks_keep_nothing_longer_than_the_tokens_for_the_gradient(name):
    mechanism = make(name, impl="blocked")
    inputs = [x.requires_grad_() for x in tokens(mechanism, 500)[:3]]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        mechanism(*inputs)
    assert kept
    assert max(x.numel() for x in kept) <= inputs[0].numel()


@pytest.mark.parametrize("name", ["local", "sparse-strided"])
@pytest.mark.parametrize(("queries", "keys"), [(20, 37), (37, 20), (1, 30)])
@pytest.mark.parametrize("start", [None, 0, 7, 60])
def test_blocks_serve_queries_at_any_position(name, queries, keys, start):
    mechanism, reference = make(name, impl="blocked"), make(name, impl="reference")
    q, k, v, _ = tokens(mechanism, queries, keys=keys)
    for causal in (False, True):
        out, _ = mechanism(q, k, v, causal=causal, start=start)
        assert_close(out, reference(q, k, v, causal=causal, start=start)[0])


def test_the_stride_of_a_call_is_the_root_of_its_length():
    mechanism, fixed = make("sparse-strided", stride=None), make("sparse-strided", stride=6)
    q, k, v, _ = tokens(mechanism)
    assert_close(mechanism(q, k, v, causal=True)[0], fixed(q, k, v, causal=True)[0])
    with pytest.raises(ValueError, match="stride must be a number for a stream, got None"):
        mechanism.empty_state(k, v)
    assert (mechanism.traits.growth, fixed.traits.growth) == ("n√n", "n²")


def test_random_blocks_are_drawn_from_the_seed_in_training_and_evaluation():
    mechanism = make("bigbird", random_blocks=2)
    assert mechanism.traits.multiple_of == 3
    before = mechanism.train().drawn(90)
    assert mechanism.eval().drawn(90) == before
    assert make("bigbird", random_blocks=2, seed=1).drawn(90) != before
    for row, columns in enumerate(before):
        assert len(set(columns)) == 2
        assert not set(columns) & {0, row - 1, row, row + 1, 29}
    assert make("bigbird", random_blocks=2).drawn(9) == [[0, 0], [1, 1], [2, 2]]  # none is left


def test_global_tokens_have_projections_of_their_own():
    mechanism = make("longformer")
    q, k, _, _ = tokens(mechanism)
    query = torch.einsum("bhtd,hed->bhte", q, mechanism.global_query)
    key = torch.einsum("bhtd,hed->bhte", k, mechanism.global_key)
    expected = (query @ key.mT / mechanism.width**0.5).softmax(-1)
    weights = mechanism.weights(q, k)
    assert_close(weights[:, :, :2], expected[:, :, :2])
    assert not torch.allclose(weights[:, :, 2:], expected[:, :, 2:])


def test_global_tokens_begin_with_the_projections_of_all():
    torch.manual_seed(0)
    mechanism = type(make("longformer"))(2, 6, **OPTIONS["longformer"]).double()
    q, k, _, _ = tokens(mechanism)
    plain = (q @ k.mT / 6**0.5).softmax(-1)
    assert_close(mechanism.weights(q, k)[:, :, :2], plain[:, :, :2])


STARTS = [("sparse", None), *(("sparse-strided", start) for start in (None, -5, 0, 9))]


@pytest.mark.parametrize(("name", "start"), STARTS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_stride_beyond_the_sequence_costs_nothing(name, start, causal):
    """Scores of whole strides would have 10¹² numbers."""
    mechanism = make(name, stride=10**6, impl="blocked")
    q, k, v, _ = tokens(mechanism, 30 if name == "sparse" else 20, keys=30)
    out, _ = mechanism(q, k, v, causal=causal, start=start)
    assert_close(out, mechanism.weights(q, k, causal=causal, start=start) @ v)
