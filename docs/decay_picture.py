"""Draw decay.svg, the picture of docs/decay.md: `python docs/decay_picture.py`."""

import math
from pathlib import Path
from typing import Any

from cosformer import multiscale_decays
from cosformer.report.figures import figure_bytes

HEADS, HORIZON = 8, 4096
PICTURE = Path(__file__).with_name("decay.svg")


def weight(rate: float, distance: float) -> float:
    """γ^δ cos(πδ/2M): what a token at this distance weighs, beside one at the distance 0."""
    return rate**distance * math.cos(math.pi / 2 * distance / HORIZON)


def draw(figure: Any) -> None:
    from matplotlib import colormaps

    axis = figure.subplots()
    distances = [HORIZON ** (n / 400) for n in range(401)]
    for head, rate in enumerate(multiscale_decays(HEADS)):
        name = f"head {head}: {1 / (1 - rate):.0f} tokens"
        colour = colormaps["viridis"](0.9 * head / (HEADS - 1))
        axis.plot(distances, [weight(rate, x) for x in distances], color=colour, label=name)
    without = [weight(1.0, x) for x in distances]
    axis.plot(distances, without, "--", color="#8a8f98", label="no decay")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(1, HORIZON)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("distance δ between query and key, in tokens")
    axis.set_ylabel("weight γ$^δ$ · cos(πδ / 2M)")
    axis.grid(color="#e6e8eb", linewidth=0.8)
    figure.legend(frameon=False, loc="outside right center", title="reach 1/(1 − γ)")


def picture() -> bytes:
    """The SVG; the same code gives the same file."""
    return figure_bytes(draw, (8.4, 4.0), "svg")


if __name__ == "__main__":
    PICTURE.write_bytes(picture())
