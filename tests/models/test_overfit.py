"""Every kind of model learns two small batches by heart, with cosFormer and with softmax."""

import pytest
import torch
from model_cases import VOCABULARY, config, draw
from torch.nn import functional as F

from cosformer.models import create_model

MASK = VOCABULARY - 1


def decoder(tokens):
    return (tokens[:, :-1],), tokens[:, 1:]


def encoder(tokens):
    """What stood at every fourth place, and is hidden there."""
    hidden = torch.arange(tokens.shape[1]) % 4 == 1
    return (tokens.masked_fill(hidden, MASK),), tokens.where(hidden, -100)


def encoder_decoder(tokens):
    """A source to its mirror image."""
    mirrored = tokens.flip(1)
    return (tokens, mirrored[:, :-1]), mirrored[:, 1:]


KINDS = {"decoder": decoder, "masked-lm": encoder, "encoder-decoder": encoder_decoder}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["cosformer", "softmax"])
def test_two_batches_are_learnt_by_heart(name, kind):
    torch.manual_seed(0)
    model = create_model(config(name, kind=kind, width=32, layers=1))
    batches = []
    for seed in (1, 2):
        tokens = draw(4, 10, seed=seed) % MASK
        tokens[:, 0] = tokens[:, -1] = torch.arange(4) + 4 * seed  # or the start tells nothing
        batches.append(KINDS[kind](tokens))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(150):
        inputs, targets = batches[step % 2]
        loss = F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()
    for inputs, targets in batches:
        loss = F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten())
        assert loss.item() < 0.05


@pytest.mark.parametrize("kind", ["classifier", "pairs"])
def test_classes_are_learnt_by_heart(kind):
    torch.manual_seed(0)
    model = create_model(config(kind=kind, width=32, layers=1))
    tokens, classes = draw(8, 10), draw(8) % 5
    inputs = (tokens, tokens.flip(0)) if kind == "pairs" else (tokens,)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(model(*inputs), classes).backward()
        optimiser.step()
    assert F.cross_entropy(model(*inputs), classes).item() < 0.05
