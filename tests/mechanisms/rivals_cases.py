"""Rivals of softmax with products of 16 bits, against themselves in float64."""

import torch
from mechanism_cases import draw, make, results, tokens
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

RIVALS = {
    "linformer": {"max_length": 5001, "projected": 32},
    "nystromformer": {"landmarks": 16, "kernel": 33},
    "sinkhorn": {"block": 64},
    "synthesizer": {"max_length": 1001},
    "synthesizer-factorised": {"max_length": 5001},
    "synthesizer-dense": {"max_length": 5001},
}
CASES = [(name, False) for name in RIVALS] + [(name, True) for name in list(RIVALS)[2:]]
LONG = [case for case in CASES if case[0] != "synthesizer"]  # which stores all scores
DTYPES = [torch.bfloat16, torch.float16]
SHARP = [12, 28]  # what other blocks have left is 1e-10, too little for float16, or 1e-56


def sharpened(q, k, v, scale, block=64):
    """One query of a block makes it take almost all from the next, and the last from the first."""
    length, width = k.shape[2:]
    turn = scale * F.one_hot(torch.arange(length) // block, width)  # [T D]
    first = torch.arange(0, length, block)
    count = (length - first).clamp(max=block)[:, None]
    q = q.index_add(2, first, (turn[first].roll(-1, 0) * count).to(q).expand_as(q[:, :, first]))
    return q, k + turn, v


def check_rival(name, causal, length, dtype, *, masked=False, key_heads=4, sharp=0, device="cpu"):
    """Output and gradients are a few roundings from those of float64, by the norm.

    Or no further than twice as far as those of the matrix in plain PyTorch at that precision.
    """
    mechanism = make(name, heads=4, width=64, key_heads=key_heads, **RIVALS[name])
    length = min(length, mechanism.traits.max_length or length)
    drawn = tokens(mechanism, length)[:3]
    inputs = [x.to(dtype) for x in (sharpened(*drawn, sharp) if sharp else drawn)]
    mask = draw(2, length, seed=9) > -0.8 if masked else None
    options = {"causal": causal, "key_mask": mask}
    right = results(mechanism, [x.double() for x in inputs], **options)
    mechanism.to(device, torch.float32)
    options["key_mask"] = None if mask is None else mask.to(device)
    found = results(mechanism, [x.to(device) for x in inputs], **options)
    found = [x.cpu().double() for x in found]
    rounding = torch.finfo(dtype).eps
    if sharp:  # scores are hundreds, and so are their roundings
        assert (found[0] - right[0]).norm() <= 100 * rounding * right[0].norm()
        assert all(x.isfinite().all() for x in found)
        return
    if name == "synthesizer-dense":  # a unit of 16 bits is on where one of 64 bits may be off
        with sdpa_kernel(SDPBackend.MATH):
            usual = results(mechanism, [x.to(device) for x in inputs], **options)
    else:
        usual = plain_results(mechanism, [x.to(device) for x in inputs], **options)
    for ours, exact, plain in zip(found, right, usual, strict=True):
        allowed = max(12 * rounding * exact.norm(), 2 * (plain.cpu().double() - exact).norm())
        assert (ours - exact).norm() <= allowed


def plain_results(mechanism, inputs, **options):
    """The output, and the gradients of inputs and parameters, by the matrix in their precision."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    matrix = mechanism.weights(q, k, **options).to(v.dtype)
    out = matrix @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    leaves = [q, k, v, *mechanism.parameters()]
    given = draw(*out.shape, seed=8).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, given, materialize_grads=True)]


class Long(TorchDispatchMode):
    """Operations that fill a tensor of so many numbers or more, wider than 16 bits."""

    def __init__(self, long):
        super().__init__()
        self.long, self.wide = long, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            made = isinstance(x, torch.Tensor) and x.is_floating_point() and 0 not in x.stride()
            if made and x.numel() >= self.long and x.itemsize > 2:
                self.wide.append(f"{function} {list(x.shape)}")
        return out


def check_long(name, causal, device="cpu"):
    """Neither forward nor backward makes a long tensor wider than 16 bits."""
    length = RIVALS[name].get("max_length", 4096)
    mechanism = make(name, heads=2, width=64, **RIVALS[name]).to(device, torch.bfloat16)
    inputs = [x.to(device, torch.bfloat16) for x in tokens(mechanism, length, batch=1)[:3]]
    inputs = [x.requires_grad_() for x in inputs]
    with Long(inputs[0].numel()) as seen:
        mechanism(*inputs, causal=causal)[0].sum().backward()
    assert seen.wide == []
