"""The op in a model of one's own: a small decoder of bytes that learns one sentence."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cosformer

HORIZON = 4096  # the longest sequence that the model is meant for: weights reach zero there


class Block(nn.Module):
    """Attention and a small network, each added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.to_qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        # a reach of its own for each head: without a decay cosFormer learns language badly
        self.decay = cosformer.multiscale_decays(heads)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, D]
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # the op wants [B, H, T, D]
        found = cosformer.attention(q, k, v, causal=True, horizon=HORIZON, decay=self.decay)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    # no positions are added: the weights of the op fall with the distance already
    layers = [Block(given.width, heads=4) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(256, given.width), *layers, nn.Linear(given.width, 256))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([list(b"the quick brown fox jumps over the lazy dog. " * 8)])  # bytes
    for step in range(given.steps):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step in (0, given.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
