"""Many users at once, each with a stream of its own, in memory that never grows."""

import argparse

import torch

import cosformer

HEADS, WIDTH = 4, 32
DECAY = cosformer.multiscale_decays(HEADS)  # weights fade, so that no stream has a last token


def empty(streams: int) -> cosformer.State:
    """One state for all streams; each has a position of its own, because they begin at any time."""
    zeros = torch.zeros(streams, dtype=torch.int64)
    about = {"horizon": torch.inf, "decay": DECAY, "position": zeros}
    return cosformer.State.empty(streams, HEADS, WIDTH, WIDTH, **about)


def free(state: cosformer.State, slot: int) -> None:
    """Forget a user who has left: the slot is as new for the next one."""
    for tensor in state.tensors:
        tensor[slot] = 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--ticks", type=int, default=500)
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    state, alone = empty(given.users), empty(1)
    size = sum(tensor.nbytes for tensor in state.tensors)
    for _ in range(given.ticks):
        # at every tick some users send a token, in any order; user 0 always does
        others = 1 + torch.randperm(given.users - 1)[: given.users // 4]
        slots = torch.cat([torch.tensor([0]), others])
        q, k, v = torch.randn(3, len(slots), HEADS, 1, WIDTH)  # what your model makes of the tokens
        out = cosformer.step(q, k, v, state, slots=slots)  # state is changed in place
        expected = cosformer.step(q[:1], k[:1], v[:1], alone)
        torch.testing.assert_close(out[:1], expected)  # nobody sees what others have said
    left = int(state.position.argmax())
    told = f"{size / 2**20:.1f} MiB for {given.users:,} users"
    print(f"{told}, of whom user {left} has sent {int(state.position[left]):,} tokens")
    free(state, left)
    assert size == sum(tensor.nbytes for tensor in state.tensors)
    print(f"as much after {int(state.position.sum()):,} tokens of all others")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
