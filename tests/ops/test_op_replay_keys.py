"""What a program is not replayed for, and what is never one."""

import pytest
import torch
from stub_driver import GRADS, attention, qkv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.ops.hopper import watching
from cosformer.ops.hopper.watch import watcher
from cosformer.ops.problem import Constants, Given
from cosformer.ops.replay.tape import Tape


class _Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Tensor(torch.Tensor):
    pass


def same(x):
    return x


OTHERS = {
    "causal": {"causal": True},
    "horizon": {"horizon": 101},
    "another kind of number": {"horizon": 100.0},
    "eps": {"eps": 1e-3},
    "query_start": {"query_start": 0},
    "impl": {"impl": "auto"},
    "a horizon in a tensor": {"horizon": torch.tensor([100.0, 100.0])},
    "mask": {"key_mask": torch.ones(1, 100, dtype=torch.bool)},
}
TENSORS = {
    "batch": lambda x: torch.cat([x, x]),
    "length": lambda x: x[:, :, :99],
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "alignment": GRADS["not at 16 bytes"],
    "subclass": lambda x: x.as_subclass(_Tensor),
}
PLACES = {
    "function mode": _Function,
    "dispatch mode": _Dispatch,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(same, same),
}


@pytest.mark.parametrize("name", [*OTHERS, *TENSORS, *PLACES])
def test_what_differs_is_not_replayed(driver, ordinary, name):
    for _ in range(2):
        attention(*qkv(), horizon=100)
    assert len(ordinary) == 1
    change = TENSORS.get(name, same)
    with PLACES.get(name, torch.enable_grad)():
        attention(*map(change, qkv()), **{"horizon": 100, **OTHERS.get(name, {})})
    assert len(ordinary) == 2


def test_a_call_that_is_captured_is_ordinary(driver, ordinary):
    attention(*qkv())
    driver.captures = 1
    attention(*qkv())
    assert len(ordinary) == 2


@pytest.mark.parametrize("given", [{"eps": True}, {"horizon": True}, {"causal": 1}])
def test_what_equals_a_kept_option_is_still_refused(driver, given):
    for _ in range(2):
        attention(*qkv(1), horizon=1, causal=True, eps=1)
    with pytest.raises(TypeError, match=next(iter(given))):
        attention(*qkv(1), **{"horizon": 1, "causal": True, "eps": 1, **given})


def test_what_torch_computes_is_not_replayed(driver, ordinary):
    for _ in range(3):
        attention(*qkv(8), impl="chunked")
    assert len(ordinary) == 3


@pytest.mark.parametrize("spoilt", ["twice", "a state", "ψ in pieces", "no launch", "a copy", ""])
def test_a_tape_of_more_than_one_pass_over_its_inputs_is_not_replayed(spoilt):
    q, k, v = qkv(8)
    psi = torch.ones(1, 1, 2, 8).mT if spoilt == "ψ in pieces" else torch.ones(1, 1, 8, 2)
    given = Given(q, k, v, None, None, Constants(None, psi, psi, None, None), None)
    tape = Tape((q, k, v))

    def forward():
        out = torch.empty_like(q)
        if spoilt != "no launch":
            watcher().launched(None, (q, k, v, out, None, psi))
        return (out.clone() if spoilt == "a copy" else out), None

    with watching(tape):
        for _ in range(1 + (spoilt == "twice")):
            state = [torch.ones(3)] if spoilt == "a state" else []
            watcher().run(forward, given, [q, k, v, *state], [psi])
    assert watcher() is None
    assert tape.results() == (None if spoilt else [3])
