"""A mechanism of a user's own, known by a name without a change to the package."""

import pytest
import torch
from torch.testing import assert_close

from cosformer.mechanisms import MECHANISMS, LinearMechanism, Mechanism, create, register
from cosformer.models import LanguageModel, ModelConfig


class Squared(LinearMechanism):
    """Linear attention on squares."""

    source = "a user's file"
    formula = "φ(x) = x²"

    def queries(self, q, start):
        return q.square()

    keys = queries


@pytest.fixture(autouse=True)
def restored():
    before = dict(MECHANISMS)
    yield
    MECHANISMS.clear()
    MECHANISMS.update(before)


def test_a_registered_mechanism_is_made_by_its_name():
    register("squared", Squared)
    register("squared", Squared)  # as an import that runs twice
    mechanism = create("squared", 2, 6)
    q, k, v = torch.randn(3, 1, 2, 9, 6)
    assert_close(mechanism(q, k, v)[0], mechanism.weights(q, k) @ v)


def test_a_model_takes_a_registered_mechanism():
    register("squared", Squared)
    config = ModelConfig(mechanism="squared", vocabulary=20, width=16, heads=2, layers=1)
    assert LanguageModel(config)(torch.tensor([[1, 2, 3]])).shape == (1, 3, 20)


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ValueError, match="name must not be taken, got 'softmax', which is Softmax"):
        register("softmax", Squared)
    assert MECHANISMS["softmax"] is not Squared


@pytest.mark.parametrize("cls", [int, torch.nn.Linear, "Squared", Squared(2, 6)])
def test_what_is_no_mechanism_is_refused(cls):
    with pytest.raises(TypeError, match="cls must be a subclass of Mechanism, got"):
        register("squared", cls)


def test_a_mechanism_that_says_nothing_of_itself_or_has_no_name_is_refused():
    with pytest.raises(ValueError, match="cls must have traits, got Silent without it"):
        register("silent", type("Silent", (Mechanism,), {}))
    with pytest.raises(TypeError, match="name must be a string of at least one letter, got ''"):
        register("", Squared)
