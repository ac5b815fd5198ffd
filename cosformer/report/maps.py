"""Maps of attention: which token looks at which, a panel for each head."""

from collections.abc import Mapping
from typing import Any

from cosformer.report.figures import figure_bytes
from cosformer.report.learning import NAMES

Maps = dict[str, list[list[float]]]
"""Name of a head -> its weights, a row for each query; every row sums to 1."""


def attention_figure(maps: Mapping[str, Maps], file_format: str) -> bytes:
    """A row of panels for each mechanism. Darker: a larger weight, by its square root."""
    columns = max(len(heads) for heads in maps.values())

    def draw(figure: Any) -> None:
        axes = figure.subplots(len(maps), columns, squeeze=False)
        for line, (name, heads) in zip(axes, maps.items(), strict=True):
            line[0].set_ylabel(f"{NAMES[name]}\nquery", fontsize=9)
            for axis, (head, weights) in zip(line, heads.items(), strict=False):
                roots = [[weight**0.5 for weight in row] for row in weights]
                axis.imshow(roots, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
                axis.set_title(head, fontsize=9)
                axis.set_xticks([])
                axis.set_yticks([])
        for axis in axes[-1]:
            axis.set_xlabel("key", fontsize=9)

    return figure_bytes(draw, (2.4 * columns, 2.6 * len(maps)), file_format)
