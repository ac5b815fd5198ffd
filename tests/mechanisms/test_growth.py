"""Memory and work follow the traits: elements are counted, so that no clock is needed."""

from inspect import signature

import pytest
import torch
from mechanism_cases import NAMES, OPTIONS, make, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.mechanisms import GROWTH, MECHANISMS
from cosformer.mechanisms.linear import delta_rule, family
from cosformer.mechanisms.patterns import blocked

SHORT, LONG = 1024, 4096
FIXED = {"max_length": LONG, "horizon": LONG}


class Counted(TorchDispatchMode):
    """The largest tensor that any operation makes, and the elements of all of them."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.largest = max(self.largest, x.numel())
                self.total += x.numel()
        return out


SUBQUADRATIC = [name for name in NAMES if GROWTH[MECHANISMS[name].traits.growth] < 2]


def count(name, length, **sizes):
    sizes = {**FIXED, **sizes}
    options = {key: value for key, value in sizes.items() if key in OPTIONS.get(name, {})}
    if name == "sparse-strided":
        options["stride"] = None
    mechanism = make(name, heads=1, **options)
    q, k, v, controls = tokens(mechanism, length, batch=1)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with Counted() as counted:
        out, _ = mechanism(*inputs, causal=not mechanism.traits.full, controls=controls)
        out.sum().backward()
    return counted, mechanism.traits.growth


SLICED = [name for name in SUBQUADRATIC if "impl" in signature(MECHANISMS[name]).parameters]


@pytest.mark.parametrize(
    ("name", "at_once"),
    [(name, 2**40) for name in SUBQUADRATIC] + [(name, 2**14) for name in SLICED],
)
def test_no_tensor_and_no_work_grows_faster_than_the_traits_say(name, at_once, monkeypatch):
    monkeypatch.setattr(delta_rule, "SEGMENT_LENGTH", SHORT // 4)  # the tests' own are very short
    monkeypatch.setitem(family.SCRATCH, "cpu", 2**16)
    monkeypatch.setattr(blocked, "SLICE", at_once)  # slices hide growth, and have their own
    (short, growth), (long, _) = count(name, SHORT), count(name, LONG)
    allowed = 4 ** GROWTH[growth] * 1.3
    assert long.largest <= allowed * short.largest
    assert long.total <= allowed * short.total


def test_rows_that_see_every_key_meet_them_in_slices(monkeypatch):
    monkeypatch.setattr(blocked, "SLICE", 2**14)
    counted, _ = count("bigbird", LONG, block=16)  # 32 rows, which are more numbers than all keys
    assert counted.largest < 32 * LONG


def test_the_count_sees_a_quadratic_matrix():
    short, long = (
        count("synthesizer", length, max_length=length)[0] for length in (SHORT // 4, SHORT)
    )
    assert long.largest == 16 * short.largest
