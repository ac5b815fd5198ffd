"""The cost model of docs/scale.md, its table and scale.svg: `python docs/scale_picture.py`.

One causal layer forward, of batch 1, over GPUs that share a sequence: linear attention that gathers
states, and softmax by ring attention. Measured constants come from results/ops-cuda.jsonl, bytes of
a state are those that tests count, and the rest are assumptions, named here and on the page.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from cosformer import records
from cosformer.distributed.exchange import MANY
from cosformer.report.figures import draw_grid, figure_bytes
from cosformer.report.writing import markdown, write_whole

HEADS, WIDTH = 16, 64
STATE = 4 * HEADS * 2 * WIDTH * (WIDTH + 1)
"""Bytes of a state in float32, of which a test counts that a rank sends one."""
KEYS_AND_VALUES = 2 * 2 * HEADS * WIDTH
"""Bytes of a token's keys and values in bfloat16."""
READ_AGAIN = 0.5
"""Assumed: what a state costs, as a share of attention, which reads twice as many bytes."""
NEAR, FAR = 300e9, 40e9
"""Assumed: bytes a second that a GPU receives within a machine of 8, and between machines."""
LATENCY = 10e-6
"""Assumed: seconds of a hop from one GPU to another."""
GPUS, TOKENS = (8, 64, 1024), (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)

HERE = Path(__file__).parent
PAGE, PICTURE, ROWS = HERE / "scale.md", HERE / "scale.svg", HERE.parent / "results/ops-cuda.jsonl"
BEGIN, END = "<!-- made by docs/scale_picture.py -->\n", "<!-- /made -->"


class Cost(NamedTuple):
    """What a layer costs a GPU."""

    received: float
    """Bytes."""
    seconds: float


class Model(NamedTuple):
    """What was measured on one GPU."""

    token: float
    """Seconds of linear attention for a token."""
    pair: float
    """Seconds of softmax attention for a pair of tokens, of which half are seen."""

    def states(self, gpus: int, tokens: int) -> Cost:
        """States are gathered by few GPUs and handed on by many, then attention begins."""
        computes = (1 + READ_AGAIN) * self.token * tokens / gpus
        if gpus < MANY:
            received, hops = (gpus - 1) * STATE, math.log2(gpus)
        else:
            hops = 1 + math.ceil(math.log2(gpus - 1))
            received = hops * STATE
        return Cost(received, computes + received / _rate(gpus) + LATENCY * hops)

    def ring(self, gpus: int, tokens: int) -> Cost:
        """If GPUs have equal work, and what travels hides behind it, or it behind what travels."""
        received = (gpus - 1) * KEYS_AND_VALUES * tokens / gpus
        computes = self.pair * tokens**2 / gpus
        return Cost(received, max(computes, received / _rate(gpus)) + LATENCY * (gpus - 1))


def measured() -> Model:
    """By the newest run that timed both sides at 65,536 tokens on an H200."""
    found: dict[str, dict[str, float]] = {}
    cell = {"batch": 1, "heads": HEADS, "length": 65_536, "width": WIDTH, "causal": True}
    cell |= {"dtype": "bfloat16", "pass": "forward"}
    for row in records.read(ROWS):
        if row.what == "time" and cell.items() <= row.config.items():
            found.setdefault(row.date, {})[row.config["candidate"]] = row.value / 1e3
    newest = max(date for date, by in found.items() if {"auto", "sdpa_cudnn"} <= by.keys())
    times = found[newest]
    return Model(times["auto"] / 65_536, times["sdpa_cudnn"] / 65_536**2)


def constants() -> str:
    """What the model is made of, and whence it comes."""
    token, pair = measured()
    at = "ms for 65,536 tokens on an H200"
    lines = [
        [
            "linear attention",
            f"{token * 1e9:.2f} ns a token",
            f"measured: {token * 65_536e3:.3g} {at}",
        ],
        [
            "softmax",
            f"{pair * 1e12:.2f} ps a pair, of which half are seen",
            f"measured: {pair * 65_536**2 * 1e3:.3g} {at}, by cuDNN",
        ],
        ["a state", f"{STATE:,} bytes", "counted by a test"],
        ["keys and values", f"{KEYS_AND_VALUES:,} bytes a token", "bfloat16"],
        [
            "the state of a rank's own keys",
            f"{READ_AGAIN:g} of its attention",
            "assumed: it reads half of the bytes",
        ],
        [
            "links",
            f"{NEAR / 1e9:.0f} GB/s within 8 GPUs, {FAR / 1e9:.0f} GB/s between machines",
            "assumed",
        ],
        ["a hop", f"{LATENCY * 1e6:.0f} µs", "assumed"],
    ]
    return markdown(["constant", "value", "whence"], lines)


def table() -> str:
    """Bytes and seconds, a line for each number of GPUs and tokens."""
    header = ["GPUs", "tokens", "a GPU receives: states", "ring", "a layer takes: states", "ring"]
    model, lines = measured(), []
    for gpus in GPUS:
        for tokens in (2**16, 2**20, 2**26):
            costs = model.states(gpus, tokens), model.ring(gpus, tokens)
            sizes = [spelled(cost.received, {"GB": 1e9, "MB": 1e6}) for cost in costs]
            times = [spelled(cost.seconds, {"s": 1, "ms": 1e-3}) for cost in costs]
            lines.append([f"{gpus:,}", short(tokens), *sizes, *times])
    return markdown(header, lines)


def draw(figure: Any) -> None:
    model = measured()
    left, right = figure.subplots(1, 2)
    for gpus, colour in zip(GPUS, ("#7fb8d0", "#0b6e99", "#08415c"), strict=True):
        for kind, line in ((model.states, "o-"), (model.ring, "s--")):
            name = f"{'states' if line == 'o-' else 'ring attention'}, {gpus:,} GPUs"
            about = {"color": colour if line == "o-" else _warm(gpus), "label": name}
            costs = [kind(gpus, tokens) for tokens in TOKENS]
            left.loglog(TOKENS, [cost.received for cost in costs], line, markersize=4, **about)
            right.loglog(TOKENS, [cost.seconds for cost in costs], line, markersize=4, **about)
    left.set_title("bytes that a GPU receives, a layer", loc="left", fontsize=11)
    right.set_title("seconds of a layer, forward", loc="left", fontsize=11)
    for axis in (left, right):
        axis.set_xticks(TOKENS, [short(tokens) for tokens in TOKENS])
        axis.minorticks_off()
        axis.set_xlabel("tokens of a sequence, over all GPUs")
        draw_grid(axis)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside right center")
    about = f"A model, not a measurement: {HEADS} heads of {WIDTH}, batch 1, causal; H200 kernels"
    figure.supxlabel(f"{about} as measured, links as assumed", fontsize=7, color="#777777")


def picture() -> bytes:
    """The SVG; the same rows give the same file."""
    return figure_bytes(draw, (10.5, 4.0), "svg")


def page(text: str) -> str:
    """The page with both tables as the model has them now."""
    first, second, third = text.split(BEGIN)
    made = ((second, constants()), (third, table()))
    parts = (f"{now}\n{END}{old.split(END, 1)[1]}" for old, now in made)
    return BEGIN.join([first, *parts])


def spelled(value: float, units: dict[str, float]) -> str:
    """Three digits, in the first unit that is not above the value."""
    unit = next((name for name, size in units.items() if value >= size), list(units)[-1])
    number = value / units[unit]
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"


def short(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}K"


def _rate(gpus: int) -> float:
    return NEAR if gpus <= 8 else FAR


def _warm(gpus: int) -> str:
    return dict(zip(GPUS, ("#e9b08f", "#c4501b", "#7a2e0c"), strict=True))[gpus]


if __name__ == "__main__":
    write_whole(PICTURE, picture())
    write_whole(PAGE, page(PAGE.read_text()).encode())
