"""Every kind of model learns small batches by heart."""

import pytest
import torch
from model_cases import VOCABULARY, config, draw
from torch.nn import functional as F

from cosformer.models import create_model

MASK = VOCABULARY - 1
HIDDEN = torch.arange(10) % 4 == 1
LESSONS = {
    "decoder": lambda t: ((t[:, :-1],), t[:, 1:]),
    "masked-lm": lambda t: ((t.masked_fill(HIDDEN, MASK),), t.where(HIDDEN, -100)),
    "encoder-decoder": lambda t: ((t, t.flip(1)[:, :-1]), t.flip(1)[:, 1:]),  # mirror images
    "classifier": lambda t: ((t,), t[:, 0] % 5),
    "pairs": lambda t: ((t, t.flip(0)), t[:, 0] % 5),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*(("cosformer", kind) for kind in LESSONS), ("softmax", "encoder-decoder")]
)
def test_two_batches_are_learnt_by_heart(name, kind):
    torch.manual_seed(0)
    model = create_model(config(name, kind=kind, width=32, layers=1))
    batches = []
    for seed in (1, 2):
        tokens = draw(4, 10, seed=seed) % MASK
        tokens[:, 0] = tokens[:, -1] = torch.arange(4) + 4 * seed  # or the start tells nothing
        batches.append(LESSONS[kind](tokens))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)

    def loss_of(given, targets):
        out = model(*given)
        return F.cross_entropy(out.reshape(-1, out.shape[-1]), targets.flatten())

    for step in range(150):
        optimiser.zero_grad()
        loss_of(*batches[step % 2]).backward()
        optimiser.step()
    assert max(loss_of(*batch).item() for batch in batches) < 0.05
