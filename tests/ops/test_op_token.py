"""Kernels of a model's step, under Triton's interpreter, against the same in plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from cosformer.mechanisms import HeldCache
from cosformer.mechanisms.dense.softmax_token import SoftmaxToken, stretch_of
from cosformer.ops import After, Clock, Layout, Norm, State, SumsToken, laid_out
from cosformer.ops.layout import SumsStep
from cosformer.ops.step import Recurrence
from cosformer.ops.triton import INTERPRETED, add_norm, linear_rows, sums_token, take_likeliest
from cosformer.ops.triton.rows import FEW, early_launch

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
EPS = 1e-6


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clock(batch):
    length = torch.arange(batch) * 7 + 3
    return Clock(length - 1, length)


@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 48, 40), (3, 20, 9), (2, 64, 41)])
@pytest.mark.parametrize("way", ["plain", "norm", "gelu", "residual", "all"])
def test_rows_by_one_kernel_are_those_of_torch(rows, width, columns, way):
    x, weight = draw(rows, 2 * width)[:, :width], draw(columns, width, seed=1) / width**0.5
    bias = None if way == "plain" else draw(columns, seed=2)
    norm = Norm(draw(width, seed=3), draw(width, seed=4), 1e-5) if way in ("norm", "all") else None
    residual = draw(rows, columns, seed=5) if way in ("residual", "all") else None
    gelu = way in ("gelu", "all")
    right = x if norm is None else F.layer_norm(x, (width,), *norm)
    right = F.linear(right, weight, bias)
    right = F.gelu(right) if gelu else right
    right = right if residual is None else right + residual
    found = linear_rows(x, weight, bias, norm=norm, gelu=gelu, residual=residual)
    assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("far", [1e3, -3e4])
def test_a_norm_by_one_sweep_keeps_its_digits_far_from_zero(far):
    """Mean and spread are made at once, where the plain Σx² − (Σx)² would lose all digits."""
    x, weight = draw(2, 64) + far, draw(9, 64, seed=1) / 8
    x[1, 0] += 50  # the number that the kernel measures from stands apart
    norm = Norm(draw(64, seed=3), draw(64, seed=4), 1e-5)
    wide = [each.double() if isinstance(each, torch.Tensor) else each for each in norm]
    right = F.linear(F.layer_norm(x.double(), (64,), *wide), weight.double())
    plain = F.linear(F.layer_norm(x, (64,), *norm), weight)
    found = linear_rows(x, weight, None, norm=norm)
    allowed = 2 * (plain - right).norm() + 64 * torch.finfo(torch.float32).eps * right.norm()
    assert (found - right).norm() <= allowed


def test_kernels_start_early_where_there_are_few_rows(monkeypatch):
    assert not early_launch(draw(1, 8))["EARLY"]  # a CPU has no such launches
    monkeypatch.setattr("cosformer.ops.triton.rows._can_start_early", lambda device: True)
    assert early_launch(draw(FEW, 8)) == {"EARLY": True, "launch_pdl": True}
    assert early_launch(draw(FEW + 1, 8)) == {"EARLY": False}


@pytest.mark.parametrize("added", [False, True])
def test_a_sum_and_its_norm_by_one_kernel(added):
    x, more = draw(5, 37), draw(5, 37, seed=1) if added else None
    norm = Norm(draw(37, seed=3), draw(37, seed=4), 1e-5)
    total, out = add_norm(x, more, norm)
    right = x + more if added else x
    assert_close(total, right)
    assert_close(out, F.layer_norm(right, (37,), *norm), rtol=1e-4, atol=1e-5)


SUMS = {
    "cosine": {},
    "plain": {"horizon": torch.inf},
    "grouped": {"heads": 6, "key_heads": 2},
    "odd widths": {"width": 5, "value_width": 3},
    "a horizon per head": {"horizon": torch.tensor([30.0, 90.0])},
    "a decay per head": {"decay": torch.tensor([[0.9, 0.5]], dtype=torch.float64)},
    "one decay": {"decay": torch.tensor([[0.9]], dtype=torch.float64)},
    "a decay per token": {"log_most": -0.01},
    "norm and sigmoid": {"norm": True, "gate": "sigmoid", "log_most": -0.01},
    "silu": {"gate": "silu"},
}


@pytest.mark.parametrize("case", SUMS)
def test_a_token_of_sums_by_one_kernel_is_that_of_torch(case):
    given = {"heads": 2, "key_heads": 2, "width": 8, "value_width": 16, "horizon": 100.0}
    given |= {"decay": None, "log_most": None, "norm": False, "gate": "", **SUMS[case]}
    sizes = given["heads"], given["key_heads"], given["width"], given["value_width"]
    batch, per_token = 3, given["log_most"] is not None
    zeros = torch.zeros(3, dtype=torch.int64)
    empty = State.empty(
        batch,
        *sizes[1:],
        horizon=given["horizon"],
        per_token=per_token,
        position=zeros,
    )
    horizon = torch.as_tensor(given["horizon"], dtype=torch.float64).reshape(-1, 1)
    kind = "plain" if given["horizon"] is torch.inf else "cosine"
    by = Recurrence(torch.pi / 2 / horizon, kind, eps=EPS, decay=given["decay"])
    after = After(draw(sizes[3], seed=8) if given["norm"] else None, 1e-6, given["gate"])
    options = {"gate": bool(given["gate"]), "controls": int(per_token)}
    layouts = [Layout.of(*sizes, **options, ones=ones) for ones in (False, True)]
    time, joined = clock(batch), laid_out(empty)
    if per_token:
        joined = joined._replace(log_decay=empty.log_decay.clone())
    torches = SumsToken(layouts[1], joined, by, after, time, given["log_most"])
    given = SumsStep(layouts[0], empty, after, by.theta, by.decay, given["log_most"], EPS)
    for token in range(4):
        rows = draw(batch, layouts[0].columns, seed=token)
        right = torches(with_ones(rows, *layouts))
        assert_close(sums_token(rows, given, time.length), right, rtol=1e-4, atol=1e-5)
        time.tick()
        time.length.add_(1)
    for mine, theirs in zip(empty.tensors, joined.tensors, strict=True):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def with_ones(rows, plain, ones):
    """The same numbers in the layout with a 1 after each head's values."""
    values = rows[:, plain.v : plain.gate].unflatten(1, (plain.key_heads, -1))
    values = F.pad(values, (0, 1), value=1.0).flatten(1)
    found = torch.cat([rows[:, : plain.v], values, rows[:, plain.gate :]], 1)
    return F.pad(found, (0, ones.columns - found.shape[1]))  # cut, if that is negative


@pytest.mark.parametrize("base", [None, 1e4])
@pytest.mark.parametrize("gate", ["", "sigmoid"])
@pytest.mark.parametrize(("heads", "key_heads", "length"), [(2, 2, 20), (4, 2, 70)])
def test_a_token_of_softmax_by_kernels_is_that_of_torch(base, gate, heads, key_heads, length):
    batch, width, value_width = 3, 16, 24
    layout = Layout.of(
        heads, key_heads, width, value_width, gate=bool(gate), controls=0, ones=False
    )
    position = torch.tensor([length - 5, 0, length // 2])
    keys = draw(batch, key_heads, length, width, seed=1)
    values = draw(batch, key_heads, length, value_width, seed=2)
    caches = [HeldCache(keys.clone(), values.clone(), position, "Softmax") for _ in range(2)]
    after = After(draw(value_width, seed=8) if gate else None, 1e-6, gate)
    time = Clock(position, position + 4)
    torches, kernels = (SoftmaxToken(layout, cache, after, time, base) for cache in caches)
    for token in range(2):
        rows = draw(batch, layout.columns, seed=token)
        assert_close(kernels._by_kernels(rows), torches(rows), rtol=1e-4, atol=1e-5)
        time.tick()
        time.length.add_(1)
        position.add_(1)
    for mine, theirs in zip(*(cache[:2] for cache in caches), strict=True):
        assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("room", [None, 12])
def test_the_likeliest_token_by_one_kernel(room):
    logits = draw(5, 41000)
    logits[0, [7, 40999, 30]] = 9.0  # equally likely: the first
    logits[1, 5000 - 1000] = float("nan")
    logits[2, 3] = float("inf")
    chosen, token = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    names = ("drawn", "length", "position")
    counts = {name: torch.arange(5) + 10 * n for n, name in enumerate(names)}
    before = {name: count.clone() for name, count in counts.items()}
    take_likeliest(logits, chosen, token, **counts, room=room)
    chosen = chosen[range(5), before["length"] % 3]
    assert chosen.tolist() == [7, -1, -1, *logits[3:].argmax(-1).tolist()]
    assert token.tolist() == chosen.clamp(min=0).tolist()
    moved = {name: count + 1 for name, count in before.items()}
    if room is not None:
        moved["position"].clamp_(max=room - 1)
    assert all(torch.equal(counts[name], moved[name]) for name in names)


def test_few_streams_share_their_keys_among_many_programs():
    assert stretch_of(2048, 12) == 64
    assert stretch_of(65536, 768) == 1024
    assert [stretch_of(length, 12) for length in (16, 16384)] == [64, 512]
    assert stretch_of(2**20, 12) == 4096  # no more parts than a program can join


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_there():
    """The interpreter takes what the compiler refuses."""
    script = Path(__file__).parent / "compile_steps_script.py"
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 14
