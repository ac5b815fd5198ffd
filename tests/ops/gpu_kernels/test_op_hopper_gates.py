"""Gates and packed sequences on the road of Hopper's kernels, as a stub of the driver sees it."""

import re
import shutil
import struct
import subprocess

import pytest
import stub_driver
import torch
from stub_driver import attention, leaves, linear_attention, qkv

from cosformer.ops import again, hopper
from cosformer.ops.autograd import gates as gates_room
from cosformer.ops.autograd import kernels
from cosformer.ops.hopper import packing, passes
from cosformer.ops.hopper.roles import Around, Gates, Packing
from cosformer.ops.hopper.source import source

FILES = {
    "around.cu": ("prepare", "edges"),
    "gates.cu": ("sum_gates", "decay_gradient"),
    "packing.cu": ("place_packed",),
}
STRONG = ["sweep", "sweep"]  # for either strength
BACKWARD = ["prepare", *3 * STRONG, "decay_gradient"]


@pytest.fixture
def without_triton(monkeypatch):
    def refuse(*given):
        pytest.fail("asked for Triton")

    for room in (gates_room, kernels):
        monkeypatch.setattr(room, "kernels_serve", refuse)
    for name in ("sum_gates", "sum_gates_backward", "balanced_decay_gradient"):
        monkeypatch.setattr(kernels.triton, name, refuse)


def gated(length=100, heads=2, dtype=torch.float32):
    return -torch.rand(1, heads, length, generator=torch.Generator().manual_seed(1)).to(dtype)


def names(launches):
    return [name for name, *_ in launches]


@pytest.mark.parametrize("file", FILES)
def test_launches_pass_as_many_bytes_as_the_kernels_take(file):
    code = re.sub(r"//.*", "", source(file))
    for name in FILES[file]:
        given = re.search(rf"\b{name}\((.*?)\) \{{", code, re.DOTALL)[1].split(",")
        pointers = [x for x in given if "*" in x]
        assert given[: len(pointers)] == pointers
        sizes = [8 if "long long" in x else 4 for x in given[len(pointers) :]]
        assert (len(pointers), sum(sizes)) == stub_driver.ARGUMENTS[name]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs the compiler of CUDA")
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("around.cu", Around(DECAY=2)),
        ("gates.cu", Gates(GATE=2, CLUSTER=8)),
        ("gates.cu", Gates(GATE=4, SUMMED=False)),
        ("packing.cu", Packing(WIDE=True, OWN=True, R=2)),
    ],
)
def test_sources_compile_without_spills(file, options, tmp_path):
    (tmp_path / file).write_text(source(file))
    flags = [f"-D{key}={int(value)}" for key, value in options._asdict().items()]
    target = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"]
    command = ["nvcc", *target, *flags, "-o", tmp_path / "code", tmp_path / file]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert set(re.findall(r"(\d+) bytes spill stores", said.stdout + said.stderr)) == {"0"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gates_take_a_launch_of_their_own_in_each_pass(launches, without_triton, dtype):
    inputs, gates = leaves(), gated(dtype=dtype).requires_grad_()
    out = attention(*inputs, causal=True, log_decay=gates)
    assert names(launches) == ["sum_gates", *STRONG]
    launches.clear()
    found = torch.autograd.grad(out, [*inputs, gates], qkv(seed=9)[0])
    assert names(launches) == BACKWARD
    assert found[3].dtype == dtype
    assert found[3].shape == gates.shape


def test_the_kernels_know_the_strides_of_gates(launches):
    x = torch.randn(3, 2, 100, 64).bfloat16()
    q, k, v = (torch.stack([y] * 4) for y in x)  # [4, 2, 100, 64]
    gates = -torch.rand(4, 100, 2).transpose(1, 2).requires_grad_()
    attention(q, k, v, causal=True, log_decay=gates).sum().backward()
    tails = {name: tail for name, *_, tail, _ in launches}
    assert struct.unpack("3q3i", tails["sum_gates"]) == (200, 1, 2, 2, 100, 1)
    assert struct.unpack("3q4i", tails["decay_gradient"]) == (200, 1, 2, 2, 100, 1, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [100, 6000])
@pytest.mark.parametrize("decays", [False, True])
def test_both_passes_come_from_tapes(
    driver, without_triton, monkeypatch, decays, causal, width, length
):
    inputs, gates = leaves(length, width), gated(length).requires_grad_() if decays else None
    grad = qkv(length, width, seed=9)[0]

    def both():
        driver.launches.clear()
        out = attention(*inputs, causal=causal, log_decay=gates)
        found = torch.autograd.grad(out, [*inputs, gates] if decays else inputs, grad)
        return [stub_driver.head(x) for x in (out, *found[:3])], driver.launches[:]

    expected = both()
    for _ in range(2):
        both()
    for name in ("forward", "backward", "backward_with_decay"):
        monkeypatch.setattr(hopper, name, lambda *given: pytest.fail("was decided anew"))
    assert both() == expected
    (call,) = again._calls.values()
    assert all(call._tapes.values())


def test_few_long_rows_are_shared_by_blocks_of_a_cluster(launches):
    for length, size in ((2048, 1), (2049, 8)):
        launches.clear()
        gates = gated(length).requires_grad_()
        attention(*leaves(length), causal=True, log_decay=gates).sum().backward()
        options, (blocks, *_) = next(x[1:3] for x in launches if x[0] == "decay_gradient")
        assert (options.CLUSTER, blocks) == (size, 2 * size)


def test_a_decay_per_head_and_one_per_token_are_joint_gates(launches, without_triton):
    gates = gated().requires_grad_()
    gamma = torch.tensor([0.9, 0.8], requires_grad=True)
    options = {"causal": True, "normaliser": "none", "log_decay": gates, "gamma": gamma}
    out = linear_attention(*leaves(), **options)
    assert names(launches) == ["sum_gates", *STRONG]
    found = torch.autograd.grad(out.sum(), [gates, gamma])
    assert [x.shape for x in found] == [gates.shape, gamma.shape]


def test_a_learned_decay_per_head_is_corrected_by_the_kernel(launches, without_triton):
    decay = torch.tensor([0.9, 0.8], requires_grad=True)
    attention(*leaves(), causal=True, decay=decay).sum().backward()
    assert names(launches)[-1] == "decay_gradient"
    assert decay.grad is not None


def test_gates_above_zero_are_refused_beside_a_decay_per_head(driver):
    options = {"causal": True, "normaliser": "none", "gamma": 0.5}
    with pytest.raises(ValueError, match="log_decay must be at most 0"):
        linear_attention(*qkv(), **options, log_decay=torch.full((1, 2, 100), 0.1))


@pytest.mark.parametrize("horizon", [None, 200.0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_tokens_are_placed_by_one_launch(launches, monkeypatch, horizon, dtype):
    monkeypatch.setattr(hopper, "places", lambda *given: True)
    bounds = torch.tensor([0, 30, 70, 90, 100], dtype=dtype)
    out = attention(*leaves(), causal=True, cu_seqlens=bounds, horizon=horizon)
    assert names(launches) == ["place_packed", "sweep"]
    options = launches[0][1]
    assert options == Packing(WIDE=dtype == torch.int64, OWN=horizon is None, R=2)
    launches.clear()
    out.sum().backward()
    assert names(launches) == ["prepare", "sweep", "sweep", "sweep"]


def test_what_the_kernel_makes_has_the_shapes_that_torch_makes(driver):
    bounds, theta = torch.tensor([0, 30, 100]), torch.rand(3, 1, dtype=torch.float64)
    found = packing.place_packed(bounds, 100, theta, 2)
    assert [(*x.shape, x.dtype) for x in found] == [
        (1, 100, torch.float64),
        (3, 1, torch.float64),
        (100, torch.int64),
        (3, torch.int32),
        (1, 3, 100, 2, torch.float32),
    ]


def test_torch_places_tokens_on_a_cpu():
    q, k, _ = qkv()
    assert not passes.places(q, k, torch.tensor([0, 100]), "cosine")
