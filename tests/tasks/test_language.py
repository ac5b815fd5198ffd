"""Texts, vocabularies and windows: every token is asked for once, nothing is lost on the way."""

import itertools
import json
import re
import sys
import unicodedata
from collections import Counter

import numpy as np
import pytest
import torch

from cosformer import tasks
from cosformer.tasks import IGNORED, text, vocabulary

STORY = b"Once upon a time, 3 small models met 300 large ones. " * 30
STORY += "Überall 名前 \n\n\tend.".encode()


def windows_of(content, length):
    """All splits the same."""
    splits = dict.fromkeys(tasks.SPLITS, content)
    return tasks.LanguageTask(splits, vocabulary.Bytes(), length=length)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_text_comes_back_from_its_tokens_and_a_vocabulary_from_json(kind):
    found = vocabulary.create(kind, STORY, 300 if kind == "bpe" else None)
    kept = vocabulary.restore(json.loads(json.dumps(found.plain())))
    other = "Never seen: 好 \x00 __init__\r\n".encode()
    for each in (STORY, other):
        tokens = found.encode(each)
        assert tokens.max() < found.size == kept.size
        assert np.array_equal(kept.encode(each), tokens)
        assert kind == "words" or found.decode(tokens) == each.decode()
        assert kept.decode(tokens) == found.decode(tokens)


def test_merging_takes_the_most_frequent_pair_first_and_shortens_the_text():
    found = vocabulary.BytePairs.learn(b"abab abab abab cd", 258)
    assert found.pieces[256:] == [b"ab", b"abab"]
    assert [found.pieces[n] for n in found.encode("abab ab")] == [b"abab", b" ", b"ab"]
    story = vocabulary.BytePairs.learn(STORY, 400)
    assert len(story.encode(STORY)) < len(STORY) / 3
    # it stops where nothing occurs twice
    assert vocabulary.BytePairs.learn(b"abc", 1000).size == 256


BLANKS = "a b  c\n\nd \t\n e\u3000f\x1c g!\x1c\n\x85 h\r\n<mask>"


def test_a_text_may_be_cut_where_a_blank_begins():
    found = vocabulary.BytePairs.learn(2 * (STORY + BLANKS.encode()), 500)
    for each in (STORY.decode(), BLANKS, ""):
        assert found.encode(each).tolist() == found.tokenizer().encode(each).ids


def test_what_a_special_token_is_called_is_a_text_like_others():
    found = vocabulary.BytePairs.learn(STORY, 300)
    assert found.decode(found.encode("a <mask> b")) == "a <mask> b"
    names = [found.tokenizer().id_to_token(found.size + n) for n in range(4)]
    assert names == [f"<{name}>" for name in tasks.SPECIALS]


def old_pairs(text, count):
    """Merges as runs kept them before `tokenizer.json`, found by counting all pairs each time."""
    words, pairs = [list(word.encode()) for word in OLD_WORD.findall(text)], []
    for _ in range(count):
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        pairs.append(counts.most_common(1)[0][0])
        words = [merged(word, pairs[-1], 255 + len(pairs)) for word in words]
    return pairs


def merged(word, pair, number):
    at = 0
    while at < len(word) - 1:
        if (word[at], word[at + 1]) == pair:
            word = [*word[:at], number, *word[at + 2 :]]
        at += 1
    return word


OLD_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\w\s]+|\s+(?=\S)|\s+|_+")
LETTERS = [
    chr(n) for n in range(1, 0x3100) if unicodedata.category(chr(n)) not in ("Cn", "Cs", "Co")
]
"""Letters that this Python's Unicode knows; of later ones two programs may think differently."""


def test_pairs_of_an_older_run_are_read_as_they_were():
    text = STORY.decode() + "_a__b ²½ 12x the then there. \t\n  end" * 9
    pairs = old_pairs(text, 60)
    found = vocabulary.restore({"kind": "bpe", "pairs": [list(pair) for pair in pairs]})
    assert found.size == 316
    for each in (text, BLANKS, " ".join(f"{x}a{x}{x}1" for x in LETTERS)):
        words = [list(word.encode()) for word in OLD_WORD.findall(each)]
        for n, pair in enumerate(pairs):  # in their order is by their rank
            words = [merged(word, pair, 256 + n) for word in words]
        assert found.encode(each).tolist() == [token for word in words for token in word]
        assert found.decode(found.encode(each)) == each


def test_without_tokenizers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for begin in (
        lambda: vocabulary.create("bpe", STORY),
        lambda: vocabulary.restore({"kind": "bpe", "pairs": []}),
    ):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'cosformer\[train\]'") as found:
            begin()
        assert found.value.name == "tokenizers"
    assert vocabulary.create("bytes", STORY).size == 256


def test_unknown_words_are_one_token():
    words = vocabulary.Words.learn(b"a b a\nc")
    assert words.decode(words.encode(b"a x\n")) == "a <unk> \n"
    assert words.size == 5  # a, b, c, <eos>, <unk>


@pytest.mark.parametrize("given", [64, 8])
def test_windows_ask_for_every_token_but_the_first_once(given):
    content = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    task = windows_of(content, given).with_length(64)
    assert task.facts == windows_of(content, 64).facts
    batches = list(task.evaluation("test", 4))
    labels = torch.cat([b["labels"][b["mask"]] for b in batches])
    tokens = torch.cat([b["tokens"][b["mask"]] for b in batches])
    assert labels.tolist() == content[1:].tolist()
    assert tokens.tolist() == content[:-1].tolist()
    with pytest.raises(ValueError, match="length must be below the text's 999, got 999"):
        task.with_length(999)


def test_epochs_of_training_begin_their_windows_at_other_places():
    task = windows_of((np.arange(5000) % 251).astype(np.uint8), 50)
    steps, place = task.batches("train", 7), {"seed": 0, "rank": 0, "batch_size": 7}
    starts = []
    for epoch in range(3):
        at = [task.batch("train", step=epoch * steps + s, **place) for s in range(steps)]
        found = torch.cat([b["tokens"] for b in at])
        assert torch.equal(torch.cat([b["labels"] for b in at])[:, :-1], found[:, 1:])
        starts.append({int(row[0]) for row in found})
    assert starts[0] != starts[1] != starts[2]


def test_masks_follow_the_rule():
    windows = windows_of(np.full(200_000, 7, np.uint8), 500)
    at = {"seed": 0, "rank": 0, "step": 0, "batch_size": 200}
    batch = tasks.MaskedTask(windows, rate=0.2).batch("train", **at)
    chosen = batch["labels"] != IGNORED
    assert chosen.float().mean() == pytest.approx(0.2, abs=0.01)
    assert (batch["labels"][chosen] == 7).all()
    assert (batch["tokens"][~chosen] == 7).all()
    given = batch["tokens"][chosen]
    assert (given == windows.facts.token("mask")).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (given == 7).float().mean() == pytest.approx(0.1, abs=0.02)


def test_the_floor_is_the_loss_of_single_frequencies():
    task = windows_of(np.tile(np.arange(256), 1000).astype(np.uint8), 8)
    assert task.facts.floor == pytest.approx(np.log(256), abs=1e-6)


def test_python_itself_is_a_text_of_megabytes():
    found = text.load("python")
    assert len(found["train"]) > 3_000_000
    assert min(len(found["valid"]), len(found["test"])) > 50_000
    assert b"The Python" in found["train"]


def test_a_folder_has_its_own_splits_or_is_split_by_file_and_one_file_is_cut(tmp_path):
    for split in tasks.SPLITS:
        (tmp_path / f"{split}.txt").write_text(f"this is {split}")
    assert text.load(str(tmp_path))["valid"] == b"this is valid"
    (tmp_path / "not a file.md").mkdir()
    (tmp_path / "train.txt").rename(tmp_path / "other.md")
    found = text.load(str(tmp_path))
    assert sum(map(len, found.values())) == len("this is trainthis is validthis is test") + 2
    # one file is cut at nine tenths and a half of the rest
    (tmp_path / "x.txt").write_bytes(bytes(range(200)))
    found = text.load(str(tmp_path / "x.txt"))
    assert [len(found[split]) for split in tasks.SPLITS] == [180, 10, 10]
    assert b"".join(found.values()) == bytes(range(200))


def test_the_last_bytes_of_one_file_can_be_held_out(tmp_path):
    (tmp_path / "one.txt").write_bytes(STORY)
    found = text.load(str(tmp_path / "one.txt"), held_out=100)
    assert found["train"] + found["valid"] == STORY
    assert found["valid"] == found["test"] == STORY[-100:]
    for name in ("lm", "mlm"):
        task = tasks.create(name, text=str(tmp_path / "one.txt"), held_out=65, length=32)
        assert task.sizes["valid"] == 2
    for wrong, message in [(0, "from 1 on"), (len(STORY), f"below the text's {len(STORY)} bytes")]:
        with pytest.raises(ValueError, match=f"held_out must be .*{message}.*got {wrong}"):
            text.load(str(tmp_path / "one.txt"), held_out=wrong)
    for several in ("python", "wikitext2", str(tmp_path), "nowhere"):
        with pytest.raises(ValueError, match="text must be one file where held_out is given, got"):
            text.load(several, held_out=100)


def test_a_file_without_content_is_no_part_of_a_text(tmp_path):
    """By its name each file is for one part: 8.txt to validate, 46.txt to test."""
    for name in (21, 46):
        (tmp_path / f"{name}.txt").write_bytes(STORY)
    whole = text.load(str(tmp_path))
    (tmp_path / "8.txt").touch()
    assert list(map(len, text.load(str(tmp_path)).values())) == pytest.approx(
        list(map(len, whole.values())), abs=1
    )


def test_what_is_neither_a_file_nor_a_folder_is_not_said_to_be_missing():
    with pytest.raises(ValueError, match="got '/dev/null', which is neither"):
        text.load("/dev/null")


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_text_that_is_nowhere_is_refused(name):
    with pytest.raises(ValueError, match=f"must be a file or folder, .*; got '{name}', which does"):
        text.load(name)


LOST = vocabulary.BytePairs.learn(STORY, 260).plain()
del LOST["model"]["vocab"]["a"]
BROKEN = [
    {"kind": "cake"},
    {},
    {"kind": "bpe"},
    {"model": {"type": "cake"}},
    {"kind": "words"},
    {"kind": "words", "names": ["no token for unknown words"]},
    LOST,
]
BROKEN += [{"kind": "bpe", "pairs": x} for x in ([[1]], [[1, 900]], [[65, 66], [65, 66]])]


@pytest.mark.parametrize("plain", BROKEN)
def test_a_broken_vocabulary_is_refused(plain):
    with pytest.raises(ValueError, match="vocabulary must be"):
        vocabulary.restore(plain)
