"""Tokenizers give a text the tokens of the run's vocabulary."""

import unicodedata
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import cosformer.hf as hf
from cosformer.tasks import SPECIALS, Vocabulary
from cosformer.tasks import vocabulary as vocabularies

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
LETTERS = [
    chr(n) for n in range(1, 0x3100) if unicodedata.category(chr(n)) not in ("Cn", "Cs", "Co")
]
"""Letters that this Python's Unicode knows; of later ones two programs may think differently."""


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def vocabulary(request) -> Vocabulary:
    return vocabularies.create(
        request.param, TEXT.encode(), 700 if request.param == "bpe" else None
    )


@pytest.mark.parametrize(
    "text",
    [TEXT, "", "  a  b\n\n\tc_d__e ²½ 12x", " ".join(f"{x}a{x}{x}1" for x in LETTERS)],
    ids=["readme", "nothing", "blanks", "letters"],
)
def test_tokens_are_those_of_the_vocabulary_and_can_be_read_back(vocabulary, text, tmp_path):
    hf.create_tokenizer(vocabulary.plain()).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(text).input_ids
    assert tokens == vocabulary.encode(text.encode()).tolist()
    assert tokenizer.decode(tokens) == text


def test_special_tokens_have_the_numbers_of_every_task(vocabulary):
    tokenizer = hf.create_tokenizer(vocabulary.plain())
    numbers = [vocabulary.size + n for n in range(len(SPECIALS))]
    assert tokenizer.convert_tokens_to_ids([f"<{name}>" for name in SPECIALS]) == numbers
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == tuple(numbers[:2])
    padded = tokenizer(["a", "abc"], padding=True)
    assert padded.input_ids[0][0] == vocabulary.size  # on the left, as generate wants it
    assert padded.attention_mask[0][0] == 0


def test_other_vocabularies_are_refused():
    with pytest.raises(ValueError, match="must be of the kind bytes or bpe, got 'words'"):
        hf.create_tokenizer({"kind": "words", "names": []})
    with pytest.raises(TypeError, match="vocabulary must be a mapping, got str"):
        hf.create_tokenizer("bytes")
