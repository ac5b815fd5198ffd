"""A decay's gradient by its kernel, under Triton's interpreter, against the formula in torch."""

import pytest
from gates_cases import LENGTHS, check_balanced, dots
from kernel_cases import results
from op_formula import tokens, uniform
from torch.testing import assert_close

from cosformer import linear_attention
from cosformer.ops.autograd import balance

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_it_is_the_formula_in_float64(length, scale):
    check_balanced(length, scale)


def test_only_rows_with_an_L_of_their_own_are_served(monkeypatch):
    by_query, _, decay = dots(5)
    assert not balance.is_served(by_query, decay)  # on a CPU
    monkeypatch.setattr(balance, "kernels_serve", lambda x: True)
    assert balance.is_served(by_query, decay)
    assert not balance.is_served(by_query, decay[:1])


@pytest.mark.parametrize("normaliser", ["none", "sum"])
def test_gates_have_the_same_gradient_by_either(normaliser, monkeypatch):
    q, k, v = (x.float() for x in tokens(2, 4, 70, kv_heads=2))
    served, found = [], []
    own = balance.balanced
    monkeypatch.setattr(balance, "balanced", lambda *given: (served.append(1), own(*given))[1])

    def call(q, k, v, decay):
        return linear_attention(
            q.abs(), k.abs(), v, causal=True, normaliser=normaliser, log_decay=decay, impl="triton"
        )

    for kernel in (False, True):
        monkeypatch.setattr(balance, "kernels_serve", lambda x, kernel=kernel: kernel)
        found.append(results(call, [q, k, v, -uniform(2, 2, 70).float()]))
    assert served == [1]
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
