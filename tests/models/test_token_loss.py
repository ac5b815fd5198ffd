"""The loss of a token head in parts: the numbers of the whole, and none of its memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.models import LanguageModel, ModelConfig, token_loss
from cosformer.models.token_loss import TokenLoss

WIDTH, VOCABULARY = 8, 50
SMALL = ModelConfig(layers=1, width=16, heads=2, vocabulary=VOCABULARY)


@pytest.fixture(params=[1, 3 * VOCABULARY, 1000 * VOCABULARY])
def in_parts(request, monkeypatch):
    """Parts of one row, of a few, and all at once."""
    monkeypatch.setattr(token_loss, "MOST_LOGITS", {"cpu": request.param})


def draw(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCABULARY, (2, 7), generator=generator)
    labels[0, 3] = labels[1, 0] = token_loss.NOT_ASKED
    return x.requires_grad_(), weight.requires_grad_(), labels


def whole(x, weight, labels):
    logits = F.linear(x, weight).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def derivatives(loss, *leaves):
    return loss, *torch.autograd.grad(3 * loss, leaves)


@pytest.mark.usefixtures("in_parts")
def test_loss_and_gradients_are_those_of_all_logits():
    x, weight, labels = draw()
    found = derivatives(TokenLoss()(x, weight, labels), x, weight)
    assert_close(found, derivatives(whole(x, weight, labels), x, weight))


@pytest.mark.usefixtures("in_parts")
def test_labels_that_are_not_asked_for_may_be_all():
    x, weight, labels = draw()
    labels.fill_(token_loss.NOT_ASKED)
    found = derivatives(TokenLoss()(x, weight, labels), x, weight)
    assert all(not each.any() for each in found)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_no_worse_than_all_logits_of_16_bits(dtype):
    x, weight, labels = draw(dtype)
    exact = [z.double().detach().requires_grad_() for z in (x, weight)]
    right = derivatives(whole(*exact, labels), *exact)
    usual = derivatives(whole(x, weight, labels), x, weight)
    for ours, plain, best in zip(
        derivatives(TokenLoss()(x, weight, labels), x, weight), usual, right, strict=True
    ):
        least = torch.finfo(dtype).eps * best.norm()
        assert (ours - best).norm() <= max(2 * (plain - best).norm(), least)


def test_under_autocast_products_are_narrow_and_gradients_of_weights_are_not(monkeypatch):
    x, weight, labels = draw(torch.float32)
    right = derivatives(whole(x, weight, labels), x, weight)
    monkeypatch.setattr(token_loss, "MOST_LOGITS", {"cpu": 1})
    with torch.autocast("cpu", torch.bfloat16):
        loss = TokenLoss()(x, weight, labels)
    found = derivatives(loss, x, weight)
    assert [each.dtype for each in found] == [torch.float32] * 3
    for ours, best in zip(found, right, strict=True):
        error = (ours - best).norm()
        assert 0 < error <= 0.02 * best.norm()


class Largest(TorchDispatchMode):
    """The most numbers that one tensor had."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.count = max(self.count, out.numel())
        return out


def test_no_tensor_is_as_large_as_all_logits(monkeypatch):
    monkeypatch.setattr(token_loss, "MOST_LOGITS", {"cpu": 2 * VOCABULARY})
    x, weight, labels = draw()
    with Largest() as seen:
        TokenLoss()(x, weight, labels).backward()
    assert seen.count < labels.numel() * VOCABULARY


def test_parts_lie_in_the_same_memory(monkeypatch):
    monkeypatch.setattr(token_loss, "MOST_LOGITS", {"cpu": 5 * VOCABULARY})
    seen = []

    def part(logits, labels):
        seen.append((logits.data_ptr(), len(logits)))
        return token_loss.loss_and_gradient(logits, labels)

    TokenLoss(part=part)(*draw())
    memory, rows = zip(*seen, strict=True)
    assert len(set(memory)) == 1
    assert rows == (4, 4, 4, 2)


@pytest.mark.slow
def test_a_part_that_is_compiled_has_the_same_loss_and_gradient():
    """By inductor, which may order reads and writes of the logits as it likes."""
    torch.compiler.reset()
    x, weight, labels = draw()
    logits = (x @ weight.mT).detach().flatten(0, 1)
    found = []
    for part in (token_loss.loss_and_gradient, torch.compile(token_loss.loss_and_gradient)):
        own = logits.clone()
        found.append((part(own, labels.flatten()), own))
    assert_close(*found)


@pytest.mark.slow
@pytest.mark.usefixtures("in_parts")
def test_parts_in_one_graph_have_the_same_gradients():
    """PyTorch 2.11 gives what a function of its own has changed in place gradients of 0 there."""
    torch.compiler.reset()
    given, loss = draw(), TokenLoss()
    compiled = torch.compile(lambda *given: loss(*given), backend="aot_eager")
    right, found = (derivatives(by(*given), *given[:2]) for by in (loss, compiled))
    assert_close(found, right)


@pytest.mark.usefixtures("in_parts")
def test_a_model_tells_the_loss_of_its_logits():
    model = LanguageModel(SMALL).double()
    tokens = torch.randint(VOCABULARY, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    labels = tokens.roll(-1, 1).masked_fill(~mask, token_loss.NOT_ASKED)
    logits = model(tokens, mask).flatten(0, 1)
    right = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    leaves = list(model.parameters())
    found = derivatives(model.summed_loss(tokens, labels, mask), *leaves)
    assert_close(found, derivatives(right, *leaves))


@pytest.mark.parametrize("asked", [3, 5, 9, 20])
def test_logits_of_the_tokens_that_are_asked_for_are_enough(asked):
    """Some sequences have fewer labels than `asked` says, some none."""
    model = LanguageModel(SMALL).double()
    tokens, leaves = torch.randint(VOCABULARY, (3, 9)), list(model.parameters())
    labels = torch.full_like(tokens, token_loss.NOT_ASKED)
    labels[0, [1, 4, 8]], labels[1, 0] = torch.tensor([2, 0, 1]), 3
    right = derivatives(model.summed_loss(tokens, labels), *leaves)
    seen = []
    model.token_loss = lambda *given: seen.append(given[2].shape[1]) or TokenLoss()(*given)
    assert_close(derivatives(model.summed_loss(tokens, labels, asked=asked), *leaves), right)
    assert seen == [min(asked, 9)]


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_label_that_there_is_not_is_never_a_number(wrong, monkeypatch):
    monkeypatch.setattr(token_loss, "MOST_LOGITS", {"cpu": 1})
    x, weight, labels = draw()
    labels[0, 0] = wrong
    with pytest.raises(RuntimeError):
        TokenLoss()(x, weight, labels)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)  # as it is inside a graph
    assert TokenLoss()(x, weight, labels).isnan()


@pytest.mark.parametrize("labels", [torch.zeros(2, 5).long(), torch.zeros(2, 6)])
def test_labels_are_those_of_the_tokens(labels):
    model = LanguageModel(SMALL)
    with pytest.raises(ValueError, match=r"labels must be int64 \[2, 6\], as tokens, got torch"):
        model.summed_loss(torch.zeros(2, 6).long(), labels, asked=3)


def test_second_derivatives_of_parts_are_refused(monkeypatch):
    monkeypatch.setattr(token_loss, "MOST_LOGITS", {"cpu": 1})
    x, weight, labels = draw()
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(TokenLoss()(x, weight, labels), x, create_graph=True)


@pytest.mark.parametrize("asked", [0, 2.5, "3"])
def test_asked_is_a_whole_number(asked):
    model = LanguageModel(SMALL)
    with pytest.raises((ValueError, TypeError), match="asked must be"):
        model.summed_loss(*torch.zeros(2, 1, 5, dtype=torch.long), asked=asked)
