"""`cosformer mechanisms`: what there is, what each can do and costs; docs/mechanisms.md."""

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosformer.check import check_new_file
from cosformer.mechanisms import (
    MECHANISMS,
    LinearMechanism,
    Mechanism,
    create,
    mechanism_class,
)
from cosformer.report import MISSING, markdown, write_whole

HEADS, WIDTH = 8, 64
LENGTHS = (1024, 4096, 16384)
STREAM = 4000
"""Sizes at which costs are told."""
RULES = {"clamp": "at least", "signed": "kept away from 0 by", "add": "sums plus"}
"""What becomes of a denominator by eps."""
POSITIONAL = "names"
"""The option that words without a flag belong to."""
WORDS = {"names": MECHANISMS}

INTRODUCTION = f"""# Mechanisms

Made by `cosformer mechanisms --write docs/mechanisms.md` from the classes themselves.

`cosformer.nn.AttentionLayer(embed_dim, num_heads, mechanism=NAME, options={{…}})` puts any
mechanism between the same projections; `cosformer.mechanisms.create(NAME, heads, width, …)` makes
the mechanism alone. A mechanism that cannot do what a call asks for raises an error, which names a
mechanism that can.

* **causal**: `exact`; or `leaky`, where no weight lies on a future token, but future tokens have a
  part in *which* past tokens are seen.
* **full**: attends in both directions. **cross**: queries attend to another sequence.
  **mask**: takes a `key_mask`.
* **streams**: what a stream remembers: sums of `constant` size, a `window` of tokens, or all tokens
  (`cache`).
* **positions**: whether weights depend on distances (`relative`) or on `absolute` positions.
* **time**: how it grows with the length n. **state**: how many numbers a stream remembers with
  {HEADS} heads of {WIDTH} after {STREAM:,} tokens (or after its longest sequence, if shorter).

Below each mechanism stand the operations and the memory traffic (MB) of a forward pass. Operations
are those of the formula, as if each token were added to a state and read from it. A causal pass in
chunks also computes the pairs within a chunk, about as many operations again. Softmax and patterns
count the pairs of both directions, for causal passes too. Memory traffic is what is read or written
in float32: inputs, output, and what is stored between passes.

All mechanisms have second derivatives. Those that go through PyTorch's attention have them only
within `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, and raise an error without it. On a GPU
`local`, `longformer`, `sparse`, `sparse-strided` and `bigbird` go through FlexAttention, which has
no second derivatives and may refuse `retain_graph=True`; with `impl="blocked"` they have second
derivatives and take `retain_graph=True`. All mechanisms go through `torch.compile(fullgraph=True)`,
but those that read a `key_mask` on the host do so only without a `key_mask`; `bigbird` and
`reformer` are compiled anew for every length.
"""


@dataclass(frozen=True)
class Options:
    """The mechanisms: one table of all, or the formula, options and costs of those named."""

    names: tuple[str, ...] = ()
    """Mechanisms to tell more about."""
    write: Path | None = None
    """Write the page about all of them to this file instead."""

    def __post_init__(self) -> None:
        for name in self.names:
            mechanism_class(name)
        if self.names and self.write is not None:
            raise ValueError(f"names must not be given beside write, got {', '.join(self.names)}")
        if self.write is not None:
            check_new_file("write", self.write)


def run(options: Options) -> int:
    if options.write is not None:
        changed = write_whole(options.write, page().encode())
        print(f"{options.write}: {'written' if changed else 'unchanged'}")
    elif options.names:
        print("\n\n".join(about(name) for name in options.names))
    else:
        print(aligned(table()))
        print("\ncosformer mechanisms NAME tells more about one.")
    return 0


def page() -> str:
    """docs/mechanisms.md."""
    header, *lines = table()
    parts = [INTRODUCTION, markdown(header, lines), *(about(name) for name in MECHANISMS)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table() -> list[list[str]]:
    """A header, and a line for each mechanism."""
    header = ["mechanism", "causal", "full", "cross", "mask", "streams", "positions", "time"]
    lines = [[*header, "state", "source"]]
    for name, kind in MECHANISMS.items():
        traits, mechanism = kind.traits, _usual(name)
        streams = traits.state != "none"
        tokens = min(STREAM, mechanism.traits.max_length or STREAM)
        state = f"{mechanism.state_size(tokens):,}" if streams else MISSING
        abilities = [_yes(traits.full), _yes(traits.cross), _yes(traits.mask)]
        known = [_or_dash(traits.state), _or_dash(traits.positions), traits.growth, state]
        lines.append([name, _or_dash(traits.causal), *abilities, *known, kind.source])
    return lines


def about(name: str) -> str:
    """Formula, abilities, options and costs of one mechanism, as markdown."""
    kind, mechanism = MECHANISMS[name], _usual(name)
    first_line = inspect.cleandoc(kind.__doc__ or "").splitlines()[0]
    lines = [f"## {name}", "", first_line, "", f"    {kind.formula}", ""]
    lines += [f"* source: {kind.source}", f"* can do: {mechanism.traits.abilities}"]
    lines += [f"* {extra}" for extra in _extras(mechanism)]
    lines += [f"* options: {', '.join(_options(kind)) or 'none'}"]
    if kind.__init__ is not Mechanism.__init__ and kind.__init__.__doc__:
        lines += [f"  ({' '.join(kind.__init__.__doc__.split())})"]
    lines += [f"* forward, {HEADS} heads of {WIDTH}: {'; '.join(_costs(mechanism))}"]
    return "\n".join(lines)


def aligned(lines: list[list[str]]) -> str:
    """Columns for a terminal."""
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


@functools.cache
def _usual(name: str) -> Mechanism:
    """With all defaults; drawing parameters takes longer than all the rest."""
    return create(name, HEADS, WIDTH)


def _extras(mechanism: Mechanism) -> Iterator[str]:
    traits = mechanism.traits
    if traits.controls:
        yield f"per-token controls, projected by the layer: {', '.join(traits.controls)}"
    if traits.random:
        yield "random numbers, saved in checkpoints and drawn anew by `redraw` alone"
    if isinstance(mechanism, LinearMechanism) and mechanism.normaliser == "sum":
        yield f"denominators are {RULES[mechanism.rule]} {mechanism.eps:g}"
    if traits.norm_after:
        yield "no denominator: the layer puts an RMSNorm after it"
    if traits.multiple_of > 1:
        yield f"works in blocks of {traits.multiple_of} tokens, which it pads and masks by itself"
    if traits.reads_mask:
        yield "reads a `key_mask` on the host: no `fullgraph=True` with one"
    if not traits.second_derivative:
        yield "goes through PyTorch's attention: first derivatives alone"


def _options(kind: type[Mechanism]) -> Iterator[str]:
    for name, parameter in list(inspect.signature(kind).parameters.items())[2:]:
        if name not in ("key_heads", "generator"):
            bare = parameter.default is inspect.Parameter.empty
            yield f"`{name}`" if bare else f"`{name}={parameter.default!r}`"


def _costs(mechanism: Mechanism) -> Iterator[str]:
    limit = mechanism.traits.max_length or max(LENGTHS)
    for length in [n for n in LENGTHS if n <= limit] or [limit]:
        cost = mechanism.cost(length)
        amount = f"{cost.operations / 1e9:,.3g} G operations, {cost.bytes / 1e6:,.3g} MB"
        yield f"{amount} at {length:,} tokens"


def _yes(able: bool) -> str:
    return "yes" if able else MISSING


def _or_dash(trait: str) -> str:
    return MISSING if trait in ("no", "none") else trait
