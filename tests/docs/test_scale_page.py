"""The table of docs/scale.md is what the model above it gives."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
README = (Path(__file__).parents[2] / "README.md").read_text()
TOKENS = {"64K": 2**16, "1M": 2**20, "64M": 2**26}


def _three_digits(value: float, units: dict[str, float]) -> str:
    """In the first unit that is not above it."""
    unit = next((name for name, size in units.items() if value >= size), list(units)[-1])
    number = value / units[unit]
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"


def test_every_row_follows_from_the_model():
    (code,) = (x for x in re.findall(r"(?s)```python\n(.*?)```", PAGE) if "LATENCY =" in x)
    names = {}
    exec(code, names)
    rows = re.findall(r"(?m)^\| ([\d,]+) \| (\w+) \| (.*) \| (.*) \| (.*) \| (.*) \|$", PAGE)
    assert len(rows) == 9
    for gpus, tokens, *shown in rows:
        size = (int(gpus.replace(",", "")), TOKENS[tokens])
        (received, takes), (received_by_ring, ring_takes) = (
            names["states"](*size),
            names["ring"](*size),
        )
        sizes, times = {"GB": 1e9, "MB": 1e6}, {"s": 1, "ms": 1e-3}
        assert shown == [
            _three_digits(received, sizes),
            _three_digits(received_by_ring, sizes),
            _three_digits(takes, times),
            _three_digits(ring_takes, times),
        ]


def test_its_measured_constants_are_those_of_the_readme():
    softmax, ours = re.search(
        r"H200.* 1 × 16 × 65,536 × 64 \| ([\d.]+) \| ([\d.]+)", README
    ).groups()
    linear, pairs = re.search(r"(?s)LINEAR = ([\d.]+)e-3.*SOFTMAX = ([\d.]+)e-3", PAGE).groups()
    assert (float(linear), float(pairs)) == (float(ours), float(softmax))
