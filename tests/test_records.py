"""Rows survive the trip to disk, a killed writer, and tell where they come from."""

import dataclasses
import getpass
import json
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cosformer import records


@pytest.fixture
def row():
    run = records.Run.begin(seed=7)
    return run.row("time", 1.5, "ms", candidate="chunked", length=256, causal=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "rows.jsonl"


def add(path, text):
    path.write_text(path.read_text() + text)


def test_rows_come_back_as_they_were_written(path, row):
    other = dataclasses.replace(row, value=2.0, commit=None, seed=None)
    records.append(path, [row])
    (line,) = path.read_text().splitlines()
    assert list(json.loads(line)) == [field.name for field in dataclasses.fields(records.Row)]
    records.append(path, [other, row])
    assert records.read(path) == [row, other, row]


def test_an_unfinished_last_line_is_skipped_and_then_removed(path, row):
    records.append(path, [row])
    add(path, '{"what": "time", "val')
    with pytest.warns(UserWarning, match="line 2 is unfinished"):
        assert records.read(path) == [row]
    with pytest.warns(UserWarning, match="unfinished last line is removed"):
        records.append(path, [row])
    assert records.read(path) == [row, row]


def test_a_whole_row_without_a_line_end_is_kept(path, row):
    records.append(path, [row])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert records.read(path) == [row]
    records.append(path, [row])
    assert records.read(path) == [row, row]


def test_writers_side_by_side_take_no_row_of_each_other_for_one_cut_off(path, row):
    long = dataclasses.replace(row, config={"text": "x" * 4_000_000})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: records.append(path, [long]), range(16)))
    assert records.read(path) == [long] * 16


NO_ROWS = ["one line", "one\nlast line", "one\n", '{"what": "a note"}', "{}\n", "[1]\n"]


@pytest.mark.parametrize("text", NO_ROWS)
def test_a_file_of_something_else_is_refused_and_not_touched(tmp_path, row, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    rule = r"out must be a new file or one of rows, but .*notes\.txt, line 1"
    with pytest.raises(ValueError, match=rule):
        records.require_rows(path, "out")
    if not text.endswith("\n"):
        with pytest.raises(ValueError, match=r"notes\.txt, last line is not a row"):
            records.append(path, [row])
    assert path.read_text() == text


@pytest.mark.parametrize("end", ["", "\n", '{"wh', '{"what": "time", "val'])
def test_a_file_of_rows_may_end_in_a_row_cut_off(path, row, end):
    records.require_rows(path, "out")
    records.append(path, [row])
    add(path, end)
    records.require_rows(path, "out")


LINES = {
    '{"what": "time"}': "key 'config' must be there, got what",
    "nonsense": "Expecting value",
    "[1]": "it must be a mapping, got list",
    '{"colour": 1}': "key must be one of what, config, .*, got 'colour'",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_no_row_is_an_error_that_names_it_and_its_key(path, row, line):
    records.append(path, [row])
    add(path, line + "\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2 is not a row: {LINES[line]}"):
        records.read(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused(row, value):
    with pytest.raises(ValueError, match="must be finite"):
        dataclasses.replace(row, value=value)


def test_rows_name_neither_host_nor_user_nor_path(row):
    text = json.dumps(dataclasses.asdict(row))
    assert str(Path.home()) + "/" not in text
    assert str(Path(__file__).parents[1]) not in text
    for name in (platform.node(), getpass.getuser()):
        assert f'"{name}"' not in text


def test_rows_of_one_run_share_its_date_and_say_what_speed_depends_on(row):
    run = records.Run.begin()
    assert run.row("time", 1, "ms").date == run.row("time", 2, "ms").date != row.date
    assert {"device", "name", "cores", "threads", "keeps_freed_memory"} <= row.hardware.keys()
    assert {"cosformer", "torch", "python"} <= row.versions.keys()


def _git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, timeout=20)


def test_commit_is_marked_dirty_only_when_the_code_differs(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "one"]):
        _git(tmp_path, *words)
    read_anew = records.commit.__wrapped__
    clean = read_anew(package)
    (tmp_path / "results.jsonl").write_text("{}")
    assert read_anew(package) == clean
    assert len(clean) == 12
    (package / "__init__.py").write_text("changed = True")
    assert read_anew(package) == f"{clean}-dirty"


def test_commit_is_none_where_git_does_not_know_the_package_or_is_missing(tmp_path, monkeypatch):
    read_anew = records.commit.__wrapped__
    assert read_anew(tmp_path) is None
    _git(tmp_path, "init", "--quiet")
    (tmp_path / "__init__.py").touch()
    assert read_anew(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert read_anew(Path(__file__).parent) is None


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_growth_exponent_is_that_of_a_power_law_of_two_sizes_or_more(exponent):
    values = {size: 3 * size**exponent for size in (4096, 8192, 65536)}
    assert records.growth_exponent(values) == pytest.approx(exponent)
    with pytest.raises(ValueError, match=r"at least two sizes, got \[8\]"):
        records.growth_exponent({8: 1.0})
