"""A mechanism is a class and a line: the one that CONTRIBUTING.md adds keeps the contract."""

import inspect
import re
import textwrap
from pathlib import Path

import pytest
import test_contract
import test_contract_module
import torch

from cosformer.mechanisms import MECHANISMS
from cosformer.nn import AttentionLayer

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def squared(monkeypatch):
    """The name of the mechanism that CONTRIBUTING.md adds, known while a test runs."""
    (block,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 10
    names = {}
    exec(textwrap.dedent(block), names)
    assert MECHANISMS.pop("squared") is names["Squared"]  # it registers itself, for good
    monkeypatch.setitem(MECHANISMS, "squared", names["Squared"])
    return "squared"


CONTRACT = [
    test
    for module in (test_contract, test_contract_module)
    for name, test in inspect.getmembers(module, inspect.isfunction)
    if name.startswith("test_")
    and set(inspect.signature(test).parameters) <= {"name", "causal"}
    and test is not test_contract_module.test_draws_come_from_the_generator_alone
]


@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
def test_what_contributing_adds_keeps_the_contract(squared, test):
    for causal in (True, False) if "causal" in inspect.signature(test).parameters else (None,):
        test(squared) if causal is None else test(squared, causal)


def test_the_layer_takes_what_contributing_adds(squared):
    layer = AttentionLayer(8, 2, mechanism=squared)
    x = torch.randn(1, 5, 8)
    q, k, v = layer.project(x, x, x, batched=True)
    score = (q.square() @ k.square().mT).tril()
    right = layer.merge_heads(score @ v / score.sum(-1, keepdim=True), batched=True)
    torch.testing.assert_close(layer(x, causal=True), right)
    torch.testing.assert_close(layer.stream(x)[0], right)
