"""`cosformer report` renews the marked blocks, and nothing at all when something is wrong."""

from unittest.mock import Mock

import pytest

from cosformer import records
from cosformer.report import readme, tables, writing

BEFORE = "# Title\n<!-- rows:ops-cpu/time -->\nold table\n<!-- /rows -->\nbetween\n"
BEFORE += "<!-- rows:ops-cpu/crossover -->\n<!-- /rows -->\nafter\n"


@pytest.fixture
def folder(tmp_path, rows):
    records.append(tmp_path / "results" / "ops-cpu.jsonl", rows)
    (tmp_path / "README.md").write_text(BEFORE)
    return tmp_path


def _options(folder):
    return readme.Options(
        folder / "results", folder / "README.md", folder / "docs", folder / "out" / "report.html"
    )


def test_blocks_are_replaced_and_a_second_report_changes_nothing(folder, rows, capsys):
    assert readme.run(_options(folder)) == 0
    after = BEFORE.replace("old table", tables.time_table(rows))
    after = after.replace("over -->\n", f"over -->\n{tables.crossover_list(rows)}\n")
    assert (folder / "README.md").read_text() == after
    assert (folder / "docs" / "time_vs_length.svg").read_bytes().startswith(b"<?xml")
    capsys.readouterr()
    readme.run(_options(folder))
    assert (folder / "README.md").read_text() == after
    assert capsys.readouterr().out.count("unchanged") == 3
    assert (folder / "out" / "report.html").read_text().startswith("<!doctype html>")


WRONG = [
    ("<!-- rows:ops-tpu/time -->\n<!-- /rows -->\n", "no rows named 'ops-tpu'.*there are: ops-cpu"),
    ("<!-- rows:ops-cpu/prose -->\n<!-- /rows -->\n", "TABLE among speed, time, summary"),
    ("<!-- rows:ops-cpu -->\n<!-- /rows -->\n", "must be rows:FILE/TABLE"),
    ("<!-- rows:ops-cpu/time -->\n", "must be closed by <!-- /rows -->"),
    ("<!-- rows:ops-cpu/time -->\n<!-- rows:ops-cpu/time -->\n<!-- /rows -->\n", "must be closed"),
]


@pytest.mark.parametrize(("block", "message"), WRONG)
def test_a_wrong_mark_is_an_error_and_leaves_all_files_alone(folder, block, message):
    (folder / "README.md").write_text(BEFORE + block)
    with pytest.raises(ValueError, match=message):
        readme.run(_options(folder))
    assert (folder / "README.md").read_text() == BEFORE + block
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "results"]


def test_the_error_says_whether_a_folder_a_file_or_rows_are_missing(tmp_path):
    with pytest.raises(ValueError, match="results must be a folder, got "):
        _options(tmp_path)
    (tmp_path / "results").mkdir()
    with pytest.raises(ValueError, match="readme must be a file, got "):
        _options(tmp_path)
    (tmp_path / "README.md").write_text("<!-- rows:ops-cpu/time -->\n<!-- /rows -->\n")
    with pytest.raises(ValueError, match=r"no rows named 'ops-cpu'.*there are: none"):
        readme.run(_options(tmp_path))


def test_a_folder_of_ones_own_gets_the_page_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    assert readme.run(readme.Options()) == 0
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"report.html"}


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text("old")

    monkeypatch.setattr(writing.os, "replace", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        writing.write_whole(path, b"new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_rows_of_a_gpu_may_be_missing_and_have_former_names(folder, gpu_rows):
    block = "<!-- rows:ops-cuda/time -->\n<!-- /rows -->\n"
    both = "<!-- rows:ops-cpu+ops-cuda/speed -->\n<!-- /rows -->\n"
    (folder / "README.md").write_text(BEFORE + both + block.replace("<!-- /", "old\n<!-- /"))
    drawn = folder / "docs" / "time_vs_length_cuda.svg"
    readme.run(_options(folder))
    written = (folder / "README.md").read_text()
    assert written.endswith(block)  # empty
    assert "| CPU, 2 threads, float32 |" in written
    assert not drawn.exists()
    path = folder / "results" / "ops-cuda.jsonl"
    records.append(path, gpu_rows)
    path.write_text(path.read_text().replace('"auto"', '"triton"'))
    readme.run(_options(folder))
    assert tables.time_table(gpu_rows) in (folder / "README.md").read_text()
    assert drawn.read_bytes().startswith(b"<?xml")
