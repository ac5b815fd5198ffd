"""The loss of a token head on a GPU, compiled: right, in the memory of one part of its logits."""

import pytest
import torch
import torch.nn.functional as F

from cosformer.bench.timing import peak_extra_bytes
from cosformer.models import token_loss
from cosformer.models.token_loss import TokenLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY, WIDTH, ROWS, PART = 50304, 256, 4196, 1024


def draw():
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda").mul_(0.1).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS,), device="cuda")
    labels[5] = token_loss.NOT_ASKED
    return x, weight, labels


def test_parts_are_right_and_lie_in_the_memory_of_one(monkeypatch):
    monkeypatch.setitem(token_loss.MOST_LOGITS, "cuda", PART * VOCABULARY)
    usual = TokenLoss()
    compiled = TokenLoss(torch.compile(usual.whole), torch.compile(usual.part))
    x, weight, labels = draw()

    def found(loss_of):
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(x, weight, labels)
        return loss, *torch.autograd.grad(loss, (x, weight))

    exact = F.cross_entropy(F.linear(x, weight), labels, reduction="sum")
    right = (exact, *torch.autograd.grad(exact, (x, weight)))
    for near in (found(usual), found(compiled)):
        for one, other in zip(near, right, strict=True):
            assert (one - other).norm() <= 0.02 * other.norm()
    part = 2 * PART * VOCABULARY
    assert peak_extra_bytes(lambda: found(compiled), "cuda") < 1.5 * part + 2 * weight.nbytes
