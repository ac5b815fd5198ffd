"""`cosformer report` renews the marked blocks, and nothing at all when something is wrong."""

from pathlib import Path

import pytest

from cosformer import records
from cosformer.records import Row
from cosformer.report import readme, tables, writing

BEFORE = """# Title
<!-- rows:ops-cpu/time -->
old table
<!-- /rows -->
between
<!-- rows:ops-cpu/crossover -->
<!-- /rows -->
after
"""


@pytest.fixture
def folder(tmp_path: Path, rows: list[Row]) -> Path:
    records.append(tmp_path / "results" / "ops-cpu.jsonl", rows)
    (tmp_path / "README.md").write_text(BEFORE)
    return tmp_path


def _options(folder: Path) -> readme.Options:
    return readme.Options(folder / "results", folder / "README.md", folder / "docs")


def test_blocks_are_replaced_and_the_rest_is_kept(folder: Path, rows: list[Row]) -> None:
    assert readme.run(_options(folder)) == 0
    after = (folder / "README.md").read_text()
    assert after == BEFORE.replace("old table", tables.time_table(rows)).replace(
        "crossover -->\n", f"crossover -->\n{tables.crossover_list(rows)}\n"
    )
    assert (folder / "docs" / "time_vs_length.svg").read_bytes().startswith(b"<?xml")


def test_a_second_report_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme.run(_options(folder))
    written = (folder / "README.md").read_text()
    capsys.readouterr()
    readme.run(_options(folder))
    assert (folder / "README.md").read_text() == written
    assert capsys.readouterr().out.count("unchanged") == 2


WRONG = [
    ("<!-- rows:ops-tpu/time -->\n<!-- /rows -->\n", "no rows named 'ops-tpu'.*there are: ops-cpu"),
    (
        "<!-- rows:ops-cpu/prose -->\n<!-- /rows -->\n",
        "TABLE among time, summary, crossover, mechanisms",
    ),
    ("<!-- rows:ops-cpu -->\n<!-- /rows -->\n", "must be rows:FILE/TABLE"),
    ("<!-- rows:ops-cpu/time -->\n", "must be closed by <!-- /rows -->"),
    ("<!-- rows:ops-cpu/time -->\n<!-- rows:ops-cpu/time -->\n<!-- /rows -->\n", "must be closed"),
]


@pytest.mark.parametrize(("block", "message"), WRONG)
def test_a_wrong_mark_is_an_error_and_leaves_all_files_alone(
    folder: Path, block: str, message: str
) -> None:
    (folder / "README.md").write_text(BEFORE + block)
    with pytest.raises(ValueError, match=message):
        readme.run(_options(folder))
    assert (folder / "README.md").read_text() == BEFORE + block
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "results"]


def test_without_rows_the_error_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match=r"no rows named 'ops-cpu'.*there are: none"):
        readme.run(_options(tmp_path))


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "README.md"
    path.write_text("old")

    def no_space(source: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(writing.os, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        writing.write_whole(path, b"new")
    assert path.read_text() == "old"


def test_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results must be a folder, got "):
        readme.Options(tmp_path / "none", tmp_path / "README.md")
    with pytest.raises(ValueError, match="readme must be a file, got "):
        readme.Options(tmp_path, tmp_path / "README.md")


def test_without_rows_of_a_gpu_their_block_is_empty_and_no_figure_is_drawn(folder: Path) -> None:
    block = "<!-- rows:ops-cuda/time -->\n<!-- /rows -->\n"
    (folder / "README.md").write_text(BEFORE + block.replace("<!-- /", "old\n<!-- /"))
    readme.run(_options(folder))
    assert (folder / "README.md").read_text().endswith("after\n" + block)
    assert not (folder / "docs" / "time_vs_length_cuda.svg").exists()


def test_rows_of_a_gpu_fill_their_block_and_a_figure(folder: Path, gpu_rows: list[Row]) -> None:
    records.append(folder / "results" / "ops-cuda.jsonl", gpu_rows)
    block = "<!-- rows:ops-cuda/time -->\n<!-- /rows -->\n"
    (folder / "README.md").write_text(BEFORE + block)
    readme.run(_options(folder))
    assert tables.time_table(gpu_rows) in (folder / "README.md").read_text()
    assert (folder / "docs" / "time_vs_length_cuda.svg").read_bytes().startswith(b"<?xml")
