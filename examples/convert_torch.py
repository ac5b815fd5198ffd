"""A stock torch model made linear: train it with softmax, convert it, train it a little further."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cosformer

LENGTH = 64


class Counter(nn.Module):
    """Tells which of two tokens a sequence has more of; nothing in it is ours."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def train(model: nn.Module, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        error(model).backward()
        optimiser.step()


def error(model: nn.Module) -> Tensor:
    """The loss on 64 new sequences of an odd length, in which one token must win."""
    tokens = torch.randint(2, (64, LENGTH - 1))
    return F.cross_entropy(model(tokens), (2 * tokens.sum(1) > LENGTH - 1).long())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="before, and as many after")
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    model = Counter()
    train(model, steps)
    print(f"softmax: loss {error(model).item():.3f}")
    names = cosformer.convert(model, horizon=LENGTH)  # in place; weights are kept
    # softmax weights are not cosFormer weights: a converted model needs some training
    print(f"converted {', '.join(names)}: loss {error(model).item():.3f}")
    train(model, steps)
    print(f"trained further: loss {error(model).item():.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
