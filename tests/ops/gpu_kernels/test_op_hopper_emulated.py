"""The kernels in CUDA C++ on a CPU, by an emulator of a thread block (`emulator.h`).

A few problems of each kind: all others run on a GPU (`test_op_hopper_gpu.py`).
"""

import emulator
import pytest
import torch
from formula import results
from kernel_cases import CASES, DECAY, Case, check

from cosformer import attention, attention_with_state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++"),
]
CAUSAL = {"causal": True}
LONG = 600  # ten chunks: three or four are in flight at a time, and the last is not whole
REPRESENTATIVES = [
    "bidirectional", "masked, both ways", "linear transformer", "signed", "scaled, both ways",
    "gated quotient", "packed, gated, both ways", "decaying, both ways", "gated, divided",
]  # fmt: skip
WIDE = {
    "wide": Case(options=CAUSAL, width=128, value_width=128),
    "wide, both ways": Case(width=128, value_width=128),
    "wide keys, both ways": Case(options=DECAY, width=72, value_width=8),
    "grouped": Case(options={**CAUSAL, **DECAY}, heads=4, width=64, value_width=128),
}


def by_emulator(case, length):
    check(case, length, torch.bfloat16, impl="hopper")


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_every_role_agrees_with_its_formula(emulate, name):
    emulate()
    by_emulator(CASES[name], 131)


@pytest.mark.parametrize("name", WIDE)
def test_every_width(emulate, name):
    emulate()
    by_emulator(WIDE[name], 131)


def test_memory_is_used_again_by_later_chunks(emulate):
    emulate()
    by_emulator(CASES["causal"], LONG)


@pytest.mark.parametrize("segments", [3], indirect=True)
@pytest.mark.parametrize("length", [400, 560])  # segments of 192 rows, 560 of which end with pieces
@pytest.mark.parametrize("causal", [True, False])
def test_segments_begin_with_what_came_before(emulate, causal, length, segments):
    emulate()
    options = {"causal": causal, **DECAY}
    by_emulator(Case(options=options, width=64, value_width=64, masked=True), length)


def test_mild_and_strong_decays_in_one_call(emulate):
    emulate()
    inputs = torch.randn(3, 1, 3, 131, 64, generator=torch.Generator().manual_seed(0))
    inputs = inputs.bfloat16().unbind()

    def call(*x, impl):
        return attention(*x, causal=True, decay=[1e-30, 0.45, 0.999], impl=impl)

    exact = results(lambda *x: call(*x, impl="chunked"), [x.double() for x in inputs])
    close(results(lambda *x: call(*x, impl="hopper"), list(inputs)), exact)


def test_a_stream_in_two_pieces(emulate):
    emulate()
    q, k, v = torch.randn(3, 1, 2, 150, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def pieces(*x):
        about = {"horizon": 300, "decay": 0.99, "impl": "hopper"}
        first, state = attention_with_state(*(y[:, :, :70] for y in x), **about)
        rest = (y[:, :, 70:] for y in x)
        second, _ = attention_with_state(*rest, state=state, impl="hopper")
        return torch.cat([first, second], 2)

    def whole(*x):
        return attention(*x, causal=True, horizon=300, decay=0.99, impl="chunked")

    leaves = [q.abs(), k.abs(), v]
    close(results(pieces, leaves), results(whole, [x.double() for x in leaves]))


FAULTS = {
    "tensor cores are not told of rows": (
        "rows.put(shared + stage * STAGE_BYTES);\n    to_tensor_cores();",
        "rows.put(shared + stage * STAGE_BYTES);",
    ),
    "others are told before tensor cores are": (
        "to_tensor_cores();\n    arrive(full + stage * 8);",
        "arrive(full + stage * 8);\n    to_tensor_cores();",
    ),
    "a stage is filled while it is read": ("if (use) wait(empty", "if (false) wait(empty"),
    "a stage is given back before its products end": (
        "mma_wait<0>();\n    if (STRONG) hold(joined);",
        "give_back(empty + stage * 8);\n    mma_wait<0>();\n    if (STRONG) hold(joined);",
    ),
    "a state is read before it is there": (
        "wait(state_full + buffer * 8, WRITE ? c / 2 & 1 : 0);",
        "(void)buffer;",
    ),
    "the diagonal": ("? ~0u : 0u, own = k == warp ? diagonal", "? ~0u : 0u, own = k == warp ? ~0u"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_emulator_sees_a_fault(emulate, name):
    emulate(FAULTS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        by_emulator(CASES["causal"], LONG)


def test_the_emulator_sees_threads_that_wait_for_ever(emulate):
    emulate(("give_back(empty + stage * 8);", ";"))
    with pytest.raises(RuntimeError, match="wait for each other"):
        by_emulator(CASES["causal"], LONG)


def close(found, right):
    for a, b in zip(found, right, strict=True):
        assert (a - b).norm() / b.norm() < 0.02
