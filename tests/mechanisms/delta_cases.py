"""The delta rule at sizes for tests: by kernels, by torch, and by a plain formula in 16 bits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.mechanisms.linear import delta_launch
from cosformer.mechanisms.linear.delta_rule import fade, strict, units

NAMES = ("out", "memory", "dq", "dk", "dv", "dbeta", "dgates", "dmemory")
SLACK = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Of the norm: products of three tf32 ones have 21 bits, and a plain formula may be lucky."""


class Case(NamedTuple):
    width: int
    value_width: int
    key_heads: int = 2
    groups: int = 1
    kind: str = "gated"  # or open, closed, alike


CASES = {
    "usual": Case(64, 64),
    "open": Case(16, 16, kind="open"),
    "grouped": Case(10, 7, 1, 3),
    "closed": Case(20, 33, kind="closed"),
    "alike": Case(64, 20, 1, kind="alike"),
    "wide": Case(80, 100, 1, 2),
}


class Given(NamedTuple):
    """q, k, v as a projection has them, β, gates, a memory, and gradients of the results."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gates: Tensor
    memory: Tensor
    grads: tuple[Tensor, Tensor]

    def results(self, by: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Output, memory, and the gradients of all inputs."""
        leaves = [x.detach().requires_grad_() for x in self[:6]]
        out, memory = by(*leaves)
        slopes = [x.to(y.dtype) for x, y in zip(self.grads, (out, memory), strict=True)]
        return [out.detach(), memory.detach(), *torch.autograd.grad((out, memory), leaves, slopes)]

    def double(self) -> "Given":
        return Given(*(x.double() for x in self[:6]), tuple(x.double() for x in self.grads))


def draw(case: Case, length: int, dtype: torch.dtype, batch: int = 2) -> Given:
    """Where there is a GPU, on it. Of `alike` keys each is nearly the last one, and β nearly 1."""
    generator = torch.Generator().manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = case.key_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def rows(count: int, width: int) -> Tensor:
        return normal(batch, length, count, width).transpose(1, 2)

    q, k, v = (
        rows(heads * case.groups, case.width),
        rows(heads, case.width),
        rows(heads, case.value_width),
    )
    beta, gates = normal(batch, heads, length).sigmoid(), -0.1 * normal(batch, heads, length).abs()
    if case.kind == "alike":
        k, beta = k[:, :, :1] + 1e-2 * k, 1 - 1e-3 * beta
    if case.kind in ("alike", "open"):
        gates = 0 * gates
    if case.kind == "closed":
        gates[..., 3::7], gates[..., 64::5], gates[..., 5::11] = -100.0, -60.0, -torch.inf
    k[:, :, 2::9] = v[:, :, 2::9] = 0  # as masked tokens are
    memory, of_memory = normal(2, batch, heads, case.width, case.value_width).to(device)
    q, k, v, grad = (
        x.to(device, dtype) for x in (q, k, v, rows(heads * case.groups, case.value_width))
    )
    return Given(q, k, v, beta.to(device), gates.to(device), memory, (grad, of_memory))


def plain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """All pairs at once, every number but the solution of the triangle in the dtype of q."""
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    decay, fading = fade(gates)
    q, k = (x.to(dtype) for x in units(q, k, torch.float32))
    since = decay.exp().to(dtype)[..., None]
    left = (decay[..., -1:] - decay).exp().to(dtype)[..., None]
    beta, fading, kept = beta.to(dtype)[..., None], fading.to(dtype), memory.to(dtype)
    asked = beta * (v - since * (k @ kept))
    u = torch.linalg.solve_triangular(
        strict(k, beta, fading).float(), asked.float(), upper=False, unitriangular=True
    ).to(dtype)
    last = since[..., -1:, :] * kept + (k * left).mT @ u
    k, u, since, fading, kept = (
        x.repeat_interleave(groups, 1) for x in (k, u, since, fading, kept)
    )
    return q * since @ kept + (q @ k.mT * fading) @ u, last.float()


def check(given: Given) -> None:
    """Errors of at most twice those of plain torch at the same precision, and a bit of the norm."""
    dtype = given.q.dtype
    right = given.double().results(delta_launch.by_formula)
    rival = given.results(delta_launch.by_formula if dtype == torch.float32 else plain)
    found = given.results(delta_launch.by_kernel)
    again = given.results(delta_launch.by_kernel) if given.q.is_cuda else found
    for name, exact, theirs, ours, same in zip(NAMES, right, rival, found, again, strict=True):
        assert torch.equal(ours, same), f"{name} differs between two runs"
        assert ours.dtype == theirs.dtype, name
        assert ours.isfinite().all(), f"{name} is not finite"
        error, usual = ((x.double() - exact).norm() for x in (ours, theirs))
        allowed = 2 * usual + SLACK[dtype] * exact.norm()
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e} of {exact.norm():.2e}"
