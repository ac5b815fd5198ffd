"""What is recommended is what recipes train, and every mechanism can wear it."""

import pytest
import torch

from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, create_model, recommended
from cosformer.recipes import RECIPES, Setting, recipe, use_of
from cosformer.tasks import KNOWN, TASKS

KINDS = {"decoder": "lm", "masked-lm": "mlm", "classifier": "classify", "pairs": "classify"}
"""Kind of model -> the use that its fields are recommended for."""
LENGTH = 21


@pytest.mark.parametrize("mechanism", [None, "softmax", "cosformer-multiscale*2 softmax"])
def test_every_task_has_a_recipe_that_trains_what_is_recommended(mechanism):
    assert RECIPES.keys() == TASKS.keys() | KNOWN.keys()
    for name in RECIPES:
        for device in ("cpu", "cuda"):
            found = recipe(name, Setting(device, mechanism=mechanism))
            assert found.task.name == name
            assert found.model.items() >= recommended(use_of(name), mechanism).items()


def test_an_unknown_use_is_an_error_that_names_those_there_are():
    with pytest.raises(
        ValueError, match="use must be one of lm, mlm, classify, recall, got 'chess'"
    ):
        recommended("chess")
    with pytest.raises(ValueError, match=r"must be one of .*, got 'sofmax'; did you mean"):
        recommended("lm", "softmax sofmax*3")
    with pytest.raises(TypeError, match="both_ways must be a bool, got str"):
        recommended("lm", both_ways="no")


def learns(kind, mechanism, **fields):
    """Whether such a model can be made; if so it reads padded tokens and gets gradients."""
    given = {"vocabulary": 11, "width": 16, "max_length": LENGTH, **fields, "mechanism": mechanism}
    classes = 3 if kind in ("classifier", "pairs") else None
    try:
        model = create_model(ModelConfig(kind=kind, classes=classes, **given))
    except ValueError:
        return False
    tokens = torch.randint(11, (2, LENGTH))
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [14]])
    out = model(tokens, tokens, mask, mask) if kind == "pairs" else model(tokens, mask)
    if kind in ("decoder", "masked-lm"):
        out = out[mask]  # those of padding mean nothing
    out.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert out.isfinite().all()
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    return True


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_works_as_recommended_wherever_it_works_bare(mechanism):
    torch.manual_seed(0)
    for kind, use in KINDS.items():
        assert learns(kind, mechanism) == learns(kind, **recommended(use, mechanism)), kind


@pytest.mark.parametrize("kinds", [("masked-lm", "decoder"), ("decoder", "classifier")])
@pytest.mark.parametrize("mechanism", ["cosformer-multiscale", "softmax", "linear"])
def test_the_same_fields_serve_either_direction_where_both_are_learnt(mechanism, kinds):
    fields = recommended(KINDS[kinds[1]], mechanism, both_ways=True)
    assert all(learns(kind, **fields) for kind in kinds)


def test_masked_tokens_before_a_causal_task_make_the_convolution_odd():
    widths = {
        pretrain: recipe("mqar", Setting(pretrain=pretrain)).model["conv"]
        for pretrain in (None, "causal", "masked")
    }
    assert widths == {None: 4, "causal": 4, "masked": 5}
