"""The picture and the table of docs/decay.md show what the op computes."""

import re

import drawings
import pytest
import torch

import cosformer

DOCS = drawings.DOCS


@pytest.fixture(scope="module")
def drawing():
    return drawings.drawing("decay_picture")


def test_the_weights_drawn_are_those_of_the_op(drawing):
    rates = cosformer.multiscale_decays(drawing.HEADS)
    x = torch.ones(1, drawing.HEADS, 300, 1, dtype=torch.float64)
    about = {"causal": True, "horizon": drawing.HORIZON, "decay": rates}
    row = cosformer.attention_weights(x, x, rows=slice(299, 300), **about)[0, :, 0].flip(-1)
    drawn = [[drawing.weight(rate, distance) for distance in range(300)] for rate in rates]
    torch.testing.assert_close(row / row[:, :1], torch.tensor(drawn, dtype=torch.float64))


def test_the_table_has_the_numbers_of_every_head(drawing):
    found = re.findall(r"(?m)^\| (\d) \| ([\d.| ]+) \|$", (DOCS / "decay.md").read_text())
    for head, rate in enumerate(cosformer.multiscale_decays(drawing.HEADS)):
        near, far = (drawing.weight(rate, distance) for distance in (16, 256))
        line = f"{rate:.4f} | {1 / (1 - rate):.0f} | {near:.3f} | {far:.3f}"
        assert found[head] == (str(head), line)


def test_the_picture_can_be_drawn_again(drawing):
    assert drawing.picture() == drawing.picture()
    assert drawing.PICTURE.read_bytes().startswith(b"<?xml")
