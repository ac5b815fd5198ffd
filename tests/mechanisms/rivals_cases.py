"""Rivals of softmax in 16 bits, beside their formulas in plain torch."""

import math

import torch
from mechanism_cases import draw, make, tokens
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.mechanisms.dense.nystromformer import pseudo_inverse
from cosformer.mechanisms.request import Request, seen

RIVALS = {
    "linformer": {"max_length": 5001, "projected": 32},
    "nystromformer": {"landmarks": 16, "kernel": 33},
    "sinkhorn": {"block": 64},
    "synthesizer": {"max_length": 1001},
    "synthesizer-factorised": {"max_length": 5001},
    "synthesizer-dense": {"max_length": 5001},
}
CASES = [(name, False) for name in RIVALS] + [(name, True) for name in list(RIVALS)[2:]]
LONG = [
    ("sinkhorn", True),
    ("linformer", False),
    ("nystromformer", False),
    ("synthesizer-dense", True),
]
DTYPES = [torch.bfloat16, torch.float16]
SHARP = [12, 28]  # what other blocks have left is 1e-10, too little for float16, or 1e-56


def linformer(mechanism, q, k, v, causal):
    mixed = (
        mix[:, : k.shape[2]].to(q.dtype) @ x
        for mix, x in ((mechanism.key_mix, k), (mechanism.value_mix, v))
    )
    keys, values = mixed
    return (q @ keys.mT / math.sqrt(mechanism.width)).softmax(-1) @ values


def nystromformer(mechanism, q, k, v, causal):
    """Means and the inverse in float32."""
    marks, keys = mechanism._landmarks(q.float(), k.float())
    middle = pseudo_inverse((marks @ keys.mT).softmax(-1), mechanism.iterations)
    seen = (marks.to(q.dtype) @ k.mT).softmax(-1) @ v
    mixed = (middle @ seen.float()).to(q.dtype)
    left = (q @ keys.to(q.dtype).mT / math.sqrt(mechanism.width)).softmax(-1)
    reach = mechanism.kernel // 2
    weight = mechanism.conv.to(q.dtype)[:, None, :, None]
    return left @ mixed + F.conv2d(F.pad(v, (0, 0, reach, reach)), weight, groups=q.shape[1])


def sinkhorn(mechanism, q, k, v, causal):
    """The permutation in float64, whose numbers hold what is left beside a sharp one."""
    length = q.shape[2]
    real = mechanism._real(length, q.device)
    mixing = mechanism._log_permutation(q.double(), k.double(), causal).exp()
    shares = mixing[..., None] * real  # [B H N N b]
    total = shares.sum(3, keepdim=True)
    shares = (shares / torch.where(total > 0, total, 1)).to(q.dtype)
    rows, keys, values = (mechanism._split(x) for x in (q, k, v))
    moved_k, moved_v = (torch.einsum("bhijp,bhjpd->bhipd", shares, x) for x in (keys, values))
    seen = real[:, None].expand(-1, mechanism.block, -1)
    own = (rows @ keys.mT).masked_fill(~(seen.tril() if causal else seen), -math.inf)
    moved = (rows @ moved_k.mT).masked_fill(~(total.movedim(3, -2) > 0), -math.inf)
    weights = (torch.cat([own, moved], -1) / math.sqrt(mechanism.width)).softmax(-1)
    out = weights @ torch.cat([values, moved_v], 3)
    return out.flatten(2, 3)[:, :, :length]


def synthesizer(mechanism, q, k, v, causal, mask):
    request = Request(causal, mask, 0, {})
    scores = mechanism.scores(q, *mechanism.positions(q, k, request))
    found = seen(request, q.shape[2], k.shape[2], q.device)
    if found is not None:
        scores = scores.masked_fill(~found, torch.finfo(q.dtype).min)
    weights = scores.softmax(-1)
    return (weights if found is None else weights * found.any(-1, keepdim=True)) @ v


FORMULAS = {"linformer": linformer, "nystromformer": nystromformer, "sinkhorn": sinkhorn}


def by_formula(name, mechanism, q, k, v, causal, mask):
    """Each item alone, without its padding; of Linformer, queries have none."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if name.startswith("synthesizer"):
        return synthesizer(mechanism, q, k, v, causal, mask)
    if mask is None:
        return FORMULAS[name](mechanism, q, k, v, causal)
    outs = []
    for n, real in enumerate(mask):
        one = [x[n : n + 1, :, real] for x in (q, k, v)]
        if name == "linformer":
            outs.append(linformer(mechanism, q[n : n + 1], *one[1:], causal))
        else:
            out = FORMULAS[name](mechanism, *one, causal)
            outs.append(torch.zeros_like(q[n : n + 1]).index_copy(2, real.nonzero()[:, 0], out))
    return torch.cat(outs)


def results(attend, mechanism, inputs):
    """Output and all gradients, in float64."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    leaves = [*inputs, *mechanism.parameters()]
    given = draw(*out.shape, seed=8).to(out)
    slopes = torch.autograd.grad(out, leaves, given, materialize_grads=True)  # not all look at q
    return [x.detach().cpu().double() for x in (out, *slopes)]


def sharpened(q, k, v, scale, block=64):
    """One query of a block makes it take almost all from the next, and the last from the first."""
    length, width = k.shape[2:]
    turn = scale * F.one_hot(torch.arange(length) // block, width)  # [T D]
    first = torch.arange(0, length, block)
    count = (length - first).clamp(max=block)[:, None]
    q = q.index_add(2, first, (turn[first].roll(-1, 0) * count).to(q).expand_as(q[:, :, first]))
    return q, k + turn, v


def check_rival(name, causal, length, dtype, *, masked=False, key_heads=4, sharp=0, device="cpu"):
    """Errors of at most twice those of plain torch with products of 16 bits."""
    mechanism = make(name, heads=4, width=64, key_heads=key_heads, **RIVALS[name])
    length = min(length, mechanism.traits.max_length or length)
    drawn = tokens(mechanism, length)[:3]
    inputs = [x.to(dtype) for x in (sharpened(*drawn, sharp) if sharp else drawn)]
    mask = draw(2, length, seed=9) > -0.8 if masked else None

    def attend(*given):
        return mechanism(*given, causal=causal, key_mask=mask)[0]

    right = results(attend, mechanism, [x.double() for x in inputs])
    mechanism.to(device, torch.float32)
    inputs, mask = [x.to(device) for x in inputs], None if mask is None else mask.to(device)
    ours = results(attend, mechanism, inputs)
    plain = results(
        lambda *given: by_formula(name, mechanism, *given, causal, mask), mechanism, inputs
    )
    for found, usual, exact in zip(ours, plain, right, strict=True):
        assert (found - exact).norm() <= 2 * (usual - exact).norm()


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
    """Neither forward nor backward."""
    length = RIVALS[name].get("max_length", 4096)
    mechanism = make(name, heads=2, width=64, **RIVALS[name]).to(device, torch.bfloat16)
    inputs = [x.to(device, torch.bfloat16) for x in tokens(mechanism, length, batch=1)[:3]]
    inputs = [x.requires_grad_() for x in inputs]
    with Long(inputs[0].numel()) as seen:
        mechanism(*inputs, causal=causal)[0].sum().backward()
    assert seen.wide == []
