"""Tables of labelled texts: formats, splits, pairs, and what is wrong with a file."""

import functools
import json
from typing import get_args

import numpy as np
import pytest

from cosformer import tasks
from cosformer.tasks import tables, vocabulary
from cosformer.tasks.classify import join
from cosformer.tasks.sequences import complete

ROWS = [("good", 'say "hi", twice'), ("bad", "two\twords"), ("good", "ünï")] * 10


LINES = {
    "csv": ["mood,text", *(f'{m},"{t.replace(chr(34), chr(34) * 2)}"' for m, t in ROWS)],
    "tsv": ["mood\ttext", *(f"{m}\t{t.replace(chr(9), ' ')}" for m, t in ROWS), ""],
    "jsonl": [json.dumps({"mood": m, "text": t}) for m, t in ROWS],
}


def write(path):
    path.write_text("\n".join(LINES[path.suffix[1:]]))
    return path


@pytest.mark.parametrize("suffix", LINES)
def test_own_tables_are_read_in_each_format(suffix, tmp_path):
    path = write(tmp_path / f"own.{suffix}")
    found = tables.read({"": path}, label="mood")
    texts = [t.replace("\t", " ") if suffix == "tsv" else t for _, t in ROWS]
    assert (found.texts, found.classes) == ((texts,), ["bad", "good"])
    assert found.labels.tolist() == [1, 0, 1] * 10
    task = tasks.create("classify", data=path, label="mood")
    assert sum(task.sizes.values()) == 30
    assert min(task.sizes.values()) >= 3


@pytest.mark.parametrize("suffix", LINES)
def test_a_table_is_streamed_as_it_is_read_whole(suffix, tmp_path):
    path = write(tmp_path / f"own.{suffix}")
    whole = tables.read({"": path}, label="mood")
    assert list(tables.stream(path)) == list(zip(*whole.texts, strict=True))
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as some spreadsheets save it
    assert tables.read({"": path}, label="mood").texts == whole.texts
    path.write_text("")
    with pytest.raises(ValueError, match="must have a header and one or more rows, got none"):
        next(tables.stream(path))


def test_objects_may_lack_what_is_not_read(tmp_path):
    """Rows to be predicted may have a label of null, and notes may be there or not."""
    path, first = tmp_path / "x.jsonl", {"text": "a", "label": None, "note": "b"}
    path.write_text("\n".join(map(json.dumps, [first, {"text": "c"}])))
    assert list(tables.stream(path)) == [("a",), ("c",)]
    with pytest.raises(ValueError, match="object 1, must have 'label', got null or nothing"):
        tables.read({"": path})
    with pytest.raises(ValueError, match="object 2, must have 'note', got null or nothing"):
        list(tables.stream(path, ("note",)))


@pytest.mark.parametrize("suffix", LINES)
def test_blank_lines_are_no_rows_whatever_ends_a_line(suffix, tmp_path):
    path = tmp_path / f"own.{suffix}"
    path.write_bytes("\r\n".join([*LINES[suffix], "", ""]).encode())
    plain = write(tmp_path / f"plain.{suffix}")
    assert list(tables.stream(path)) == list(tables.stream(plain))
    texts = [tables.read({"": each}, label="mood").texts for each in (path, plain)]
    assert texts[0] == texts[1]


def test_a_cell_beyond_the_limit_of_csv_is_one_error(tmp_path):
    (tmp_path / "x.csv").write_text(f"label,text\n1,{'a' * 140_000}\n")
    with pytest.raises(ValueError, match=r"field limit .*; \.jsonl has no such limit"):
        tables.read({"": tmp_path / "x.csv"})


@pytest.mark.parametrize("kind", get_args(vocabulary.Kind))
def test_a_text_has_the_tokens_of_its_bytes(kind):
    text = "Öl, oil and Öl.\nÖl"
    found = vocabulary.create(kind, text.encode(), 260 if kind == "bpe" else None)
    assert found.encode(text).tolist() == found.encode(text.encode()).tolist()
    with pytest.raises(ValueError, match=r"text must be in UTF-8, got '\\udcff' as character 3"):
        found.encode("ab\udcff")


def test_numbers_are_classes_in_the_order_of_their_value(tmp_path):
    (tmp_path / "x.tsv").write_text("label\ttext\n10\ta\n2\tb\n")
    assert tables.read({"": tmp_path / "x.tsv"}).classes == ["2", "10"]


def test_what_is_judged_is_never_what_choices_are_made_on():
    train, dev = np.arange(80), np.arange(80, 100)
    found = complete({"train": train, "valid": dev}, 100)
    assert found["test"].tolist() == dev.tolist()
    assert sorted([*found["train"], *found["valid"]]) == train.tolist()
    assert len(found["valid"]) == 8
    with pytest.raises(ValueError, match="samples to train on, got valid alone"):
        complete({"valid": dev}, 100)


@pytest.mark.parametrize("sizes", [(80, 10, 10), (800, 100, 100), (1, 1, 1)])
@pytest.mark.parametrize("named", [False, True])
def test_a_table_without_splits_is_cut_80_10_10(sizes, named):
    count = sum(sizes)
    found = complete({"train": np.arange(count)} if named else {}, count)
    assert tuple(len(found[split]) for split in tasks.SPLITS) == sizes
    assert sorted(np.concatenate(list(found.values()))) == list(range(count))
    with pytest.raises(ValueError, match="data must have 3 samples or more to be split, got 2"):
        complete({}, 2)


def test_what_is_cut_or_empty_is_counted(tmp_path):
    rows = ["label\tsentence1\tsentence2", *(f"{n % 2}\t{'x' * n}\ty" for n in range(40))]
    (tmp_path / "own.tsv").write_text("\n".join(rows))
    own = functools.partial(tasks.create, "classify", data=tmp_path / "own.tsv")
    empty = "1 of 80 texts are empty and are read as one start token"
    cut = "20 of {} sequences are longer than length={} and are cut"
    assert own(length=21).notes == (empty, cut.format(40, 21))
    assert own(length=19, towers=2).notes == (empty, cut.format(80, 19))
    assert own(length=50).notes == (empty,)


PAIRS = {(3, 4): (3, 4), (3, 40): (3, 16), (40, 3): (16, 3), (40, 40): (10, 9), (9, 12): (9, 10)}


@pytest.mark.parametrize("sizes", PAIRS)
def test_pairs_that_are_too_long_lose_of_the_longer_part(sizes):
    first, second = (np.full(size, n) for n, size in enumerate(sizes, 1))
    found, kept = join(first, second, 9, 20).tolist(), PAIRS[sizes]
    assert found == [1] * kept[0] + [9] + [2] * kept[1]


def test_a_pair_has_a_separator_that_is_no_data_and_an_empty_text_is_one_token(folder):
    task = tasks.create("mnli", data=folder, length=64)
    batch = task.batch("test", seed=0, rank=0, step=0, batch_size=3)
    separator = task.facts.token("separator")
    assert separator >= 256
    assert (batch["tokens"] == separator).sum(dim=1).tolist() == [1, 1, 1]
    task = tasks.create("mnli", data=folder, length=64, towers=2)
    shortest = [b["mask2"].sum(dim=1).min() for s in tasks.SPLITS for b in task.evaluation(s, 8)]
    assert min(shortest) == 1  # some hypotheses of the file are empty


def test_a_vocabulary_that_was_learnt_before_is_used(tmp_path):
    path = write(tmp_path / "own.csv")
    learnt = vocabulary.BytePairs.learn(b"say twice, say twice", 260)
    task = tasks.create("classify", data=path, label="mood", tokens="bpe", learnt=learnt)
    assert task.vocabulary is learnt
    assert task.facts.data_tokens == 260
    batch = task.batch("test", seed=0, rank=0, step=0, batch_size=3)
    texts = [learnt.decode(t[m]) for t, m in zip(batch["tokens"], batch["mask"], strict=True)]
    assert set(texts) <= {text for _, text in ROWS}
    for given in ({}, {"tokens": "bpe", "vocabulary": 300}):
        with pytest.raises(ValueError, match=r"tokens must be of .* before, bpe of 260, got b"):
            tasks.create("classify", data=path, label="mood", learnt=learnt, **given)
    with pytest.raises(ValueError, match="learnt must be left out for copying"):
        tasks.create("copying", learnt=learnt)


WRONG = {
    "x.tsv": ("label\ttext\n1\ta\tb\n", r"row 2, must have 2 fields as the header has, got 3"),
    "y.tsv": ("label\ttext\n", "must have a header and one or more rows, got none"),
    "z.tsv": ("label\ttext\n1\ta\n1\tb\n", r"label must have two or more values, got \['1'\]"),
    "a.tsv": ("label\tbody\n1\ta\n", "text must name the column with .*'label', 'body': --set"),
    "b.tsv": ("mood\ttext\n1\ta\n", "must have the column 'label', got 'mood', 'text'"),
    "c.jsonl": ("{]\n", "line 1, must be JSON"),
    "d.jsonl": ("[1]\n", "line 1, must be an object, got list"),
    "h.jsonl": ('{"label": 1, "text": "a"}\n{"label": 2}\n', "object 2, must have 'text', got"),
    "e.xlsx": ("", r"must be a \.tsv, \.csv or \.jsonl file, packed or not, got '.xlsx'"),
    "f.tsv": ("split\tlabel\ttext\nno\t1\ta\nno\t2\tb\n", "split must be one of .*got 'no'"),
    "g.tsv.xz": ("no xz", r"must be a whole \.xz file"),
}


@pytest.mark.parametrize("given", [{"label": "text"}, {"text": ("text", "text")}])
def test_a_column_is_taken_once(given, tmp_path):
    (tmp_path / "a.tsv").write_text("label\ttext\n1\ta\n2\tb\n")
    with pytest.raises(ValueError, match="text and label must be different columns, got 'text', "):
        tasks.create("classify", data=tmp_path / "a.tsv", **given)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_said(name, tmp_path):
    content, message = WRONG[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        tasks.create("classify", data=tmp_path / name)
