"""Memory that calls share is never seen in their results."""

import threading
from functools import partial

import pytest
import torch
from op_formula import results, tokens

from cosformer import attention, attention_with_state
from cosformer.ops import scratch
from cosformer.ops.scratch import KEPT_BYTES, forget


@pytest.fixture(autouse=True)
def start_without_memory():
    forget()
    yield
    forget()


def kept():
    return getattr(scratch._kept, "memory", None)


@pytest.mark.parametrize("causal", [True, False])
def test_a_second_call_leaves_the_results_of_the_first_alone(causal):
    first, second = (tokens(length=200, seed=seed) for seed in (0, 1))
    before = results(partial(attention, causal=causal), first)
    copies = [x.clone() for x in before]
    results(partial(attention, causal=causal), second)
    assert all(map(torch.equal, before, copies))


def test_a_state_survives_later_calls():
    first, second = (tokens(length=200, seed=seed) for seed in (0, 1))
    _, state = attention_with_state(*first, horizon=1000)
    key_value, key_sum = state.key_value.clone(), state.key_sum.clone()
    attention_with_state(*second, horizon=1000)
    assert torch.equal(state.key_value, key_value)
    assert torch.equal(state.key_sum, key_sum)


def test_what_was_left_in_the_memory_does_not_matter():
    inputs = tokens(length=200)
    clean = attention(*inputs, causal=True)
    kept().view(torch.float64).fill_(torch.nan)
    assert torch.equal(attention(*inputs, causal=True), clean)


def test_memory_from_inference_mode_serves_training():
    inputs = tokens(length=200)
    with torch.inference_mode():
        expected = attention(*inputs, causal=True)
    out = results(partial(attention, causal=True), inputs)[0]
    assert torch.equal(out, expected)


def test_threads_do_not_share():
    inputs = [tokens(length=500, seed=seed) for seed in range(4)]
    expected = [attention(*x, causal=True) for x in inputs]
    found = [None] * 4

    def work(i):
        for _ in range(20):
            found[i] = attention(*inputs[i], causal=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, expected))


def test_memory_is_kept_up_to_a_limit_and_given_up_on_demand():
    attention(*tokens(length=200), causal=True)
    assert 0 < kept().numel() <= KEPT_BYTES
    forget()
    assert kept() is None
    attention(*(torch.randn(64, 8, 64, 64) for _ in range(3)), causal=True)
    assert kept() is None
