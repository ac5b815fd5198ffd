"""The cost model of docs/scale.md: its tables are what it gives, its constants are measured."""

import re

import pytest
import torch
from drawings import DOCS, drawing

from cosformer import distributed
from cosformer.distributed import exchange

PAGE = (DOCS / "scale.md").read_text()


@pytest.fixture(scope="module")
def model():
    return drawing("scale_picture")


def test_the_page_has_the_tables_that_the_model_gives(model):
    assert model.page(PAGE) == PAGE


def test_the_picture_can_be_drawn_again(model):
    assert model.picture() == model.picture()
    assert model.PICTURE.read_bytes().startswith(b"<?xml")


def test_what_was_measured_is_what_the_readme_shows(model):
    readme = (DOCS.parent / "README.md").read_text()
    cell = r"H200.* 1 × 16 × 65,536 × 64 \| ([\d.]+) \| ([\d.]+)"
    softmax, ours = (float(each) / 1e3 for each in re.search(cell, readme).groups())
    assert model.measured() == pytest.approx((ours / 2**16, softmax / 2**32), rel=0.01)
    assert f"Below {model.MANY} GPUs" in PAGE


def test_a_state_has_the_bytes_that_are_counted(model, group, monkeypatch):
    """But for its decays and a length, by which messages begin."""
    sent, gather = [], exchange._all_gather
    monkeypatch.setattr(
        exchange, "_all_gather", lambda x, y, **o: sent.append(y.nbytes) or gather(x, y, **o)
    )
    q, k, v = torch.ones(3, 1, model.HEADS, 8, model.WIDTH, dtype=torch.bfloat16)
    distributed.attention(q, k, v, causal=True)
    assert sent == [model.STATE + 8 * (1 + model.HEADS)]
