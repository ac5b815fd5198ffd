"""The vocabulary of a run as a tokenizer of Transformers'."""

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from cosformer.check import check_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIALS = {
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "sep_token": "<separator>",
    "bos_token": "<start>",
    "eos_token": "<start>",
}
"""What Transformers calls the special tokens of `cosformer.tasks` -> how they are written."""


def create_tokenizer(
    tokenizer: "Tokenizer", max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer that gives a text the tokens of a run's vocabulary, of bytes or merged pairs.

    Every text has tokens. The special tokens of `cosformer.tasks` follow those of the vocabulary.
    A text that spells one, as `<mask>`, gets that token. What begins a text ends the one before it,
    for tools that ask for such a token; none is added to a text.

    Args:
        tokenizer: what `tokenizer()` of a vocabulary of `cosformer.tasks` gives, which is also
            what a run of byte pairs keeps in `tokenizer.json`.
        max_length: where `truncation=True` cuts a text; None: nowhere.

    >>> from cosformer.tasks import Bytes
    >>> create_tokenizer(Bytes().tokenizer())("hé").input_ids
    [104, 195, 169]
    """
    from tokenizers import Tokenizer

    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer must be a tokenizers.Tokenizer, got {type(tokenizer).__name__}")
    if max_length is not None:
        check_whole("max_length", max_length, 1)
    known = tokenizer.get_added_tokens_decoder().values()
    if lacks := [name for name in SPECIALS.values() if name not in {x.content for x in known}]:
        raise ValueError(
            f"tokenizer must have the special tokens of cosformer.tasks, got none called {lacks[0]}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIALS,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **({} if max_length is None else {"model_max_length": max_length}),
    )
