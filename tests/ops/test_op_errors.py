"""Every refused call names the argument, the rule and the value that broke it."""

import math
import re

import numpy as np
import pytest
import torch
from formula import tokens

from cosformer import (
    State,
    attention,
    attention_weights,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
    step,
)
from cosformer.ops import StepGraph, linear_attention_step

Q, K, V = tokens(2, 4, 6, kv_heads=2)
ONE = {"q": Q[:1], "k": K[:1], "v": V[:1]}  # a batch of one, as packing needs it
MASK = torch.ones(2, 6, dtype=torch.bool)
GATE = -torch.ones(2, 2, 6, dtype=torch.float64)
LEARNED = torch.tensor([20.0, 20.0], requires_grad=True)
NAN = float("nan")
VAST = 10**400
LONG = "must have at most 63 bits as a whole number, got"
FAR = "must have at most 53 bits as a whole number, got 71"


def packed(*ends, dtype=torch.int64):
    return ONE | {"cu_seqlens": torch.tensor(ends, dtype=dtype)}


HORIZONS = [
    ({"horizon": 0}, "horizon must be above 0, got 0"),
    ({"horizon": NAN}, "horizon must be above 0, got nan"),
    ({"horizon": VAST}, f"horizon {LONG} 1329"),
    ({"horizon": torch.tensor([20.0, -1.0])}, r"horizon must be above 0, got \[20.0, -1.0\]"),
    ({"horizon": torch.ones(3)}, r"horizon must be a number or one per head .*\[2\].*got \[3\]"),
    ({"horizon": LEARNED}, "horizon must not require a gradient"),
    ({"horizon": np.array([20.0, 20.0])}, "horizon must be a number or a tensor, got ndarray"),
    ({"horizon": torch.ones(2, device="meta")}, "horizon must hold values, got a meta tensor"),
]
MASKS = [
    ({"key_mask": MASK.float()}, "key_mask must be bool .*got torch.float32"),
    ({"key_mask": MASK[:, :5]}, r"key_mask must be \[batch, keys\] = \[2, 6\], got \[2, 5\]"),
    ({"key_mask": MASK.to("meta")}, "key_mask must be on the device of k, cpu, got meta"),
    ({"eps": 0}, "eps must be above 0, got 0"),
    ({"eps": NAN}, "eps must be above 0, got nan"),
    ({"eps": 5e-324}, "eps must lie between 2.23e-308 and 1.8e.308 .*torch.float64, got 5e-324"),
]
PACKINGS = [
    (packed(0, 6, dtype=torch.float32), "cu_seqlens must be a vector of int32 or int64, got .*32"),
    ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens needs a batch of 1, got 2"),
    (packed(0, 5) | {"q": Q[:1, :, :5]}, "cu_seqlens needs as many queries as keys, got 5 and 6"),
    (packed(0), "cu_seqlens must have at least 2 entries, got 1"),
    (packed(0, 5), r"cu_seqlens must rise from 0 to the length 6, got \[0, 5\]"),
    (packed(0, 4, 3, 6), r"cu_seqlens must rise .*got \[0, 4, 3, 6\]"),
    (packed(0, 6) | {"query_start": 0}, "query_start has no meaning with cu_seqlens"),
    (
        ONE | {"cu_seqlens": torch.tensor([0, 6]).to("meta")},
        "cu_seqlens must be on .*cpu, got meta",
    ),
    ({"query_start": 2**70}, f"query_start {FAR}"),
    ({"query_start": True}, "query_start must be an int, got bool"),
]
STRETCH = {"positions": "stretch"}
WEIGHTS = [
    ({"positions": "scale"}, "positions must be one of index, stretch, got 'scale'"),
    (STRETCH | {"causal": True}, "positions='stretch' .*causal=True has no meaning"),
    (STRETCH | {"query_start": 0}, "positions='stretch' .*query_start has no meaning"),
    (STRETCH | packed(0, 6), "positions='stretch' .*cu_seqlens has no meaning"),
]
WINDOWS = [
    ({"rows": slice(0, 4, 2)}, r"rows must be a slice with step 1, got slice\(0, 4, 2\)"),
    ({"rows": 3}, "rows must be a slice.*, got .*"),
    ({"rows": slice(0.0, 2)}, r"rows must be a slice of whole numbers, got slice\(0.0, 2, None\)"),
    ({"columns": slice("2")}, r"columns must be a slice of whole numbers, got slice\(None, '2'"),
]
IMPL = "impl must be one of auto, reference, chunked, triton, hopper, got"
IMPLS = [({"impl": impl}, f"{IMPL} {impl!r}") for impl in ("flash", "Chunked", "")]
STREAMS = [
    ({"horizon": None}, "horizon is required to start a stream"),
    ({"q": Q[:, :, :5]}, "as many queries as keys, got 5 and 6"),
    ({"state": (1, 2)}, "state must be a State, got tuple"),
    ({"weight": "sine"}, "weight must be one of cosine, raised_cosine, got 'sine'"),
    ({"horizon": torch.full((4,), 20.0)}, r"horizon must be .*one per head \[2\], got \[4\]"),
]
ENGINE = [
    ({"feature_map": "gelu"}, "feature_map must be one of identity, relu, .*got 'gelu'"),
    ({"feature_map": lambda x: x[..., :0]}, "must have a width of at least 1"),
    ({"feature_map": lambda x: x[:, :, :3]}, r"feature_map must return .*6, 'width'\], got \[2"),
    ({"feature_map": lambda x: None}, "feature_map must return a tensor .*got NoneType"),
    ({"normaliser": "max"}, "normaliser must be one of sum, none, got 'max'"),
    ({"rule": "abs"}, "rule must be one of clamp, add, signed, got 'abs'"),
    ({"scale": 0.5}, "scale must be 1 with normaliser='sum', .*got 0.5"),
    ({"scale": -1, "normaliser": "none"}, "scale must be above 0, got -1"),
    ({"scale": float("inf"), "normaliser": "none"}, "scale must be finite, got inf"),
    ({"theta": VAST, "feature_map": "relu"}, f"theta {LONG} 1329"),
    ({"theta": float("inf")}, "theta must be finite, got inf"),
    ({"theta": NAN, "feature_map": "relu"}, "theta must be finite, got nan"),
    ({"theta": torch.tensor([0.1, NAN]), "feature_map": "relu"}, "theta must be finite, got nan"),
    ({"theta": torch.ones(3)}, r"theta must be .*one per.* head \[\d\].*got \[3\]"),
    ({"theta": LEARNED}, "theta must not require a gradient"),
    ({"theta": torch.ones(2, device="meta")}, "theta must hold values, got a meta tensor"),
    ({"raised": "no"}, "raised must be a bool, got str"),
    ({"raised": True, "theta": 0.1, "rule": "add"}, "raised=True needs rule='clamp' .*got 'add'"),
    ({"gamma": 1.5}, r"gamma must lie in \(0, 1\], got 1.5"),
    ({"gamma": [0.5, VAST]}, rf"gamma\[1\] {LONG} 1329"),
    ({"gamma": [0.5, 1.5]}, r"gamma must lie in \(0, 1\], got \[0.5, 1.5\]"),
    ({"gamma": True}, "gamma must be a number, a sequence of them or a tensor, got bool"),
    ({"gamma": [0.5, None]}, r"gamma\[1\] must be a number, got NoneType"),
    ({"gamma": [0.5, 0.5, 0.5]}, r"gamma must be .*one per.* head \[\d\].*got \[3\]"),
    ({"log_decay": GATE[:, :, :5]}, r"log_decay must be .*\[2, \d, 6\].*got \[2, 2, 5\]"),
    ({"log_decay": -GATE}, "log_decay must .*0, got .*1"),
    ({"log_decay": -0.5}, "log_decay must be a tensor, got float"),
]
ENGINE_WHOLE = [
    ({"causal": False, "gamma": 0.9, "q": Q[:, :, :5]}, "gamma .*got 5 queries and 6 keys"),
    ({"log_decay": GATE, "query_start": 2}, "log_decay needs .*query_start=0, got 2"),
    (
        {"causal": False, "log_decay": GATE, "query_start": 1},
        "gamma and log_decay without causal=True must .*cross attention has no.*query_start=1",
    ),
    (
        {"q": Q[:, :, :5], "log_decay": GATE[:, :, :5]},
        "log_decay needs as many queries as keys, got 5 and 6",
    ),
]
ENGINE_STREAMS = [
    ({"q": Q[:, :, :5]}, "as many queries as keys, got 5 and 6"),
    ({"theta": torch.ones(4)}, r"theta must be one per key head \[2\], .*got \[4\]"),
    ({"log_decay": -torch.ones(2, 4, 6)}, r"log_decay must be one per key head .*got \[2, 4, 6\]"),
]
RATES = [
    ({"decay": 0.0}, r"decay must lie in \(0, 1\], got 0.0"),
    ({"decay": NAN}, r"decay must lie in \(0, 1\], got nan"),
    ({"decay": [0.5, 1.5]}, r"decay must lie in \(0, 1\], got \[0.5, 1.5\]"),
    ({"decay": torch.tensor([0.5, -1.0])}, r"decay must lie in \(0, 1\], got -1"),
    ({"decay": torch.tensor([0.5, 1 + 2**-23])}, r"decay must lie in \(0, 1\], got 1.0000001"),
    ({"decay": [1, 1, 1]}, r"decay must be a number or one per head \[2\]( or \[4\])?, got \[3\]"),
    ({"decay": "slow"}, "decay must be a number, a sequence of them or a tensor, got str"),
    ({"decay": [0.5, None]}, r"decay\[1\] must be a number, got NoneType"),
    ({"decay": 0.5, "log_decay": GATE}, "decay and log_decay must not both be given"),
    ({"log_decay": -GATE}, "log_decay must be at most 0, got 1"),
    ({"log_decay": -0.5}, "log_decay must be a tensor, got float"),
    ({"log_decay": GATE[:, :, :5]}, r"log_decay must be .*\[2, \d, 6\].*got \[2, 2, 5\]"),
    ({"horizon": math.inf, "weight": "raised_cosine"}, "horizon must be finite with weight='rai"),
]
CROSS = "without causal=True must meet query i at key i, so cross attention has no decay"
CROSSES = [
    ({"decay": 0.5, "q": Q[:, :, :5]}, f"decay {CROSS}: got 5 queries and 6 keys"),
    ({"decay": 0.5, "positions": "stretch"}, f"decay {CROSS}: got positions='stretch'"),
    ({"log_decay": GATE, "query_start": 1, "horizon": 9}, f"log_decay {CROSS}: got query_start=1"),
    (
        {"log_decay": GATE, "causal": True, "query_start": 1, "horizon": 9},
        "log_decay needs query i where key i stands, query_start=0, got 1",
    ),
]
TABLES = {  # function -> what else a good call needs, the bad ones
    attention: ({}, HORIZONS + MASKS + PACKINGS + WEIGHTS + RATES + CROSSES + IMPLS),
    attention_weights: ({}, HORIZONS + MASKS + PACKINGS + WEIGHTS + WINDOWS + RATES + CROSSES),
    attention_with_state: ({"horizon": 20}, HORIZONS + MASKS + STREAMS + RATES + IMPLS),
    linear_attention: ({"causal": True}, MASKS + PACKINGS + ENGINE + ENGINE_WHOLE + IMPLS),
    linear_attention_with_state: ({}, MASKS + ENGINE + ENGINE_STREAMS + IMPLS),
}
ROWS = [
    pytest.param(function, good, *row, id=f"{function.__name__}: {row[1]}")
    for function, (good, rows) in TABLES.items()
    for row in rows
]


def call(function, arguments):
    if function is attention_weights:
        arguments = {name: value for name, value in arguments.items() if name != "v"}
    return function(**arguments)


@pytest.mark.parametrize(("function", "good", "bad", "message"), ROWS)
def test_a_bad_argument_is_named_with_its_rule_and_value(function, good, bad, message):
    good = {"q": Q, "k": K, "v": V} | good
    call(function, good)
    with pytest.raises((ValueError, TypeError), match=message):
        call(function, good | bad)


@pytest.mark.parametrize("eps", [1e-46, 1e39])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_eps_that_float32_sums_would_round_to_0_or_inf_is_refused(eps, dtype):
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    rule = "eps must lie between 1.18e-38 and 3.4e+38 where sums are torch.float32, got"
    state = State.empty(2, 2, 4, 4, horizon=20)
    for call in (
        lambda: attention(q, k, v, eps=eps),
        lambda: attention_weights(q, k, eps=eps),
        lambda: attention_with_state(q, k, v, horizon=20, eps=eps),
        lambda: step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, eps=eps),
        lambda: linear_attention(q, k, v, feature_map="1+elu", eps=eps),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{rule} {eps}")):
            call()


def misfits(q, k, v):
    """What does not fit in otherwise good q `[2, 4, T, 4]`, k and v `[2, 2, T, 4]`."""
    length = k.shape[2]
    return [
        ({"q": None}, "q must be a tensor, got NoneType"),
        ({"q": q[0, 0]}, rf"q must be \[batch, heads, length, width\], got \[{length}, 4\]"),
        ({"v": v[None]}, rf"v must be \[batch, .*got \[1, 2, 2, {length}, 4\]"),
        ({"q": q.long()}, "q must be float64, .*got torch.int64"),
        ({"v": v.cfloat()}, "v must be float64, .*got torch.complex64"),
        ({"k": k.half()}, "k must have the dtype of q, torch.float64, got torch.float16"),
        ({"q": q[..., :0]}, rf"q must have a width of at least 1, got \[2, 4, {length}, 0\]"),
        ({"k": k[:1]}, "k must have the batch of q, 2, got 1"),
        ({"k": k[..., :3]}, "k must have the width of q, 4, got 3"),
        ({"v": v[:, :1]}, rf"v must have the heads and length of k, \[2, {length}\], got \[1, "),
        ({"v": v[:, :, 1:]}, rf"v must have .*length of k, \[2, {length}\], got \[2, {length - 1}"),
        ({"q": q[:, :3]}, "heads of q must be a multiple of the heads of k, got 3 and 2"),
        ({"q": q[:, :0]}, rf"q must have at least 1 head, got \[2, 0, {length}, 4\]"),
        ({"k": k.to("meta")}, "k must be on the device of q, cpu, got meta"),
        (
            {"q": torch.nested.nested_tensor([*q], layout=torch.jagged)},
            "q must be a dense tensor, got a nested",
        ),
    ]


@pytest.mark.parametrize("function", TABLES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("bad", "message"), misfits(Q, K, V))
def test_tensors_that_do_not_fit_are_named(function, bad, message):
    if function is attention_weights and bad.keys() == {"v"}:
        pytest.skip("takes no values")
    arguments = {"q": Q, "k": K, "v": V} | TABLES[function][0] | bad
    with pytest.raises((ValueError, TypeError), match=message):
        call(function, arguments)


TOKEN = {"q": Q[:, :, :1], "k": K[:, :, :1], "v": V[:, :, :1]}
STEPS = [
    *misfits(*TOKEN.values()),
    ({"q": Q, "k": K, "v": V}, "step takes one token, got 6 queries and 6 keys"),
    ({"q": Q[:, :, :0]}, "step takes one token, got 0 queries and 1 keys"),
    ({"k": Q[:, :, :1], "v": Q[:, :, :1]}, r"state must hold .*\[2, 4, .*, got \[2, 2, 2, 4, 4\]"),
    ({"state": None}, "state must be a State, got NoneType"),
    ({"eps": 0}, "eps must be above 0, got 0"),
]


@pytest.mark.parametrize(("bad", "message"), STEPS)
def test_a_bad_step_is_named_and_changes_nothing(bad, message):
    state = State.empty(2, 2, 4, 4, horizon=20, dtype=torch.float64)
    with pytest.raises((ValueError, TypeError), match=message):
        step(**TOKEN | {"state": state} | bad)
    assert not state.key_value.any()
    assert int(state.position) == 0


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (
            torch.zeros(2, 2, 1, device="meta"),
            "log_decay must be on the device of q, cpu, got meta",
        ),
        (torch.zeros(2, 2, 1, dtype=torch.int64), "log_decay must be real, got torch.int64"),
        (torch.ones(2, 2, 1), "log_decay must be at most 0, got 1.0"),
    ],
)
def test_a_bad_gate_of_a_step_is_named_and_changes_nothing(gate, message):
    state = State.empty(2, 2, 4, 4, horizon=20, per_token=True, dtype=torch.float64)
    _, other = linear_attention_with_state(
        Q, K, V, feature_map="1+elu", log_decay=-torch.ones(2, 2, 6)
    )
    with pytest.raises(ValueError, match=message):
        step(**TOKEN, state=state, log_decay=gate)
    with pytest.raises(ValueError, match=message):
        linear_attention_step(**TOKEN, state=other, feature_map="1+elu", log_decay=gate)
    assert [int(state.position), int(other.position)] == [0, 6]


def test_what_no_graph_of_a_step_can_capture_is_named():
    good = TOKEN | {"state": State.empty(2, 2, 4, 4, horizon=20)}
    for bad, message in (
        ({"k": None}, "k must be a tensor, got NoneType"),
        ({"slots": [0, 1]}, "slots must be a tensor, got list"),
        ({"state": (1, 2)}, "state must be a State, got tuple"),
        ({}, "q must be on a CUDA device, got cpu"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            StepGraph(**good | bad)


def test_a_bool_of_numpy_is_called_one_of_numpy():
    with pytest.raises(TypeError, match=r"causal must be a bool, got numpy\.bool"):
        attention(Q, K, V, causal=np.True_)


EMPTY = [
    ({"dtype": torch.bfloat16}, "dtype of a state must be float32 or float64, got torch.bfloat16"),
    ({"key_width": 0}, "key_width must be a whole number from 1 on, got 0"),
    ({"horizon": 0}, "horizon must be above 0, got 0"),
    ({"horizon": torch.ones(3)}, r"horizon must be a number or one per head \[2\], got \[3\]"),
    ({"weight": "plain"}, "weight must be one of cosine, raised_cosine, got 'plain'"),
    ({"position": torch.tensor([0, 0, 0])}, r"position must be .*one per stream \[2\], got \[3\]"),
    ({"position": 2**60}, "position must have at most 53 bits as a whole number, got 61"),
    ({"position": 2.5}, "position must be whole, got 2.5"),
    ({"position": -1}, "position must not be negative, got -1"),
    ({"batch": 2.0}, r"batch must be a whole number from 0 on, got 2\.0"),
]


@pytest.mark.parametrize(("bad", "message"), EMPTY)
def test_a_bad_empty_state_is_named(bad, message):
    sizes = {"batch": 2, "heads": 2, "key_width": 4, "value_width": 4, "horizon": 20}
    with pytest.raises((ValueError, TypeError), match=message):
        State.empty(**sizes | bad)


OF_SOFTMAX = {
    "is_causal": "causal=True",
    "attn_mask": "key_mask",
    "dropout_p": "dropout",
    "scale": "cosFormer has none",
    "enable_gqa": "grouped heads need no flag",
}


@pytest.mark.parametrize("name", OF_SOFTMAX)
def test_an_argument_of_pytorchs_attention_tells_what_to_use(name):
    assert name in torch.nn.functional.scaled_dot_product_attention.__doc__
    message = f"attention has no argument '{name}': .*{OF_SOFTMAX[name]}"
    with pytest.raises(TypeError, match=message):
        attention(Q, K, V, **{name: True})


def test_any_other_argument_is_unknown():
    with pytest.raises(TypeError, match=r"no argument 'horizn'; did you mean 'horizon'\?"):
        attention(Q, K, V, horizn=5)
