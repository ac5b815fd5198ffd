"""Texts, embeddings and their rank correlation."""

import lzma

import pytest
import torch
from transformers import AutoTokenizer

from cosformer.conversion import (
    Pairs,
    convert,
    embed,
    judge,
    read_pairs,
    read_texts,
    spearman,
    texts,
)


def test_texts_come_from_lines_and_from_tables_each_once(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \none\n")
    with lzma.open(tmp_path / "b.tsv.xz", "wt") as file:
        file.write("label\tpremise\thypothesis\n1\ttwo\tthree\n")
    assert read_texts([tmp_path / "a.txt", tmp_path / "b.tsv.xz"]) == ["one", "two", "three"]
    (tmp_path / "c.txt").write_text("\n")
    with pytest.raises(ValueError, match="data must have one or more texts"):
        read_texts([tmp_path / "c.txt"])
    with pytest.raises(ValueError, match=r"data must be files, got .*none.txt"):
        read_texts([tmp_path / "none.txt"])


def test_every_text_comes_once_before_any_comes_again():
    seen = []

    def tokenizer(chosen, **_):
        seen.extend(chosen)
        return {"input_ids": torch.zeros(1), "attention_mask": torch.zeros(1)}

    batches = texts.Batches([str(n) for n in range(7)], tokenizer, batch=3, length=8, seed=0)
    for step in range(7):
        batches(step, "cpu")
    rounds = [seen[n : n + 7] for n in range(0, 21, 7)]
    assert [sorted(each) for each in rounds] == [[str(n) for n in range(7)]] * 3
    assert rounds[0] != rounds[1]


def test_embeddings_do_not_depend_on_their_neighbours(folders):
    model, tokenizer = (
        convert.load(folders / "bert"),
        AutoTokenizer.from_pretrained(folders / "bert"),
    )
    words = ["a long sentence about bottles", "short", "of middle length"]
    together = embed(model, tokenizer, words)
    alone = torch.cat([embed(model, tokenizer, [word]) for word in words])
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(3))


def test_spearman_is_one_where_order_agrees_and_ties_share_ranks(folders):
    model, tokenizer = (
        convert.load(folders / "bert"),
        AutoTokenizer.from_pretrained(folders / "bert"),
    )
    first, second = ["a tree", "a tree", "a tree"], ["a tree", "a trek", "12345 67"]
    one, other = embed(model, tokenizer, first), embed(model, tokenizer, second)
    cosines = (one * other).sum(-1).tolist()
    assert spearman(model, tokenizer, Pairs(first, second, cosines)) == pytest.approx(1)
    opposite = [-each for each in cosines]
    assert spearman(model, tokenizer, Pairs(first, second, opposite)) == pytest.approx(-1)
    assert judge.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]


def test_pairs_are_those_of_their_split(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("split\tscore\tsentence1\tsentence2\ndev\t2.5\ta\tb\ntrain\t1\tc\td\n")
    assert read_pairs(path, "dev") == Pairs(["a"], ["b"], [2.5])
    with pytest.raises(ValueError, match=r"split must be one of .*pairs.tsv, got 'test'"):
        read_pairs(path, "test")
