"""attention_weights is the dense map, whole or by windows that cost only themselves."""

import math

import pytest
import torch
from formula import cosformer_map, tokens, uniform

from cosformer import attention_weights

OPTIONS = {
    "causal": {"causal": True},
    "bidirectional": {},
    "horizon per head": {"horizon": torch.tensor([140.0, 500.0]), "causal": True},
    "raised": {"horizon": 5.0, "raised": True},
    "masked": {"key_mask": torch.rand(2, 140, generator=torch.Generator().manual_seed(0)) < 0.5},
    "all masked": {"key_mask": torch.zeros(2, 140, dtype=torch.bool)},
    "started": {"causal": True, "query_start": 30, "horizon": 200},
    "large eps": {"eps": 50.0},
    "decay": {"causal": True, "decay": [0.5, 0.99]},
}
SQUARE = OPTIONS | {
    "decay, both ways": {"decay": 0.9},
    "gates": {"causal": True, "log_decay": -uniform(2, 2, 140)},
    "gates, both ways": {"log_decay": -uniform(2, 2, 140), "horizon": math.inf},
    "packed": {"cu_seqlens": torch.tensor([0, 20, 20, 133, 140]), "causal": True},
}
every_square = pytest.mark.parametrize("options", SQUARE.values(), ids=SQUARE)


def draw(length, options):
    """q and k, of a batch of one if sequences are packed."""
    return tokens(1 if "cu_seqlens" in options else 2, 2, length, keys=140)[:2]


def named(raised=False, **options):
    return {"weight": "raised_cosine" if raised else "cosine", **options}


@pytest.mark.parametrize(
    ("length", "options"),
    [*((90, options) for options in OPTIONS.values()), *((140, x) for x in SQUARE.values())],
)
def test_the_map_is_the_formula(length, options):
    q, k = draw(length, options)
    torch.testing.assert_close(
        attention_weights(q, k, **named(**options)), cosformer_map(q, k, **options)
    )


WINDOWS = [
    (None, slice(3, 4)),
    (slice(127, 130), slice(120, 139)),
    (slice(-3, None), slice(None, -100)),
    (slice(7, 7), slice(2, 4)),
    (slice(100, 10_000), slice(-10_000, 4)),
]


@every_square
@pytest.mark.parametrize(("rows", "columns"), WINDOWS)
def test_a_window_is_a_slice_of_the_map(options, rows, columns):
    q, k = draw(140, options)
    options = named(**options)
    whole = attention_weights(q, k, **options)
    window = attention_weights(q, k, rows=rows, columns=columns, **options)
    torch.testing.assert_close(
        window, whole[:, :, rows or slice(None)][..., columns or slice(None)]
    )


@pytest.mark.parametrize("causal", [True, False])
def test_a_small_window_of_200_000_tokens_fits(causal):
    length = 200_000  # the whole map would take 160 gigabytes
    q, k, _ = (x.float() for x in tokens(1, 1, length, width=2))
    rows, columns = slice(length - 3, length), slice(length - 5, length)
    window = attention_weights(q, k, causal=causal, rows=rows, columns=columns)
    assert window.shape == (1, 1, 3, 5)
    if causal:
        last = cosformer_map(q.double()[:, :, rows], k.double(), causal=True, horizon=length)
        torch.testing.assert_close(window.double(), last[..., columns], rtol=1e-4, atol=0)
