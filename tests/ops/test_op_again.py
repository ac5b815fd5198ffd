"""A call like an earlier one is not checked again, and computes what an ordinary one does."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import stub_driver
import torch
from stub_driver import (
    FAMILY,
    attention,
    both_passes,
    check_again,
    cosine,
    leaves,
    linear_attention,
    qkv,
)
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import cosformer
from cosformer.ops import again, chunked, hopper
from cosformer.ops.autograd import given_for, kernels
from cosformer.ops.autograd.gates import gradient_of_gates, with_sums
from cosformer.ops.autograd.repeated import Repeated

COSINE = {
    "causal": {"causal": True},
    "both ways": {},
    "fewer keys": {"keys": 70},
    "wide": {"width": 128},
    "decaying": {"causal": True, "decay": 0.9},
    "decaying, both ways": {"decay": 0.9},
}


@pytest.mark.parametrize("name", [*COSINE, *FAMILY])
@pytest.mark.parametrize("length", [100, 6000])
@pytest.mark.parametrize("graded", [True, False])
def test_it_launches_what_an_ordinary_call_launches(
    driver, ordinary, monkeypatch, name, length, graded
):
    options = dict(COSINE.get(name) or FAMILY.get(name) or {})
    sizes = {each: options.pop(each) for each in ("keys", "width") if each in options}
    call = linear_attention if name in FAMILY else attention

    def both(seed):
        inputs = (leaves if graded else qkv)(length, seed=seed, **sizes)
        grad = qkv(length, seed=seed + 9, **sizes)[0] if graded else None
        driver.launches.clear()
        return both_passes(inputs, grad, call, **options), driver.launches[:]

    check_again(both, ordinary, monkeypatch)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("call", [attention, linear_attention])
def test_gates_of_other_values_are_summed_anew_and_get_gradients(
    driver, ordinary, monkeypatch, call, causal
):
    options = {"normaliser": "none"} if call is linear_attention else {}

    def both(seed):
        inputs = leaves(seed=seed)
        gates = -torch.rand(1, 2, 100, generator=torch.Generator().manual_seed(seed))
        gates.requires_grad_()
        driver.launches.clear()
        out = call(*inputs, causal=causal, log_decay=gates, **options)
        found = torch.autograd.grad(out, [*inputs, gates], qkv(seed=9)[0])
        return [stub_driver.head(x) for x in (out, *found[:3])], driver.launches[:]

    check_again(both, ordinary, monkeypatch)
    assert list(again._calls.values()) != [None]


def others():
    """Calls that differ from `attention(*qkv(), causal=True)` in one thing each."""
    q, k, v = qkv()
    yield "a whole number", lambda: attention(q, k, v, causal=True, eps=1)
    yield "a horizon", lambda: attention(q, k, v, causal=True, horizon=200.0)
    yield "other strides", lambda: attention(q.mT.contiguous().mT, k, v, causal=True)
    yield "another length", lambda: attention(*qkv(99), causal=True)
    moved = torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape)
    yield "not at 16 bytes", lambda: attention(moved, k, v, causal=True)
    mask = torch.ones(1, 100, dtype=torch.bool)
    yield "a mask", lambda: attention(q, k, v, causal=True, key_mask=mask)
    yield "learned", lambda: attention(q, k, v, causal=True, decay=torch.tensor([0.9, 0.8]))
    gates = -torch.rand(1, 2, 100)
    yield "gates", lambda: attention(q, k, v, causal=True, log_decay=gates)
    yield (
        "gates of a class",
        lambda: attention(q, k, v, causal=True, log_decay=gates.as_subclass(wider)),
    )
    wider = type("Wider", (torch.Tensor,), {})
    yield "a subclass", lambda: attention(q.as_subclass(wider), k, v, causal=True)


@pytest.mark.parametrize("name", [name for name, _ in others()])
def test_what_differs_is_checked(driver, ordinary, name):
    attention(*qkv(), causal=True)
    attention(*qkv(), causal=True, eps=1.0)
    ordinary.clear()
    dict(others())[name]()
    assert len(ordinary) == 1


def test_under_a_mode_and_in_a_capture_every_call_is_checked(driver, ordinary):
    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    attention(*qkv(), causal=True)
    ordinary.clear()
    with Passes():
        attention(*qkv(), causal=True, impl="chunked")
    driver.captures = 1
    attention(*qkv(), causal=True)
    assert len(ordinary) == 2


def test_tensors_are_not_kept(driver):
    q, k, v = qkv()
    kept = [weakref.ref(x) for x in (q, k, v)]
    attention(q, k, v, causal=True)
    del q, k, v
    gc.collect()
    assert not any(x() is not None for x in kept)


def test_only_so_many_are_remembered(driver, monkeypatch):
    monkeypatch.setattr(again, "CALLS", 3)
    for length in range(10, 16):
        attention(*qkv(length), causal=True)
    assert len(again._calls) == 3


def test_tables_that_would_fill_the_memory_are_not_kept(driver, monkeypatch):
    monkeypatch.setattr(again, "MOST_KEPT", 8 * 2 * 100 - 1)  # L of two heads
    linear_attention(*qkv(), **FAMILY["retention"])
    assert list(again._calls.values()) == [None]


class NoTapes(dict):
    """Every pass was tried, and none could be repeated."""

    def __contains__(self, key):
        return True


@pytest.mark.parametrize("name", ["apart", "gated", "q is k", "k is made of q", "v is k"])
def test_second_derivatives_are_those_of_an_ordinary_call(monkeypatch, name):
    def backward(given, *about):
        found = chunked.backward(with_sums(given), *about)
        if not given.options.gated or found.decay is None:
            return found
        return found._replace(decay=gradient_of_gates(found.decay, given.decay, -800.0))

    monkeypatch.setattr(kernels, "forward", lambda given: chunked.forward(with_sums(given)))
    monkeypatch.setattr(kernels, "backward", backward)
    q, k, v = leaves = [x.double().requires_grad_() for x in qkv(20)]
    gates = None
    if name == "gated":
        gates = (-torch.rand(1, 2, 20, dtype=torch.float64)).requires_grad_()
        leaves.append(gates)
    elif name != "apart":
        k = {"q is k": q, "k is made of q": 0.7 * q + 0.1, "v is k": v}[name]
        del leaves[1]
    options = cosine.Arguments(
        **stub_driver.COSINE | {"causal": True, "log_decay": gates, "impl": "chunked"}
    )
    problem = cosine._problem(q, k, options)
    given = given_for(q, k, v, problem, None, impl="chunked", keep_state=False)
    of_kernels = given.options._replace(impl="hopper", gated=gates is not None)
    repeated = Repeated(None, given.constants, of_kernels)
    repeated._tapes = NoTapes()

    def derivatives(out):
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        total = sum(x.square().sum() for x in first)
        return *first, *torch.autograd.grad(total, leaves, retain_graph=True)

    ordinary = cosformer.attention(q, k, v, causal=True, log_decay=gates, impl="chunked")
    assert_close(derivatives(repeated(q, k, v, gates)), derivatives(ordinary))


def warmed(driver, inputs, grad, **options):
    """The call after it was made often enough to be on tape, forward and backward."""
    for _ in range(3):
        both_passes(inputs, grad, causal=True, **options)
    (call,) = again._calls.values()
    assert all(call._tapes.values())
    return call


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, True), (False, False, True)])
def test_gradients_that_nobody_asks_for_are_not_launched(driver, monkeypatch, asked):
    inputs, grad = leaves(), qkv(seed=9)[0]
    warmed(driver, inputs, grad)
    chosen = [x.detach().requires_grad_(each) for x, each in zip(inputs, asked, strict=True)]
    wanted = [x for x in chosen if x.requires_grad]

    def call():
        driver.launches.clear()
        found = torch.autograd.grad(attention(*chosen, causal=True), wanted, grad)
        return [stub_driver.head(x) for x in found], driver.launches[:]

    right = stub_driver.each_time(monkeypatch, call)
    assert [call() for _ in range(3)] == [right] * 3


def test_gradients_and_saved_tensors_of_other_strides_have_tapes_of_their_own(driver, monkeypatch):
    rows = torch.randn(1, 100, 2, 3 * 64).bfloat16().transpose(1, 2)
    inputs = [x.requires_grad_() for x in rows.detach().split(64, -1)]
    grad, turned = qkv(seed=9)[0], qkv(seed=9)[0].mT.contiguous().mT
    moved = torch.cat([grad.flatten()[:1], grad.flatten()])[1:].view(grad.shape)
    warmed(driver, inputs, grad)

    def launched(grad, pack):
        driver.launches.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(*inputs, causal=True)
        torch.autograd.grad(out, inputs, grad)
        return driver.launches[:]

    def plain(x):
        return x

    cases = [(grad, plain), (turned, plain), (moved, plain), (grad, torch.clone)]
    cases.append((grad, lambda x: x.clone(memory_format=torch.contiguous_format)))
    for case in cases:
        right = stub_driver.each_time(monkeypatch, lambda case=case: launched(*case))
        assert [launched(*case) for _ in range(3)] == [right] * 3


def test_tensors_that_are_one_are_not_taken_for_two(driver, monkeypatch):
    q, k, v = leaves()
    grad = qkv(seed=9)[0]

    def call(*inputs):
        out = attention(*inputs, causal=True)
        return [stub_driver.head(x) for x in (out, *torch.autograd.grad(out, inputs, grad))]

    for _ in range(3):
        call(q, q.detach().requires_grad_(), v)
    for _ in range(3):
        right = stub_driver.each_time(monkeypatch, lambda: call(q, k, v))
        assert call(q, k, v) == right
    (made,) = again._calls.values()
    assert all(made._tapes.values())


def test_a_pass_with_work_of_torch_in_it_has_no_tape(driver):
    x, y = torch.randn(2, 8)
    launch = hopper.nvrtc.Launch(driver.kernel("prepare", None, 0), (1, 1), 1, None, 5, bytes(72))

    def work(filled):
        made = torch.empty_like(x)
        if filled:
            made.zero_()
        launch(x, y, made, None, None)
        return [made]

    driver.answers = dict.fromkeys([("prepare", 3), ("prepare", 4)], b"")
    assert hopper.on_tape(lambda: work(False), [x, y], [])[1] is not None
    assert hopper.on_tape(lambda: work(True), [x, y], [])[1] is None
    assert hopper.on_tape(lambda: work(False), [x], [])[1] is None  # y is from elsewhere


def test_gradients_of_groups_are_summed_by_torch(driver):
    q, k, v = leaves()
    grouped = [x[:, :1].detach().requires_grad_() for x in (k, v)]
    for _ in range(3):
        out = attention(q, *grouped, causal=True)
        torch.autograd.grad(out, [q, *grouped], qkv(seed=9)[0])
    (call,) = again._calls.values()
    assert list(call._tapes) == ["forward"]


def test_another_stream_is_checked_again(driver, ordinary, monkeypatch):
    attention(*qkv(), causal=True)
    ordinary.clear()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 6)
    attention(*qkv(), causal=True)
    assert len(ordinary) == 1


def test_forward_mode_is_refused_as_by_an_ordinary_call(driver):
    q, k, v = leaves()
    warmed(driver, [q, k, v], qkv(seed=9)[0])
    for tensors in ([q, k, v], [q.detach(), k.detach(), v.detach()]):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward"):
            attention(forward_ad.make_dual(tensors[0], k), *tensors[1:], causal=True)


def test_gradients_in_batches_are_refused_as_by_an_ordinary_call(driver):
    q, k, v = leaves()
    warmed(driver, [q, k, v], qkv(seed=9)[0])
    out = attention(q, k, v, causal=True)
    with pytest.raises(NotImplementedError, match="vectorize=True need impl='reference'"):
        torch.autograd.grad(out, q, torch.stack([out, out]), is_grads_batched=True)


def test_threads_share_what_is_remembered(driver):
    expected = [both_passes(leaves(seed=n), qkv(seed=9)[0], causal=True) for n in range(20)]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda n: both_passes(leaves(seed=n), qkv(seed=9)[0], causal=True), range(20))
        )
    assert found == expected
