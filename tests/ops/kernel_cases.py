"""Problems for the kernels, each with its formula in a few plain lines, and the rule for errors.

Used under Triton's interpreter and on a GPU, so it needs torch alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from formula import FEATURES, ROUNDINGS, RULES, cosine_weight, results
from torch import Tensor

from cosformer import attention, linear_attention


@dataclass(frozen=True)
class Case:
    """What is computed, and of what shape."""

    call: Callable[..., Tensor] = attention
    options: dict = field(default_factory=dict)
    heads: int = 2
    kv_heads: int = 2
    keys: float = 1.0  # per query
    width: int = 8
    value_width: int = 8
    gated: bool = False
    closed: bool = False  # a gate in fifty, and the last but one, lets nothing through
    masked: bool = False
    packed: bool = False

    def lengths(self, length: int) -> tuple[int, int]:
        return length, max(1, int(length * self.keys))


CAUSAL = {"causal": True}
LINEAR = {"causal": True, "feature_map": "relu"}
NONE = {"causal": True, "feature_map": "identity", "normaliser": "none"}
GAMMA = {"gamma": torch.tensor([0.9, 0.99])}
DECAY = {"decay": torch.tensor([0.5, 0.99])}
CASES = {
    "causal": Case(options=CAUSAL),
    "bidirectional": Case(),
    "cross": Case(keys=0.6),
    "causal, more keys": Case(options=CAUSAL, keys=1.7),
    "causal, more queries": Case(options=CAUSAL, keys=0.6),
    "grouped": Case(options=CAUSAL, heads=4, width=5, value_width=20),
    "grouped, both ways": Case(heads=4, width=20, value_width=5),
    "masked": Case(options=CAUSAL, masked=True),
    "masked, both ways": Case(masked=True),
    "packed": Case(options=CAUSAL, packed=True),
    "packed, both ways": Case(packed=True),
    "raised cosine": Case(options={**CAUSAL, "weight": "raised_cosine", "horizon": 20.0}),
    "a horizon for each head": Case(options={**CAUSAL, "horizon": torch.tensor([5e3, 9e3])}),
    "plain relu": Case(linear_attention, LINEAR),
    "linear transformer": Case(linear_attention, {**CAUSAL, "feature_map": "1+elu"}),
    "signed": Case(linear_attention, {**CAUSAL, "feature_map": "silu", "rule": "signed"}),
    "added": Case(linear_attention, {"feature_map": "relu", "rule": "add", "theta": 1e-4}),
    "retention": Case(linear_attention, {**NONE, **GAMMA}, value_width=16),
    "packed, decaying": Case(linear_attention, {**LINEAR, **GAMMA}, packed=True),
    "gated": Case(linear_attention, NONE, gated=True),
    "gated, scaled": Case(linear_attention, {**NONE, "scale": 0.3}, gated=True, masked=True),
    "scaled, both ways": Case(
        linear_attention,
        {"feature_map": "relu", "theta": 1e-4, "normaliser": "none", "scale": 3.0},
        keys=0.6,
    ),
    "closed gates": Case(linear_attention, NONE, gated=True, closed=True),
    "fading quotient": Case(linear_attention, {**LINEAR, **GAMMA}),
    "gated quotient": Case(
        linear_attention, {**CAUSAL, "feature_map": "1+elu"}, gated=True, closed=True
    ),
    "decaying": Case(options={**CAUSAL, **DECAY}),
    "decaying, both ways": Case(options=DECAY, masked=True, value_width=16),
    "gated, both ways": Case(gated=True, closed=True),
    "packed, gated, both ways": Case(gated=True, packed=True),
    "gated, divided": Case(linear_attention, {**LINEAR, "theta": 1e-4}, gated=True),
}


def draw(
    case: Case, length: int, *, batch: int = 1, seed: int = 0, device: str = "cpu"
) -> tuple[list[Tensor], dict]:
    """Leaves in float64 (q, k, v and, gated, log-decays), and the options that hold tensors."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = case.lengths(length)
    shapes = [
        (batch, case.heads, queries, case.width),
        (batch, case.kv_heads, keys, case.width),
        (batch, case.kv_heads, keys, case.value_width),
    ]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = [q + 0.5, k + 0.5, v]
    if case.gated:
        gates = torch.rand(batch, case.heads, queries, generator=generator, dtype=torch.float64)
        leaves.append(-0.3 * gates)
        if case.closed:
            leaves[3][..., 7::50] = leaves[3][..., -2:-1] = -100.0
    options = dict(case.options)
    if case.masked:
        options["key_mask"] = torch.rand(batch, keys, generator=generator) < 0.7
    if case.packed:
        ends = [0, queries // 3, queries // 3, queries - queries // 4, queries]
        options["cu_seqlens"] = torch.tensor(ends)
    moved = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
    return [x.to(device) for x in leaves], moved


def ours(case: Case, options: dict, impl: str) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None) -> Tensor:
        decay = {} if gates is None else {"log_decay": gates}
        return case.call(q, k, v, **options, **decay, impl=impl)

    return call


def plain(case: Case, options: dict) -> Callable[..., Tensor]:
    """The quadratic formula in the dtype of its inputs, weights rounded to it once."""

    def call(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        phi = FEATURES[options.get("feature_map", "relu")]
        weight = weights(options, q, k).to(q.dtype)
        if gates is not None:
            total = gates.double().cumsum(-1)
            gap = total[..., :, None] - total[..., None, :]
            seen = (gap.tril() - gap.triu()).exp()  # weights are zero where nothing is seen
            weight = weight * seen.to(q.dtype)
        score = phi(q) @ phi(k).mT * weight
        if "key_mask" in options:
            score = score * options["key_mask"][:, None, None].to(q.dtype)
        if options.get("normaliser") == "none":
            return options.get("scale", 1.0) * (score @ v)
        return score @ v / RULES[options.get("rule", "clamp")](score.sum(-1, keepdim=True))

    return call


def weights(options: dict, q: Tensor, k: Tensor) -> Tensor:
    """w(i, j) in float64, `[T, S]` or `[H, T, S]`, without the decay of gates."""
    horizon, theta = options.get("horizon"), options.get("theta", 0.0)
    if "feature_map" in options:  # of the family, which has an angle instead
        horizon = math.pi / (2 * theta) if theta else math.inf
    rate, raised = options.get("gamma", options.get("decay")), "weight" in options
    about = {name: options[name] for name in ("causal", "cu_seqlens") if name in options}
    return cosine_weight(q, k, horizon=horizon, decay=rate, raised=raised, **about)


def check(
    case: Case,
    length: int,
    dtype: torch.dtype,
    *,
    impl: str = "triton",
    roundings: float = ROUNDINGS,
    layout: Callable[[Tensor], Tensor] = torch.clone,
    **where: object,
) -> None:
    """The kernels err at most twice as much as the plain formula at that precision.

    Both against float64, plus a few roundings of the largest value for the first tokens: for them
    the formula may be lucky, and gradients cancel, down to zero for a single token. Among all
    tokens of a long sequence a few count little. But a gate's gradient sums over all later tokens,
    and a signed denominator may be near zero anywhere.
    """
    leaves, options = draw(case, length, **where)
    rounded = [x.to(dtype) for x in leaves]
    if case.gated:
        rounded[3] = leaves[3].float()  # gates are float32 beside any rows
    truth = results(plain(case, options), [x.double() for x in rounded])
    formula = results(plain(case, options), rounded)
    given = [*map(layout, rounded[:3]), *rounded[3:]]
    found = again = results(ours(case, options, impl), given, layout)
    if leaves[0].is_cuda:  # the interpreter runs one program after the other
        again = results(ours(case, options, impl), given, layout)
    names = ("out", "dq", "dk", "dv", "dgate")
    rounding = torch.finfo(dtype).eps * max(float(t.abs().max()) for t in truth)
    for name, t, f, mine, same in zip(names, truth, formula, found, again, strict=False):
        assert torch.equal(mine, same), f"{name} differs between two runs"
        assert mine.isfinite().all(), f"{name} is not finite"
        f = torch.where(f.isfinite(), f.double(), t)  # where it overflows it allows nothing
        errors = (f - t).norm(), (mine.double() - t).norm()
        everywhere = name == "dgate" or options.get("rule") == "signed"
        room = roundings * rounding / (1 if everywhere else length)
        allowed = 2 * errors[0] + room * math.sqrt(max(1, t.numel()))
        assert errors[1] <= allowed, f"{name}: {errors[1]:.2e} > {allowed:.2e}"
