"""For tests of the kernels for Hopper, and of calls that are like an earlier one."""

import emulator
import pytest
import stub_driver

from cosformer.ops import again
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.problem import PROBLEMS


@pytest.fixture(params=[1, 3, 5])
def segments(request, monkeypatch):
    """Into how many the kernels for Hopper cut a sequence, if it is long enough.

    Three segments are summed in as many pieces as their ends allow, others in one.
    """

    def choose(programs, length, processors, **_):
        return max(1, min(request.param, length // 64))

    def most_pieces(programs, length, processors, cut):
        return hopper_plan._whole_pieces(length, cut)[-1] if request.param == 3 else 1

    monkeypatch.setattr(hopper_plan, "choose_segments", choose)
    monkeypatch.setattr(hopper_plan, "choose_pieces", most_pieces)
    monkeypatch.setattr(hopper_plan, "LEAST", 64)
    monkeypatch.setattr(hopper_plan, "_plans", {})
    monkeypatch.setattr(again, "_calls", {})  # whose tapes are of other cuts
    return request.param


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(PROBLEMS, "kept", {})
    return stub_driver.install(monkeypatch)


@pytest.fixture
def launches(driver):
    return driver.launches


@pytest.fixture
def emulate(monkeypatch, tmp_path_factory):
    """Lets the kernels for Hopper run on the CPU, with a fault planted if one is given."""
    folder = tmp_path_factory.getbasetemp().parent / "emulated"  # of all workers
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(PROBLEMS, "kept", {})
    return lambda fault=None: emulator.install(monkeypatch, folder, fault)


@pytest.fixture
def ordinary(monkeypatch):
    """Counts the calls that were checked and prepared."""
    calls = []

    def count(where, name):
        own = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *given: (calls.append(1), own(*given))[1])

    count(stub_driver.cosine, "_attention")
    count(stub_driver.linear, "_linear_attention")
    return calls
