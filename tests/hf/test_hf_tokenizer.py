"""Tokenizers give a text the tokens of the run's vocabulary."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

import cosformer.hf as hf
from cosformer.tasks import SPECIALS, Vocabulary
from cosformer.tasks import vocabulary as vocabularies

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
OLD = {"kind": "bpe", "pairs": [[104, 101], [116, 256], [32, 257]]}
"""What a run kept before it had a `tokenizer.json`."""


@pytest.fixture(scope="module", params=["bytes", "bpe", "old"])
def vocabulary(request) -> Vocabulary:
    if request.param == "old":
        return vocabularies.restore(OLD)
    return vocabularies.create(
        request.param, TEXT.encode(), 700 if request.param == "bpe" else None
    )


@pytest.mark.parametrize(
    "text", [TEXT, "", "  a  b\n\n\tc_d__e ²½ 12x the"], ids=["readme", "nothing", "blanks"]
)
def test_tokens_are_those_of_the_vocabulary_and_can_be_read_back(vocabulary, text, tmp_path):
    hf.create_tokenizer(vocabulary.tokenizer()).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(text).input_ids
    assert tokens == vocabulary.encode(text).tolist()
    assert tokenizer.decode(tokens) == text


def test_the_saved_file_is_that_of_the_run(vocabulary, tmp_path):
    hf.create_tokenizer(vocabulary.tokenizer()).save_pretrained(tmp_path)
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    kept = json.loads(vocabulary.tokenizer().to_str())
    assert found == kept
    if vocabulary.kind == "bpe":
        assert kept == vocabulary.plain()


def test_special_tokens_have_the_numbers_of_every_task(vocabulary):
    tokenizer = hf.create_tokenizer(vocabulary.tokenizer())
    numbers = [vocabulary.size + n for n in range(len(SPECIALS))]
    assert tokenizer.convert_tokens_to_ids([f"<{name}>" for name in SPECIALS]) == numbers
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == tuple(numbers[:2])
    padded = tokenizer(["a", "abc"], padding=True)
    assert padded.input_ids[0][0] == vocabulary.size  # on the left, as generate wants it
    assert padded.attention_mask[0][0] == 0
    assert tokenizer("a<mask>").input_ids[-1] == numbers[1]
    assert tokenizer("a", "b").input_ids == [
        *vocabulary.encode("a"),
        numbers[2],
        *vocabulary.encode("b"),
    ]
    cut = hf.create_tokenizer(vocabulary.tokenizer(), 3)
    assert len(cut("a1b2c3", truncation=True).input_ids) == 3


def test_other_tokenizers_are_refused():
    assert vocabularies.Words.learn(b"a b").tokenizer() is None
    with pytest.raises(TypeError, match=r"must be a tokenizers\.Tokenizer, got NoneType"):
        hf.create_tokenizer(None)
    with pytest.raises(ValueError, match=r"must have the special tokens .* got none called <pad>"):
        hf.create_tokenizer(Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="max_length must be a whole number from 1 on, got 0"):
        hf.create_tokenizer(vocabularies.Bytes().tokenizer(), 0)
