"""Every mechanism of the table at a size for tests, and tokens for it."""

from typing import Any

import torch
from torch import Tensor

from cosformer.mechanisms import MECHANISMS, Mechanism, create

HEADS, WIDTH, LENGTH = 2, 6, 37
F64 = torch.float64

OPTIONS: dict[str, dict[str, Any]] = {
    "cosformer": {"horizon": 64},
    "cosformer-multiscale": {"horizon": 20, "decay": 0.4, "learned": True},  # 37 tokens pass it
    "cosformer-gated": {"horizon": 20},
    "delta": {"features": "relu"},
    "rfa": {"features": 24},
    "rfa-arccos": {"features": 24},
    "rfa-gated": {"features": 24},
    "spe": {"realizations": 8},
    "based": {"features": 4},
    "transnormer-local": {"block": 8},
    "local": {"window": 8},
    "longformer": {"window": 6, "global_tokens": 2},
    "sparse": {"stride": 6, "summary": 2},
    "sparse-strided": {"stride": 5},
    "bigbird": {"block": 3, "random_blocks": 1},
    "reformer": {"bucket": 4, "rounds": 2},
    "linformer": {"max_length": 64, "projected": 5},
    "nystromformer": {"landmarks": 8, "kernel": 5},
    "sinkhorn": {"block": 5},
    "synthesizer": {"max_length": 64},
    "synthesizer-factorised": {"max_length": 64},
    "synthesizer-dense": {"max_length": 64},
}
"""Options that a test needs: sizes that make blocks, windows and limits matter at LENGTH tokens."""

NAMES = tuple(MECHANISMS)
CASES = [
    (name, causal)
    for name in NAMES
    for causal in (True, False)
    if (MECHANISMS[name].traits.causal != "no" if causal else MECHANISMS[name].traits.full)
]
"""Name, causal: what the traits say can be asked."""


def names_where(**traits: Any) -> list[str]:
    """Names whose traits have one of these values each: `names_where(state=("cache",))`."""
    return [
        name
        for name in NAMES
        if all(getattr(MECHANISMS[name].traits, key) in values for key, values in traits.items())
    ]


STREAMS = names_where(state=("constant", "window", "cache"))
"""Names of mechanisms that stream."""


def cases_where(**traits: Any) -> list[tuple[str, bool]]:
    """The cases of those names."""
    return [case for case in CASES if case[0] in names_where(**traits)]


def make(name: str, heads: int = HEADS, width: int = WIDTH, **options: Any) -> Mechanism:
    """In float64, parameters moved away from the symmetry of their first values."""
    torch.manual_seed(0)
    mechanism = create(name, heads, width, **{**OPTIONS.get(name, {}), **options}).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mechanism.eval()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def tokens(
    mechanism: Mechanism,
    length: int = LENGTH,
    *,
    keys: int | None = None,
    batch: int = 2,
    value_width: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = F64,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """q, k, v and controls; q and k lean to the positive, so that few rows sum to about 0."""
    keys = length if keys is None else keys
    rows = (batch, mechanism.key_heads, keys)
    q = draw(batch, mechanism.heads, length, mechanism.width, seed=seed, dtype=dtype) + 0.5
    k = draw(*rows, mechanism.width, seed=seed + 1, dtype=dtype) + 0.5
    v = draw(*rows, value_width or mechanism.width, seed=seed + 2, dtype=dtype)
    controls = {
        name: draw(*rows, seed=seed + 3 + n, dtype=dtype)
        for n, name in enumerate(mechanism.traits.controls)
    }
    return q, k, v, controls


def cut(controls: dict[str, Tensor], where: slice) -> dict[str, Tensor]:
    return {name: control[:, :, where] for name, control in controls.items()}


def stream(mechanism, rows, controls, pieces):
    """The outputs of a stream in pieces of so many tokens, end to end, and the state after it."""
    state, outs, begin = mechanism.empty_state(*rows[1:]), [], 0
    for piece in pieces:
        now = slice(begin, begin := begin + piece)
        given = (x[:, :, now] for x in rows)
        out, state = mechanism(*given, causal=True, state=state, controls=cut(controls, now))
        outs.append(out)
    return torch.cat(outs, 2), state


def by_steps(mechanism, rows, controls, state, first=0):
    """The outputs of the tokens from `first` on, each by a step, end to end."""
    outs = []
    for t in range(first, rows[0].shape[2]):
        now = slice(t, t + 1)
        given = (x[:, :, now] for x in rows)
        out, state = mechanism.step(*given, state, controls=cut(controls, now))
        outs.append(out)
    return torch.cat(outs, 2)


def results(mechanism, inputs, controls=None, **options):
    """The output, and the gradients of inputs, controls and parameters."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    controls = {name: x.detach().requires_grad_() for name, x in (controls or {}).items()}
    out, _ = mechanism(*inputs, controls=controls, **options)
    leaves = [*inputs, *controls.values(), *mechanism.parameters()]
    given = draw(*out.shape, seed=8).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, given, materialize_grads=True)]


@torch.no_grad()
def check_graph(mechanism, inputs, others):
    """A call that a CUDA graph repeats gives what the call does; inputs lie on a GPU."""
    right = mechanism(*others)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mechanism(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mechanism(*inputs)[0]
    for x, other in zip(inputs, others, strict=True):
        x.copy_(other)
    graph.replay()
    assert torch.equal(out, right)
