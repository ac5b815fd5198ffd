"""Decays per token for the kernels of `triton/gates.py`: lengths, strides, dtypes, closed gates."""

import torch

from cosformer.ops.autograd.gates import _RunningSum
from cosformer.ops.problem import decay_gradient, running_sum
from cosformer.ops.triton import balanced_decay_gradient

LEAST = -110.0
LENGTHS = [1, 100, 4097, 12_300]  # blocks of 4096


def draw(length, dtype, *, turned=False, device="cpu"):
    """`[2, 3, T]`, a few of them at the least and below; `turned`: as `[B, T, H]` in memory."""
    generator = torch.Generator().manual_seed(4)
    gates = -torch.rand(2, 3, length, generator=generator).to(dtype)
    gates[..., 7::50], gates[..., 8::500] = LEAST, -torch.inf
    gates = gates.to(device)
    return gates.transpose(1, 2).contiguous().transpose(1, 2) if turned else gates


def results(sums, gates):
    """Sums, and the gradient of the gates."""
    leaf = gates.detach().requires_grad_()
    out = sums(leaf, LEAST)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device)
    (grad,) = torch.autograd.grad(out, leaf, weight.view(out.shape))
    return out.detach(), grad


def check_sums(length, dtype, **where):
    """The kernel's sums are those of the formula up to float64's rounding, and so its gradients."""
    given = draw(length, dtype, **where)
    found, right = (results(sums, given) for sums in (_RunningSum.apply, running_sum))
    torch.testing.assert_close(found[0], right[0], rtol=1e-13, atol=1e-13)
    assert found[1].dtype == dtype
    assert ((found[1] == 0) == (right[1] == 0)).all()
    torch.testing.assert_close(found[1], right[1])


def check_balanced(length, scale, device="cpu"):
    """The kernel's gradient of L is the formula's in float64; one row has nothing but zeros."""
    pair = scale * torch.randn(2, 2, 3, length, 1, generator=torch.Generator().manual_seed(4))
    pair[:, 1, 1] = 0
    by_query, by_key = pair.to(device)
    decay = torch.zeros(2, 3, length, dtype=torch.float64, device=device)
    zeros = decay.new_zeros(2, 3)
    right = decay_gradient(by_query.double(), by_key.double(), None, decay, zeros)
    found = balanced_decay_gradient(by_query, by_key, decay)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9 * scale)
    torch.testing.assert_close(found.sum(-1), zeros, rtol=0, atol=1e-9 * scale)
