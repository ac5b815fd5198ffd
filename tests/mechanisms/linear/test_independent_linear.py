"""The linear family against packages written by others, and where they are wrong, how."""

import pytest
import torch
from independent import package
from mechanism_cases import LENGTH, draw, make, stream, tokens
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.ops.features.rotary import rotate

FLOAT32 = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}  # what these packages compute in


def token_major(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def test_performer_is_that_of_performer_pytorch_without_its_epsilon():
    theirs = package("performer_pytorch.performer_pytorch")
    mechanism = make("performer", width=8)
    q, k, v, _ = tokens(mechanism)
    projection = mechanism.projection
    features = [
        theirs.softmax_kernel(x, projection_matrix=projection, is_query=is_query, eps=0)
        for x, is_query in ((q, True), (k, False))
    ]
    assert_close(mechanism(q, k, v)[0], theirs.linear_attention(*features, v))


def test_performer_draws_directions_as_performer_pytorch_does():
    theirs = package("performer_pytorch.performer_pytorch")
    mechanism = make("performer", width=8, features=20)
    torch.manual_seed(0)
    for matrix in (mechanism.projection, theirs.gaussian_orthogonal_random_matrix(20, 8).double()):
        for block in matrix.split(8):
            gram = block @ block.mT
            assert_close(gram, gram.diag().diag(), atol=1e-5, rtol=0)
            assert gram.diag().std() > 0.1  # lengths are drawn, too


def test_rotations_are_those_of_rotary_embedding_torch():
    theirs = package("rotary_embedding_torch").RotaryEmbedding(8)
    x = draw(2, 3, 20, 8, dtype=torch.float32)
    right = theirs.rotate_queries_or_keys(x)
    assert_close(rotate(x, torch.arange(20)[None]), right, rtol=1e-5, atol=1e-5)


def test_rope_linear_turns_the_numerator_of_linear_attention_only():
    theirs = package("rotary_embedding_torch").RotaryEmbedding(8).double()
    mechanism = make("rope-linear", width=8)
    q, k, v, _ = tokens(mechanism)
    q_features, k_features = F.elu(q) + 1, F.elu(k) + 1
    turned = (
        theirs.rotate_queries_or_keys(q_features) @ theirs.rotate_queries_or_keys(k_features).mT
    )
    right = turned @ v / (q_features @ k_features.mT).sum(-1, keepdim=True)
    assert_close(mechanism(q, k, v)[0], right, rtol=1e-5, atol=1e-6)  # its angles are float32


def fla_linear(naive, q, k, v):
    rows = token_major(F.elu(q) + 1, F.elu(k) + 1, v)
    return naive.naive_recurrent_linear_attn(*rows, normalize=True)[0].transpose(1, 2)


def fla_based(naive, q, k, v):
    return naive.naive_parallel_based(q.float(), k.float(), v.float())


def fla_retention(naive, q, k, v):
    return naive.naive_retention(q, k, v)


def fla_gated_linear(naive, q, k, v, gate):
    rows = token_major(q, k, v, F.logsigmoid(gate) / 16)
    return naive.naive_recurrent_simple_gla(*rows)[0].transpose(1, 2)


def fla_gated_delta(naive, q, k, v, beta, gate):
    rows = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta.sigmoid()
    rows = token_major(*rows, F.logsigmoid(gate) / 2)
    return naive.naive_recurrent_gated_delta_rule(*rows)[0].transpose(1, 2)


FLA = [
    ("linear", "linear_attn", {}, fla_linear),
    ("based", "based", {"features": 6}, fla_based),  # as wide as q: nothing is projected
    ("retention", "retention", {}, fla_retention),
    ("gated-linear", "simple_gla", {}, fla_gated_linear),
    ("gated-delta", "gated_delta_rule", {"temperature": 2.0}, fla_gated_delta),
]


@pytest.mark.parametrize(("name", "module", "options", "formula"), FLA)
def test_the_linear_family_is_that_of_fla(name, module, options, formula):
    naive = package(f"fla.ops.{module}.naive")
    mechanism = make(name, **options)
    q, k, v, controls = tokens(mechanism)
    out, _ = mechanism(q, k, v, causal=True, controls=controls)
    assert_close(out, formula(naive, q, k, v, *controls.values()), **FLOAT32)


def test_delta_is_the_recurrence_of_fla():
    naive = package("fla.ops.delta_rule.naive")
    mechanism = make("delta", features="relu")
    *rows, controls = tokens(mechanism)
    unit_q, unit_k = (F.normalize(x.relu(), dim=-1) for x in rows[:2])
    right = naive.delta_rule_recurrence(unit_q, unit_k, rows[2], controls["beta"].sigmoid())
    out, state = stream(mechanism, rows, controls, (LENGTH,))
    assert_close((out, state.value), right, **FLOAT32)
