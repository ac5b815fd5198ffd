"""The op written down a second time, in a few lines each, and the rule that judges agreement.

`cosformer` is the paper's formula, `recurrence` the family as a loop over tokens (the cosine as the
real part of a rotation), `prefix_sums` the cosine's two states at every token. None of them shares
a line with the package. It needs torch alone, for tests on a GPU as well.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

ROUNDINGS = 8  # of the largest term, allowed beside the plain error
IMPLEMENTATIONS = ("chunked", "reference")
F64 = torch.float64
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.1 * x),
    "1+elu": lambda x: F.elu(x) + 1,
    "elu": lambda x: torch.where(x > 0, x, x.expm1()),
    "silu": lambda x: x * torch.sigmoid(x),
}
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda total: clamped(total),
    "add": lambda total: total + 1e-6,
    "signed": lambda total: torch.where(total < 0, total.clamp(max=-1e-6), total.clamp(min=1e-6)),
}


def tokens(
    batch=2, heads=2, length=10, *, keys=None, kv_heads=None, width=4, value_width=None, seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v in float64; q and k lean to the positive, so that few rows sum to about 0."""
    generator = torch.Generator().manual_seed(seed)
    keys = length if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = (
        (batch, heads, length, width),
        (batch, kv_heads, keys, width),
        (batch, kv_heads, keys, width if value_width is None else value_width),
    )
    q, k, v = (torch.randn(shape, generator=generator, dtype=F64) for shape in shapes)
    return q + 0.5, k + 0.5, v


def uniform(*shape, low=0.0, high=1.0, seed=5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=F64)


def cosine_weight(
    q,
    k,
    *,
    horizon=None,
    causal=False,
    query_start=None,
    raised=False,
    stretch=False,
    cu_seqlens=None,
    decay=None,
    log_decay=None,
) -> Tensor:
    """w(i, j) in float64, `[T, S]`, `[H, T, S]` or `[B, H, T, S]`."""
    queries, keys = q.shape[2], k.shape[2]
    longest = max(queries, keys, 1)
    if query_start is None:
        query_start = keys - queries if causal else 0
    i, j = (torch.arange(n, dtype=F64, device=q.device) for n in (queries, keys))
    i = i + query_start
    distance = i[:, None] - j
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if stretch:
        i, j = i * longest / max(queries, 1), j * longest / max(keys, 1)
    if cu_seqlens is not None:
        own = torch.bucketize(j, cu_seqlens[1:].double(), right=True)
        seen = seen & (own[:, None] == own)
        longest = cu_seqlens.diff()[own].double()[:, None]
    if horizon is None:
        horizon = longest
    elif isinstance(horizon, Tensor):
        horizon = horizon.double().repeat_interleave(q.shape[1] // len(horizon))[:, None, None]
    angle = math.pi / 2 * (i[:, None] - j) / horizon
    weight = ((1 + torch.cos(2 * angle)) / 2 if raised else torch.cos(angle)) * seen
    if decay is not None:
        rate = torch.as_tensor(decay, dtype=F64).reshape(-1, 1, 1)
        rate = rate.repeat_interleave(q.shape[1] // len(rate), 0)
        weight = weight * rate.to(q.device) ** distance.abs()
    if log_decay is not None:
        total = log_decay.double().cumsum(-1).repeat_interleave(q.shape[1] // log_decay.shape[1], 1)
        weight = weight * (total[..., :, None] - total[..., None, :]).abs().neg().exp()
    return weight


def cosformer_map(q, k, *, key_mask=None, eps=1e-6, **placement) -> Tensor:
    """A with out = A @ v."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    score = (q.relu() @ k.relu().mT) * cosine_weight(q, k, **placement).to(q.dtype)
    if key_mask is not None:
        score = score.masked_fill(~key_mask[:, None, None], 0)
    return score / clamped(score.sum(-1, keepdim=True), eps)


def cosformer(q, k, v, **options) -> Tensor:
    return cosformer_map(q, k, **options) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)


def recurrence(
    q, k, v, *, phi, theta=0.0, decay=None, raised=False, divide=None
) -> tuple[Tensor, Tensor]:
    """S_t = e^(g_t + iθ) S_{t−1} + φ(k_t) [v_t 1]ᵀ, read by Re φ(q_t)·S_t; also the last Re S."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = phi(q), phi(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    theta = torch.as_tensor(theta, dtype=F64).reshape(1, -1, 1, 1) * (2 if raised else 1)
    turn = torch.polar(torch.ones_like(theta), theta).to(torch.complex(q[:1], q[:1]).dtype)
    decay = torch.zeros(q.shape[:3], dtype=q.dtype) if decay is None else decay
    state = flat = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
    sums = []
    for t in range(q.shape[2]):
        kept = decay[:, :, t, None, None].exp()
        new = k[:, :, t, :, None] * v[:, :, t, None]
        state, flat = state * kept * turn + new, flat * kept + new
        weighed = (state.real + flat) / 2 if raised else state.real
        sums.append((q[:, :, t, None] @ weighed)[:, :, 0])
    sums = torch.stack(sums, 2) if sums else v.new_zeros(*q.shape[:3], v.shape[3])
    out = sums[..., :-1] if divide is None else sums[..., :-1] / hold(divide(sums[..., -1:]))
    return out, state.real[..., :-1]


def prefix_sums(q, k, v, *, horizon, causal=True) -> Tensor:
    """cosFormer through Σ cos θj k⁺vᵀ and Σ sin θj k⁺vᵀ, at every token or over all."""
    angle = math.pi / 2 * torch.arange(q.shape[2], dtype=F64) / horizon
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    outer = k.relu()[..., None] * values[..., None, :]
    sums = 0
    for part in (angle.cos(), angle.sin()):
        part = part.to(q.dtype)[:, None]
        state = outer * part[..., None]
        state = state.cumsum(2) if causal else state.sum(2, keepdim=True)
        sums = sums + part * (q.relu()[..., None] * state).sum(-2)
    return sums[..., :-1] / clamped(sums[..., -1:])


def in_pieces(call: Callable, x, cuts, **options) -> tuple[Tensor, object]:
    """A stream between these cuts: its outputs end to end, and the state after it.

    Options are given with every piece, of those for each token its own.
    """
    state, outs = None, []
    for start, stop in pairwise(cuts):
        rows = {n: options[n][..., start:stop] for n in ("log_decay", "key_mask") if n in options}
        out, state = call(*(y[:, :, start:stop] for y in x), state=state, **options | rows)
        outs.append(out)
    return torch.cat(outs, 2), state


def by_steps(call: Callable, x, state, start=0, **options) -> Tensor:
    """The outputs of tokens from `start` on, one by one; of log_decay, each has its own."""
    outs = []
    for now in (slice(t, t + 1) for t in range(start, x[0].shape[2])):
        gate = {n: options[n][..., now] for n in ("log_decay",) if n in options}
        outs.append(call(*(y[:, :, now] for y in x), state, **options | gate))
    return torch.cat(outs, 2)


def results(
    function: Callable, inputs, layout: Callable[[Tensor], Tensor] = torch.clone
) -> list[Tensor]:
    """What `function` returns, and its gradients under fixed random cotangents in that layout."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    generator = torch.Generator().manual_seed(7)
    cotangents = [
        layout(torch.randn(out.shape, generator=generator, dtype=F64).to(leaves[0].dtype).to(out))
        for out in outs
    ]
    grads = torch.autograd.grad(outs, leaves, cotangents, materialize_grads=True)
    return [x.detach() for x in (*outs, *grads)]


def agree(
    op: Callable, plain: Callable, *inputs: Tensor, dtype: torch.dtype = F64, argument: float = 1.0
) -> None:
    """`op` is as right as `plain`, in outputs and gradients.

    Its error against float64 is at most twice that of `plain` in `dtype`, plus a few roundings of
    the terms. Where `plain` cannot tell (float64 is the measure, float16 overflows), the error of
    the next coarser dtype is scaled, and roundings are as many as chance leaves of a sum over all
    keys, since `plain` in float64 has them too. A rounding of the largest `argument` of cos or exp
    counts as many.
    """
    at = {F64: torch.float32, torch.float16: torch.bfloat16}.get(dtype, dtype)
    roundings = ROUNDINGS * max(1.0, argument)
    if dtype == F64:
        roundings = max(roundings, inputs[1].shape[2] ** 0.5)
    precision, scale = torch.finfo(dtype).eps, torch.finfo(dtype).eps / torch.finfo(at).eps
    actual, truth = (results(f, cast(inputs, dtype, to)) for f, to in ((op, dtype), (plain, F64)))
    rough, rough_truth = (results(plain, cast(inputs, at, to)) for to in (at, F64))
    with held_denominators():
        terms = results(plain, cast(inputs, F64))
    for n, (value, right) in enumerate(zip(actual, truth, strict=True)):
        assert value.shape == right.shape, f"result {n}: {value.shape} for {right.shape}"
        plain_error = scale * largest(rough[n].double() - rough_truth[n])
        size = largest(right, terms[n])
        of_q = len(truth) - len(inputs)
        if n > of_q + 2:  # a decay: its gradient is a sum of terms like those of q·dq
            size = max(size, *(float((inputs[0] * x[of_q]).abs().sum()) for x in (truth, terms)))
        allowed = 2 * plain_error + roundings * precision * size
        error = largest(value.double() - right)
        assert error <= allowed, f"result {n}: error {error:.2e}, allowed {allowed:.2e}"


def largest(*tensors: Tensor) -> float:
    return max(float(x.detach().abs().max()) if x.numel() else 0.0 for x in tensors)


_held = False


@contextmanager
def held_denominators():
    """Gradients as if denominators were constants: as large as what cancels in the true ones."""
    global _held
    _held = True
    yield
    _held = False


def hold(total: Tensor) -> Tensor:
    return total.detach() if _held else total


def clamped(total: Tensor, eps: float = 1e-6) -> Tensor:
    """The divisor of a row."""
    return hold(total.clamp(min=eps))


def rounded_once(actual: Tensor, right: Tensor) -> None:
    """A 16-bit result is the float64 one, rounded once: half of eps, and float32's own error."""
    half = torch.finfo(actual.dtype).eps / 2
    torch.testing.assert_close(actual.double(), right, rtol=1.01 * half, atol=1e-6)


def cast(inputs, *dtypes) -> tuple[Tensor, ...]:
    for dtype in dtypes:
        inputs = tuple(x.to(dtype) for x in inputs)
    return inputs
