"""A mechanism of one's own is a class and a line: the one of CONTRIBUTING.md keeps the contract."""

import inspect
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import test_contract
import test_contract_module
import torch

from cosformer.mechanisms import MECHANISMS, LinearMechanism, Mechanism, register
from cosformer.models import LanguageModel, ModelConfig, Sampling, generate
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


def test_a_model_takes_what_is_registered_and_an_import_may_run_twice(squared):
    register(squared, MECHANISMS[squared])
    config = ModelConfig(mechanism=squared, vocabulary=20, width=16, heads=2, layers=1)
    assert LanguageModel(config)(torch.tensor([[1, 2, 3]])).shape == (1, 3, 20)


class Learned(LinearMechanism):
    source, formula, feature_map = "an example", "a decay that is learned", "relu"
    traits = replace(LinearMechanism.traits, full=False, cross=False)
    forgets = True

    def __init__(self, heads, width, *, key_heads=None):
        super().__init__(heads, width, key_heads=key_heads)
        self.logit = torch.nn.Parameter(torch.zeros(self.key_heads))

    def weight(self, k, request):
        return {"gamma": self.logit.sigmoid()}


class Keyed(Learned):
    def weight(self, k, request):
        return {"log_decay": -self.logit.exp()[:, None] * k.square().mean(-1)}


@pytest.mark.parametrize("kind", [Learned, Keyed])
@torch.no_grad()
def test_a_step_has_the_decay_of_now_whatever_it_is_made_of(kind):
    mechanism, (q, k, v) = kind(2, 4), torch.randn(3, 1, 2, 9, 4)
    for _ in range(2):
        state, out = mechanism.empty_state(k, v), []
        for n in range(9):
            each, state = mechanism.step(*(x[:, :, n : n + 1] for x in (q, k, v)), state)
            out.append(each)
        torch.testing.assert_close(torch.cat(out, 2), mechanism(q, k, v, causal=True)[0])
        mechanism.logit += 2


def changed(name, methods):
    """A subclass of a mechanism that changes queries in these methods alone."""

    def change(method):
        return lambda self, q, *rest: getattr(super(kind, self), method)(1 - q, *rest)

    kind = type("Changed", (MECHANISMS[name],), {method: change(method) for method in methods})
    return kind


CHANGED = {
    "softmax": ["attend"],
    "local": ["attend"],
    "cosformer": ["attend", "advance"],
    "cosformer-multiscale": ["queries"],
    "cosformer-gated": ["queries"],
}


@pytest.mark.parametrize("name", CHANGED)
@torch.no_grad()
def test_what_a_subclass_changes_is_not_gone_around_by_a_faster_way(monkeypatch, name):
    monkeypatch.setitem(MECHANISMS, "mine", changed(name, CHANGED[name]))
    torch.manual_seed(0)
    sizes = {"vocabulary": 20, "width": 16, "heads": 2, "layers": 1, "positions": "none"}
    model = LanguageModel(ModelConfig(mechanism="mine", **sizes)).double().eval()
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    tokens = torch.randint(20, (1, 9))
    state, out = model.empty_state(1), []
    for token in tokens.split(1, 1):
        logits, state = model.step(token, state)
        out.append(logits)
    torch.testing.assert_close(torch.cat(out, 1), model(tokens))
    (found,) = generate(model, tokens.tolist(), Sampling(max_new_tokens=20, temperature=0))
    read = torch.tensor([tokens[0].tolist() + found])
    assert model(read[:, :-1])[0, 8:].argmax(-1).tolist() == found
    assert model.backbone.blocks[0].attention.mechanism.splits == (CHANGED[name] == ["queries"])


SILENT = type("Silent", (Mechanism,), {})
REFUSED = [
    ("softmax", MECHANISMS["linear"], ValueError, "name must not be taken, got .* is Softmax"),
    ("own", SILENT, ValueError, "cls must have traits, got Silent without it"),
    (3, MECHANISMS["linear"], TypeError, "name must be a string, got int"),
    ("", MECHANISMS["linear"], ValueError, r"name must be one word without \*, got ''"),
    ("my own", MECHANISMS["linear"], ValueError, r"name must be one word without \*, got 'my own'"),
    ("own*2", MECHANISMS["linear"], ValueError, r"name must be one word without \*, got 'own\*2'"),
    ("own", "Squared", TypeError, "cls must be a subclass of Mechanism, got"),
    ("own", MECHANISMS["linear"](2, 6), TypeError, "cls must be a subclass of Mechanism, got"),
    ("own", torch.nn.Linear, TypeError, "cls must be a subclass of Mechanism, got"),
]


@pytest.mark.parametrize(("name", "cls", "error", "message"), REFUSED)
def test_what_cannot_be_registered_is_refused_and_nothing_changed(name, cls, error, message):
    before = dict(MECHANISMS)
    with pytest.raises(error, match=message):
        register(name, cls)
    assert before == MECHANISMS
