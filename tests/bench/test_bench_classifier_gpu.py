"""The table of speed at toy size on a GPU: numbers in every place, in bfloat16."""

import pytest
import torch

from cosformer import records
from cosformer.bench import classifier
from cosformer.bench.classifier import PASSES, SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ONLY = ("cosformer", "cosformer-multiscale", "softmax", "local", "reformer")


def test_every_place_has_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    given = classifier.Options(only=ONLY, small=True, repeats=1, device="cuda", rows=path)
    assert classifier.run(given) == 0
    rows = records.read(path)
    assert [row.config["reason"] for row in rows if row.what == "failed"] == []
    for what in ("speed", "peak_memory"):
        found = [row for row in rows if row.what == what]
        assert len(found) == len(ONLY) * len(PASSES) * len(SIZES["small"].lengths)
        assert {row.config["dtype"] for row in found} == {"bfloat16"}
        assert min(row.value for row in found) > 0
