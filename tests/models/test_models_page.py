"""docs/models.md: its code runs, its table of presets is that of the code."""

import re
from pathlib import Path

import torch

from cosformer.models import PARAMETERS, PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_the_code_runs_from_top_to_bottom():
    torch.manual_seed(0)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "models.md", "exec"), names)
    assert names["logits"].shape == (2, 100, 256)
    assert names["classes"].shape == (2, 10)
    assert 1 <= len(names["first"]) <= 20


def test_the_presets_are_those_of_the_code():
    for name, config in PRESETS.items():
        numbers = (config.layers, config.width, config.heads, config.vocabulary, PARAMETERS[name])
        assert " | ".join([f"| `{name}`", *(f"{n:,}" for n in numbers)]) + " |" in PAGE
