"""Features in groups, as a GPU takes them where they are wider than its kernels."""

from types import SimpleNamespace

import pytest
import torch
from mechanism_cases import CASES, make, tokens
from torch.testing import assert_close

from cosformer.mechanisms import LinearMechanism
from cosformer.mechanisms.linear import family, groups

FAMILY = [
    (name, causal)
    for name, causal in CASES
    if name != "rope-linear" and isinstance(make(name), LinearMechanism)
]


@pytest.mark.parametrize(("name", "causal"), FAMILY)
def test_groups_of_features_add_up(name, causal, monkeypatch):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    whole, _ = mechanism(q, k, v, causal=causal, controls=controls)
    widths = []
    attend = groups.linear_attention
    monkeypatch.setattr(family, "goes_in_groups", lambda features: True)
    monkeypatch.setattr(groups, "GROUP", 8)
    monkeypatch.setattr(
        groups,
        "linear_attention",
        lambda q, k, v, **options: (widths.append(q.shape[-1]), attend(q, k, v, **options))[1],
    )
    assert_close(mechanism(q, k, v, causal=causal, controls=controls)[0], whole)
    assert max(widths) <= 8
    if mechanism.feature_map == "identity":
        assert not any(width % groups.ALIGNED for width in widths)


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [
        (torch.bfloat16, 128, False),
        (torch.bfloat16, 136, True),
        (torch.float16, 256, False),
        (torch.float32, 257, True),
    ],
)
def test_what_goes_in_groups_on_a_gpu(dtype, width, expected):
    on_gpu = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 1, 1, width))
    assert groups.goes_in_groups(on_gpu) == expected
    on_gpu.is_cuda = False
    assert not groups.goes_in_groups(on_gpu)


@pytest.mark.parametrize("name", ["linear", "rope-linear"])
def test_sums_do_not_end_where_float16_does(name, monkeypatch):
    monkeypatch.setattr(family, "goes_in_groups", lambda features: True)
    mechanism = make(name, width=64)
    q, k, v, _ = tokens(mechanism, 3000)
    q, k, v = (x.abs().half() for x in (q, k, v))  # weights that sum to more than 65,504
    found, _ = mechanism(q, k, v, causal=True)
    right, _ = mechanism(*(x.double() for x in (q, k, v)), causal=True)
    assert found.dtype == torch.float16
    assert_close(found.double(), right, rtol=2e-3, atol=2e-3)
