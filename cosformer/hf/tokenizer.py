"""The vocabulary of a run as a tokenizer of Transformers'."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from cosformer.check import check_mapping

BLANK = r"[\s\x1c-\x1f]"
WORD = (
    r" ?[\p{L}\p{Nl}\p{No}]+| ?\p{Nd}+| ?[^\p{L}\p{N}_\s\x1c-\x1f]+"
    rf"|{BLANK}+(?=[^\s\x1c-\x1f])|{BLANK}+|_+"
)
"""Stretches that merging does not cross, as `cosformer.tasks` cuts them, in Unicode's classes."""

SPECIALS = {
    "pad": "pad_token",
    "mask": "mask_token",
    "separator": "sep_token",
    "start": "bos_token",
}
"""Special tokens of every task, in the order of their numbers -> what Transformers calls them."""


def create_tokenizer(vocabulary: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that gives a text the tokens of a run's vocabulary, of bytes or merged pairs.

    Every text has tokens. The special tokens of `cosformer.tasks` follow those of the vocabulary.
    A text that spells one, as `<mask>`, gets that token.

    Args:
        vocabulary: what `plain()` of a vocabulary says, as a run keeps it in `vocabulary.json`:
            `{"kind": "bytes"}`, or `{"kind": "bpe", "pairs": [[104, 101], …]}`.

    >>> create_tokenizer({"kind": "bytes"})("hé").input_ids
    [104, 195, 169]
    """
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    check_mapping("vocabulary", vocabulary)
    kind = vocabulary.get("kind")
    if kind not in ("bytes", "bpe"):
        raise ValueError(f"vocabulary must be of the kind bytes or bpe, got {kind!r}")
    names, merges = _letters(), list[tuple[str, str]]()
    for left, right in vocabulary.get("pairs", ()):
        merges.append((names[left], names[right]))
        names.append(names[left] + names[right])
    tokenizer = Tokenizer(BPE(vocab={name: n for n, name in enumerate(names)}, merges=merges))
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORD), "isolated"), as_letters]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = {theirs: f"<{ours}>" for ours, theirs in SPECIALS.items()}
    tokenizer.add_special_tokens(list(specials.values()))  # in the order of their numbers
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **specials,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte.

    Bytes that are visible letters of Latin-1 are written as themselves, the others in order from
    the 256th letter on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
