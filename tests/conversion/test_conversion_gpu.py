"""A conversion on a GPU: errors fall, and the result says on a CPU what it says there."""

import pytest
import torch
from transformers import AutoModel

from cosformer.conversion import Conversion, convert_pretrained

TEXTS = [f"{n} green bottles" for n in range(40)]


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mechanism", ["cosformer-multiscale", "cosformer"])
def test_a_conversion_on_a_gpu_is_one_on_a_cpu(folders, tmp_path, mechanism):
    settings = Conversion(mechanism=mechanism, match_steps=20, distil_steps=20, batch=8, length=48)
    told = list(convert_pretrained(folders / "bert", TEXTS, tmp_path, settings, device="cuda"))
    for stage in ("match", "distil"):
        first, *_, last = (each for each in told if each.stage == stage)
        assert sum(last.losses.values()) < sum(first.losses.values())
    model, tokens = AutoModel.from_pretrained(tmp_path).eval(), torch.randint(256, (2, 40))
    with torch.no_grad():
        wanted = model(tokens)[0]
        found = model.cuda()(tokens.cuda())[0].cpu()
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
