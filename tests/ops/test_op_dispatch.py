"""Which implementation computes a call: a pure function that a table can state, and its road."""

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from formula import tokens

from cosformer import attention, attention_with_state, linear_attention
from cosformer.ops import dispatch
from cosformer.ops.dispatch import choose, why_not
from cosformer.ops.hopper import nvrtc
from cosformer.ops.hopper import passes as by_hopper
from cosformer.ops.triton import passes as by_triton


def on_gpu(dtype=torch.bfloat16, width=64, length=10, heads=2, **other):
    """What the choice looks at: a tensor `[1, heads, length, width]` on a GPU, in one piece."""
    stride = (heads * length * width, length * width, width, 1)
    about = {
        "dtype": dtype,
        "shape": (1, heads, length, width),
        "is_cuda": True,
        "device": torch.device("cuda", 0),
        "stride": lambda: stride,
        "data_ptr": lambda: 4096,
    }
    return SimpleNamespace(**about | other)


def problem(**other):
    about = {"query_decay": None, "gates": None, "query_start": 0, "scale": 1.0}
    about |= {"causal": True, "weight": "cosine", "bounds": None}
    return SimpleNamespace(**about | other)


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU and a driver as far as the choice can see; neither is asked for twice."""
    monkeypatch.setattr(by_triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(by_hopper, "libraries", lambda: None)
    for module in (dispatch, by_hopper):  # these tensors are none
        monkeypatch.setattr(module, "eager", lambda *tensors: True)
    forget()
    yield
    forget()


def forget():
    by_hopper._why_not_tensors.cache_clear()
    by_hopper._why_not_compiled.cache_clear()


X = on_gpu()
LINE = (256, 128, 1, 64)
CHOICES = [  # q, k, v, problem; what hopper and triton need; what auto takes
    (X, X, X, problem(), None, None, "hopper"),
    (X, X, X, problem(causal=False, weight="plain"), None, None, "hopper"),
    (X, X, X, problem(weight="plain", gates=1), None, None, "hopper"),
    (X, X, X, problem(gates=1), None, None, "hopper"),
    (X, X, X, problem(weight="raised_cosine"), "plain or cosine weights", None, "triton"),
    (X, X, X, problem(bounds=1), None, None, "hopper"),
    (X, X, X, problem(query_start=3), "as many queries as keys under causal", None, "triton"),
    (
        *(X, X, X, problem(query_start=3, query_decay=1)),
        *("as many queries as keys", "query_start=0 under a decay, got 3", "chunked"),
    ),
    (
        *(on_gpu(length=7), X, X, problem(weight="plain", query_decay=1)),
        *("or a decay, got 7 and 10", "under a decay, got 7 and 10", "chunked"),
    ),
    (on_gpu(heads=4), X, X, problem(), None, None, "hopper"),
    (*[on_gpu(width=63)] * 3, problem(), "widths up to 128 that 8 divides", None, "triton"),
    (*[on_gpu(width=256)] * 3, problem(), "widths up to 128", None, "triton"),
    (*[on_gpu(width=257)] * 3, problem(), "widths up to 128", "widths up to 256", "chunked"),
    (*[on_gpu(length=0)] * 3, problem(), "at least one token", None, "triton"),
    (X, X, on_gpu(stride=lambda: LINE), problem(), "rows in one piece", None, "triton"),
    (X, X, on_gpu(data_ptr=lambda: 2), problem(), "multiples of 16 bytes", None, "triton"),
    (*[on_gpu(torch.float32)] * 3, problem(), "bfloat16, got torch.float32", None, "triton"),
    (*[on_gpu(torch.float16)] * 3, problem(), "bfloat16, got torch.float16", None, "triton"),
    (
        *(*[on_gpu(torch.float16)] * 3, problem(scale=9.0)),
        *("bfloat16", "a scale of 0.00390625 ... 1 in float16, got 9.0", "chunked"),
    ),
    (*[on_gpu(torch.float64)] * 3, problem(), "bfloat16", "got float64", "chunked"),
]


@pytest.mark.parametrize(("q", "k", "v", "given", "hoppers", "tritons", "auto"), CHOICES)
def test_what_each_needs_and_which_is_chosen(hopper, q, k, v, given, hoppers, tritons, auto):
    for impl, reason in (("hopper", hoppers), ("triton", tritons)):
        found = why_not(impl, q, k, v, given)
        assert found is reason or reason in found
    assert why_not("chunked", q, k, v, given) is why_not("reference", q, k, v, given) is None
    assert choose(q, k, v, given) == auto
    on_cpu = [on_gpu(x.dtype, x.shape[3], is_cuda=False) for x in (q, k, v)]
    assert choose(*on_cpu, given) == "chunked"


def test_where_tensors_will_lie_is_left_open_in_graphs_transforms_and_modes(hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "eager", lambda *tensors: False)
    assert choose(X, X, X, problem()) == "kernels"
    wide = on_gpu(width=257)
    assert choose(wide, wide, wide, problem()) == "chunked"


def test_a_graph_may_name_hopper_and_does_not_look_for_its_compiler(hopper, monkeypatch):
    """No tracer opens a library; the operator does, when the graph runs."""
    monkeypatch.setattr(by_hopper, "eager", lambda *tensors: False)
    monkeypatch.setattr(by_hopper, "libraries", nvrtc.libraries)
    given = (X, X, X, problem())

    @torch.compile(backend="eager", fullgraph=True)
    def graph(x):
        return x if why_not("hopper", *given) else -x

    torch.compiler.reset()
    assert graph(torch.ones(1)) == -1
    torch.compiler.reset()


def test_a_graph_refuses_tensors_that_hopper_cannot_take(monkeypatch):
    """Its operator does: the tracer did not know where they would lie."""
    monkeypatch.setattr("cosformer.ops.hopper.why_not", lambda *given: None)
    torch.compiler.reset()
    # with backend="eager" the error would leave an autocast region open: weights that later tests
    # train under autocast would be cast once and never again
    graph = torch.compile(lambda x: attention(x, x, x, impl="hopper"), backend="aot_eager")
    with pytest.raises(ValueError, match="impl='hopper' needs a Hopper GPU: use impl='auto'"):
        graph(torch.randn(1, 1, 20, 64).bfloat16())
    torch.compiler.reset()


def test_cuda_cpp_needs_no_triton_and_triton_no_hopper(hopper, monkeypatch):
    given = (X, X, X, problem())
    monkeypatch.setattr(by_triton, "HAS_TRITON", False)
    monkeypatch.setattr("cosformer.runtime.HAS_TRITON", False)
    assert why_not("triton", *given) == "the package triton"
    assert why_not("hopper", *given) is None
    assert choose(*given) == "hopper"
    monkeypatch.setattr(by_triton, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    by_hopper._why_not_tensors.cache_clear()
    assert why_not("hopper", *given) == "a Hopper GPU"
    assert choose(*given) == "triton"


@pytest.mark.parametrize(
    ("impl", "dtype", "reason"),
    [
        ("hopper", torch.bfloat16, "a Hopper GPU"),
        ("hopper", torch.float32, "bfloat16, got torch.float32"),
        ("triton", torch.float32, "tensors on a CUDA device, got cpu"),
    ],
)
def test_kernels_refuse_tensors_on_a_cpu_by_name(impl, dtype, reason, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(by_triton, "INTERPRETED", False)
    message = f"^impl='{impl}' needs {reason}: use impl='auto'$"
    x = [y.to(dtype) for y in tokens()]
    for call in (attention, linear_attention):
        with pytest.raises(ValueError, match=message):
            call(*x, impl=impl)
    with pytest.raises(ValueError, match=message):
        attention_with_state(*x, horizon=10, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "chunked", "triton"])
def test_an_explicit_choice_calls_that_code_and_no_other(impl, monkeypatch):
    if impl == "triton":
        pytest.importorskip("triton")
    calls = []
    attend, reference = dispatch.attend, dispatch.reference

    def counted(given):
        calls.append(given.options.impl)
        return attend(given)

    monkeypatch.setattr(dispatch, "attend", counted)
    monkeypatch.setattr(
        dispatch, "reference", lambda *args: (calls.append("reference"), reference(*args))[1]
    )
    x = [y.float() for y in tokens()]
    attention(*x, impl=impl)
    linear_attention(*x, impl=impl)
    attention_with_state(*x, horizon=10, impl=impl)
    assert calls == [impl] * 3
    attention(*x)
    assert calls[-1] == "chunked"


def files_of(call):
    """The file of every function of Python that a call enters, in order."""
    entered = []

    def watch(frame, event, argument):
        if event == "call":
            entered.append(frame.f_code.co_filename)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("length", [1000, 4096])
def test_a_causal_forward_on_a_cpu_takes_a_short_road(length):
    q, k, v = torch.randn(3, 1, 8, length, 64)

    def call():
        attention(q, k, v, causal=True)

    call()
    ours = [name for name in files_of(call) if "/cosformer/" in name]
    assert len(set(ours)) <= 9
    assert sum(one != other for one, other in pairwise(ours)) <= 40


def test_a_call_on_a_cpu_imports_no_kernels():
    code = """
import sys, torch, cosformer
q = torch.randn(1, 2, 70, 8, requires_grad=True)
cosformer.attention(q, q, q, causal=True).sum().backward()
cosformer.linear_attention(q, q, q, causal=True, gamma=0.9).sum().backward()
rooms = ("cosformer.ops.hopper", "cosformer.ops.triton.kernels")
print(*[name for name in sys.modules if name.startswith(rooms)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
