"""How a sequence is cut, and the memory that calls share, which is never seen in their results."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from formula import tokens
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cosformer import attention, linear_attention
from cosformer.ops.chunked import chunks
from cosformer.ops.chunked.chunks import KEPT_BYTES, Span, forget, plan
from cosformer.ops.problem import FEATURE_MAPS

PLANS = {
    (40, 8, "cpu"): (Span(0, 40, 1, 40),),
    (1000, 8, "cpu"): (Span(0, 512, 8, 64), Span(512, 960, 7, 64), Span(960, 1000, 1, 40)),
    (2000, 8, "cuda"): (Span(0, 1984, 31, 64), Span(1984, 2000, 1, 16)),
    (128, 5000, "cpu"): (Span(0, 64, 1, 64), Span(64, 128, 1, 64)),
}


@pytest.mark.parametrize("call", PLANS, ids=str)
def test_whole_chunks_go_in_groups_and_the_rest_is_a_shorter_one(call):
    length, heads, device = call
    assert plan(length, length, heads, device) == (PLANS[call], PLANS[call])


@pytest.fixture(autouse=True)
def start_without_memory():
    forget()
    yield
    forget()


def kept():
    return getattr(chunks._kept, "memory", None)


def test_what_was_left_in_the_memory_does_not_matter():
    inputs = tokens(length=200)
    clean = attention(*inputs, causal=True)
    kept().view(torch.float64).fill_(torch.nan)
    assert torch.equal(attention(*inputs, causal=True), clean)


def test_threads_at_work_at_once_get_their_own_results():
    inputs = [tokens(length=500, seed=seed) for seed in range(4)]
    expected = [attention(*x, causal=True) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: attention(*x, causal=True), inputs * 20))
    assert all(map(torch.equal, found, expected * 20))


def test_a_call_within_a_sweep_gets_other_memory(monkeypatch):
    first, second = (tokens(length=200, seed=seed) for seed in (0, 1))
    call = partial(linear_attention, *first, feature_map="silu", causal=True)
    expected = call()
    attention(*second, causal=True)  # leaves a piece that is large enough for both
    silu = FEATURE_MAPS["silu"]

    def interrupted(x, out):
        attention(*second, causal=True)
        return silu.into(x, out)

    monkeypatch.setitem(FEATURE_MAPS, "silu", silu._replace(into=interrupted))
    assert torch.equal(call(), expected)


def test_fake_tensors_neither_get_nor_leave_memory():
    inputs = tokens(length=200)
    attention(*inputs, causal=True)
    real = kept()
    with FakeTensorMode() as mode:
        out = attention(*map(mode.from_tensor, inputs), causal=True)
    assert out.shape == inputs[0].shape
    assert kept() is real
    forget()
    with mode:
        attention(*map(mode.from_tensor, inputs), causal=True)
    assert kept() is None


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_traced_graph_holds_no_memory_of_the_thread(pre_dispatch):
    first, second = (tokens(length=200, seed=seed) for seed in (0, 1))
    call = partial(attention, causal=True)
    call(*first)
    graph = make_fx(call, pre_dispatch=pre_dispatch)(*first)
    constants = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    assert torch.uint8 not in [constant.dtype for constant in constants]
    assert torch.equal(graph(*second), call(*second))


def test_memory_is_kept_up_to_a_limit_and_given_up_on_demand():
    attention(*tokens(length=200), causal=True)
    assert 0 < kept().numel() <= KEPT_BYTES
    forget()
    assert kept() is None
    attention(*(torch.randn(64, 8, 64, 64) for _ in range(3)), causal=True)
    assert kept() is None
