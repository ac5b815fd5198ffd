"""Linformer, Nyströmformer, one-vs-each, Sinkhorn, Synthesizer: what is particular to each."""

import pytest
import torch
from mechanism_cases import LENGTH, draw, make, tokens
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.mechanisms.dense import one_vs_each
from cosformer.mechanisms.dense.nystromformer import pseudo_inverse
from cosformer.mechanisms.dense.one_vs_each import log_one_vs_each
from cosformer.mechanisms.patterns.sinkhorn import running_share

SQUARE_ROOT = 6**0.5  # of the width


def softmax(q, k):
    return (q @ k.mT / SQUARE_ROOT).softmax(-1)


def test_linformer_with_unit_projections_is_softmax():
    mechanism = make("linformer", max_length=LENGTH, projected=LENGTH)
    with torch.no_grad():
        mechanism.key_mix.copy_(torch.eye(LENGTH))
        mechanism.value_mix.copy_(torch.eye(LENGTH))
    q, k, _, _ = tokens(mechanism)
    assert_close(mechanism.weights(q, k), softmax(q, k))


def test_linformer_keys_behind_the_mask_are_zero_before_they_are_mixed():
    mechanism = make("linformer")
    q, k, v, _ = tokens(mechanism)
    mask = torch.arange(LENGTH).expand(2, -1) < 20
    out, _ = mechanism(q, k, v, key_mask=mask)
    cut = [mix[:, :20] for mix in (mechanism.key_mix, mechanism.value_mix)]
    keys, values = (mix @ x[:, :, :20] for mix, x in zip(cut, (k, v), strict=True))
    assert_close(out, softmax(q, keys) @ values)


@pytest.mark.parametrize("length", [16, LENGTH])
def test_nystromformer_with_a_landmark_for_every_token_is_softmax(length):
    mechanism = make("nystromformer", landmarks=64, iterations=20, kernel=0)
    q, k, _, _ = tokens(mechanism, length)
    assert_close(mechanism.weights(4 * q, k), softmax(4 * q, k), atol=1e-4, rtol=1e-3)


def test_the_iteration_reaches_the_inverse_of_each_matrix_by_itself():
    a = draw(3, 8, 8, seed=4).softmax(-1) * torch.tensor([1.0, 30.0, 0.01])[:, None, None]
    assert_close(pseudo_inverse(a, 30), torch.linalg.inv(a))
    assert_close(pseudo_inverse(a, 6)[1], pseudo_inverse(a[1:2], 6)[0])


def test_the_values_of_nystromformer_are_convolved_by_head():
    with_conv, without = make("nystromformer"), make("nystromformer", kernel=0)
    q, k, v, _ = tokens(with_conv)
    added = with_conv(q, k, v)[0] - without(q, k, v)[0]
    for head in range(2):
        kernel = with_conv.conv[head].expand(6, 1, -1)
        expected = F.conv1d(v[:, head].mT, kernel, padding=2, groups=6).mT
        assert_close(added[:, head], expected)


def test_one_vs_each_is_softmax_for_two_keys():
    mechanism = make("one-vs-each")
    q, k, _, _ = tokens(mechanism, LENGTH, keys=2)
    assert_close(mechanism.weights(q, k), softmax(q, k))


@pytest.mark.parametrize("causal", [False, True])
def test_one_vs_each_bounds_softmax_from_below(causal):
    mechanism, exact = make("one-vs-each"), make("softmax")
    q, k, _, _ = tokens(mechanism)
    bound, weights = (m.weights(3 * q, k, causal=causal) for m in (mechanism, exact))
    assert (bound <= weights + 1e-12).all()
    assert bound.sum(-1).min() < 0.5
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(0 if causal else LENGTH)
    order = [w[..., -1, :].argsort(-1) for w in (bound, weights)]
    assert torch.equal(*order)  # the same keys come first
    assert (bound > 0).equal(seen.expand_as(bound))


def test_one_vs_each_is_a_product_of_contests():
    score = draw(1, 1, 2, 7)
    seen = torch.ones_like(score, dtype=torch.bool)
    seen[..., 0, 4:] = False
    log = log_one_vs_each(score, seen)
    for i in range(2):
        real = [j for j in range(7) if seen[0, 0, i, j]]
        for j in real:
            others = [score[0, 0, i, j] - score[0, 0, i, m] for m in real if m != j]
            assert_close(log[0, 0, i, j].exp(), torch.stack(others).sigmoid().prod())


def test_one_vs_each_renormalised_sums_to_one():
    mechanism, plain = make("one-vs-each", renormalise=True), make("one-vs-each")
    q, k, _, _ = tokens(mechanism)
    assert mechanism.traits.normalised
    weights = plain.weights(q, k, causal=True)
    expected = weights / weights.sum(-1, keepdim=True)
    assert_close(mechanism.weights(q, k, causal=True), expected)


def test_one_vs_each_in_blocks_has_the_same_gradients(monkeypatch):
    seen = draw(2, 2, 9, 11, seed=2) > -1
    results = []
    for at_once in (10**6, 500, 50, 1):
        monkeypatch.setattr(one_vs_each, "SLICE", at_once)
        score = draw(2, 2, 9, 11).requires_grad_()
        log = log_one_vs_each(score, seen)
        results.append((log, *torch.autograd.grad((log * draw(*log.shape, seed=3)).sum(), score)))
    for found in results[1:]:
        assert_close(found, results[0])


def test_one_vs_each_keeps_no_cube_for_the_gradient():
    score = draw(1, 1, 200, 200).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        log_one_vs_each(score, torch.ones_like(score, dtype=torch.bool))
    assert max(kept, default=0) <= score.numel()


@pytest.mark.parametrize("length", [20, LENGTH])
def test_sinkhorn_balances_rows_and_columns(length):
    mechanism = make("sinkhorn", iterations=50)
    q, k, _, _ = tokens(mechanism, length)
    mixing = mechanism._log_permutation(q, k, causal=False).exp()
    blocks = -(-length // 5)
    assert mixing.shape == (2, 2, blocks, blocks)
    ones = torch.ones(2, 2, blocks, dtype=q.dtype)
    assert_close(mixing.sum(-1), ones)
    assert_close(mixing.sum(-2), ones, atol=1e-6, rtol=0)


def test_causal_sinkhorn_mixes_blocks_of_the_past():
    mechanism = make("sinkhorn")
    q, k, _, _ = tokens(mechanism)
    mixing = mechanism._log_permutation(q, k, causal=True).exp()
    assert not mixing.triu(0).any()
    sums = torch.ones(8, dtype=q.dtype)
    sums[0] = 0
    assert_close(mixing.sum(-1), sums.expand(2, 2, -1))


@pytest.mark.parametrize("name", ["synthesizer", "synthesizer-factorised"])
def test_random_synthesizers_do_not_look_at_the_tokens(name):
    mechanism = make(name)
    q, k, _, _ = tokens(mechanism)
    weights = mechanism.weights(q, k)
    assert torch.equal(weights, mechanism.weights(k, q))
    if name == "synthesizer":
        score = mechanism.table
    else:
        score = mechanism.rows @ mechanism.columns.mT
    assert_close(weights[1], score[:, :LENGTH, :LENGTH].softmax(-1))


def test_the_dense_synthesizer_makes_a_row_of_scores_from_each_query():
    mechanism = make("synthesizer-dense")
    q, k, _, _ = tokens(mechanism)
    weights = mechanism.weights(q, k)
    for head in range(2):
        hidden = F.linear(q[:, head], mechanism.hidden[head], mechanism.hidden_bias[head, 0])
        score = F.linear(hidden.relu(), mechanism.output[head], mechanism.output_bias[head])
        assert_close(weights[:, head], score[..., :LENGTH].softmax(-1))
    assert torch.equal(weights, mechanism.weights(q, 2 * k))


def test_shares_of_sinkhorn_are_of_the_rows_so_far_and_have_second_derivatives():
    x = 30 * draw(2, 5, 5, seed=1)
    found = running_share(x)
    for row in range(5):
        for column in range(row + 1):
            sums = x[:, column : row + 1, column].logsumexp(1)
            assert_close(found[:, row, column], x[:, row, column] - sums)

    def shares(x):
        return running_share(x).tril().exp()

    small = draw(1, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(shares, small)
    assert torch.autograd.gradgradcheck(shares, small)
