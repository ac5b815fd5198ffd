"""Linformer, Nyströmformer and Sinkhorn on a GPU: what is long stays in 16 bits."""

import pytest
import torch
from mechanism_cases import tokens
from rivals_cases import CASES, DTYPES, LENGTHS, check_rival
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.mechanisms import create

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Long(TorchDispatchMode):
    """Which dtypes the floating-point tensors have that are so long."""

    def __init__(self, long):
        super().__init__()
        self.long, self.dtypes = long, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() >= self.long:
                self.dtypes.add(x.dtype)
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_16_bits_are_no_worse_than_in_plain_torch(name, causal, length, dtype):
    check_rival(name, causal, length, dtype, device="cuda")


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_masks_and_grouped_heads(name, causal, masked):
    check_rival(name, causal, 1001, torch.bfloat16, masked=masked, key_heads=2, device="cuda")


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("length", [16384, 16001])
def test_a_long_sequence_has_the_output_and_gradients_of_float32(name, causal, length):
    """Pieces of queries, and keys that FlashAttention parts among multiprocessors."""
    options = {"max_length": length} if name == "linformer" else {}
    torch.manual_seed(0)
    mechanism = create(name, 4, 64, **options).cuda()
    inputs = [x.cuda().bfloat16() for x in tokens(mechanism, length, batch=1)[:3]]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, _ = mechanism(*leaves, causal=causal)
        weight = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(dtype)
        found.append([out, *torch.autograd.grad(out, leaves, weight)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm()


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_no_tensor_as_long_as_the_inputs_is_wider_than_they_are(name, causal):
    length = 16384
    options = {"max_length": length} if name == "linformer" else {}
    mechanism = create(name, 4, 64, **options).to("cuda", torch.bfloat16)
    q, k, v = (x.cuda().bfloat16() for x in tokens(mechanism, length, batch=1)[:3])
    with Long(q.numel()) as seen, torch.no_grad():
        mechanism(q, k, v, causal=causal)
    assert seen.dtypes == {torch.bfloat16}
