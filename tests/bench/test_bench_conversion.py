"""`cosformer bench conversion`: rows of every stage, and what tables make of them."""

import pytest
import torch

from cosformer.bench import conversion as bench
from cosformer.report.conversion import conversion_table, embedding_table

pytest.importorskip("transformers")


@pytest.fixture
def options(tmp_path):
    """A small BERT, texts and pairs."""
    from pretrained import save_small

    save_small(tmp_path / "bert", layers=2)
    (tmp_path / "texts.txt").write_text("".join(f"line {n}\n" for n in range(20)))
    pairs = "".join(f"dev\t{n % 5}\tline {n}\tline {n + n % 5}\n" for n in range(12))
    (tmp_path / "pairs.tsv").write_text(f"split\tscore\tsentence1\tsentence2\n{pairs}")
    steps = {"match_steps": 2, "distil_steps": 2, "batch": 4, "length": 32}
    files = {"data": (tmp_path / "texts.txt",), "pairs": tmp_path / "pairs.tsv"}
    shape = {"lengths": (16, 128), "repeats": 1, "threads": 1, "model": tmp_path / "bert"}
    return bench.Options(
        **files, **shape, **steps, candidates=("cosformer-multiscale", "cosformer 1")
    )


def test_rows_tell_of_all_stages_and_tables_show_them(options):
    rows = list(bench.measure(options))
    stages = [
        (row.config["candidate"], row.config["stage"], row.config.get("exact"))
        for row in rows
        if row.what == "spearman"
    ]
    (exact,) = {tuple(found) for name, stage, found in stages if stage == "matched" and "1" in name}
    assert stages == [
        ("softmax", "original", None),
        ("cosformer-multiscale", "replaced", []),
        ("cosformer-multiscale", "matched", []),
        ("cosformer-multiscale", "distilled", []),
        ("cosformer 1", "matched", [*exact]),
        ("cosformer 1", "distilled", [*exact]),
    ]
    assert len(exact) == 1
    assert {row.config["texts"] for row in rows if row.what == "spearman"} == {20 - 14}
    header, _, *lines = conversion_table(rows).splitlines()[:5]
    assert [line.count("|") for line in lines] == [header.count("|")] * 3
    assert "100.0 %" in lines[0]
    killed = rows[: next(n for n, r in enumerate(rows) if r.config.get("stage") == "distilled")]
    assert conversion_table(killed).splitlines()[3].endswith("| – | – | – |")
    speeds = {
        (row.config["candidate"], row.config["length"]) for row in rows if "speed" in row.what
    }
    assert speeds == {(name, n) for name in ("softmax", "cosformer-multiscale") for n in (16, 128)}
    short, long = embedding_table(rows).splitlines()[2:4]
    (cosine,) = (
        row.value for row in rows if row.what == "agreement" and "1" not in row.config["candidate"]
    )
    assert short.endswith(f"{cosine:.3f} |")
    assert long.startswith("| 128 |")
    assert long.endswith("– |")  # more than the original has positions for


def test_a_lengthened_model_says_what_it_said_and_reads_more(options):
    from cosformer.conversion import Conversion, Converter

    settings = Conversion(batch=2, length=16)
    model = Converter(options.model, ["a"], settings, device="cpu").model
    longer = bench.lengthened(model, 128)
    tokens = torch.randint(256, (2, 64))
    with torch.no_grad():
        assert torch.equal(longer(tokens)[0], model(tokens)[0])
        assert longer(torch.randint(256, (1, 128)))[0].shape == (1, 128, 32)
