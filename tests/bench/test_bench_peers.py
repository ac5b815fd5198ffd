"""Peers get what they would compute by themselves: layouts, features, backends."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from cosformer import attention, linear_attention
from cosformer.bench import peers
from cosformer.bench.candidates import CANDIDATES, draw, token_major


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, normalize: bool
) -> tuple[Tensor, None]:
    """What fla computes, on its layout `[B, T, H, D]`."""
    assert scale == 1.0
    assert all(x.is_contiguous() for x in (q, k, v))
    rule = "sum" if normalize else "none"
    inputs = (x.transpose(1, 2) for x in (q, k, v))
    return linear_attention(*inputs, causal=True, normaliser=rule).transpose(1, 2), None


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("fla.ops.linear_attn")
    module.chunk_linear_attn = module.fused_chunk_linear_attn = _chunk  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", module)
    monkeypatch.setattr(peers, "_compiled_features", lambda: peers.features)
    return module


@pytest.mark.usefixtures("fla")
def test_cosformer_on_fla_is_cosformer() -> None:
    q, k, v = token_major(draw((2, 3, 37, 8), 3, dtype=torch.float32))
    found = CANDIDATES["fla_cos"].attend(q, k, v, causal=True)
    torch.testing.assert_close(found, attention(q, k, v, causal=True, impl="reference"))


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("name", ["fla_linear", "fla_fused"])
def test_linear_attention_of_fla_has_neither_cosine_nor_denominator(name: str) -> None:
    q, k, v = token_major(draw((2, 3, 37, 8), 3, dtype=torch.float64))
    expected = (q @ k.mT).tril() @ v
    torch.testing.assert_close(CANDIDATES[name].attend(q, k, v, causal=True), expected)


def test_features_are_rounded_once() -> None:
    (x,) = draw((2, 37, 3, 8), 1, dtype=torch.bfloat16)
    table = peers.cosine_table(37, x.device)
    exact = peers.features(x.double(), table.double())
    assert torch.equal(peers.features(x, table), exact.bfloat16())


def test_a_missing_package_is_known_before_it_is_called() -> None:
    absent = {n for n, c in CANDIDATES.items() if not c.is_present}
    assert absent <= {"fla_cos", "fla_linear", "fla_fused"}


@pytest.mark.parametrize("causal", [True, False])
def test_a_backend_that_is_named_computes_softmax(causal: bool) -> None:
    q, k, v = draw((1, 2, 9, 8), 3, dtype=torch.float32)
    found = peers.softmax_by(q, k, v, causal=causal, backend=torch.nn.attention.SDPBackend.MATH)
    torch.testing.assert_close(found, peers.softmax(q, k, v, causal=causal))


def test_every_candidate_of_a_gpu_alone_is_refused_elsewhere() -> None:
    alone = [name for name, c in CANDIDATES.items() if c.devices == ("cuda",)]
    assert alone == ["triton", "sdpa_flash", "sdpa_cudnn", "fla_cos", "fla_linear", "fla_fused"]
