"""Texts to tokens: bytes, words, or byte pairs merged by how often they occur.

Merging (BPE, Sennrich et al. 2016) is that of the package tokenizers, which is imported on first
use: bytes and words need torch and numpy alone.
"""

import abc
import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from cosformer.tasks.ragged import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["bytes", "bpe", "words"]
SPECIALS = ("pad", "mask", "separator", "start")
"""Special tokens of every task; their numbers follow those of the data's own tokens."""
CUT = re.compile(r"(?<=\S)(?=[ \n])")
"""Where a blank begins after something else: no merge goes across it."""
LINE = re.compile(r"(?<=\S)(?=\n)")
"""Where a line ends after something else; a text that is learnt is cut there alone."""
BLANK = r"[\s\x1c-\x1f]"
WORD_OF_PAIRS = (
    r" ?[\p{L}\p{Nl}\p{No}]+| ?\p{Nd}+| ?[^\p{L}\p{N}_\s\x1c-\x1f]+"
    rf"|{BLANK}+(?=[^\s\x1c-\x1f])|{BLANK}+|_+"
)
"""Stretches that merging does not cross in a vocabulary that was kept as `pairs`."""


class Vocabulary(abc.ABC):
    """Texts as numbers and back."""

    kind: Kind
    size: int
    widths: Array | None = None
    """Bytes that each token stands for; None where a text's bytes are not known from its tokens."""

    @abc.abstractmethod
    def encode(self, text: str | bytes) -> Array:
        """The tokens of a text; bytes are read as UTF-8."""

    def decode(self, tokens: Array) -> str:
        """The text of all tokens."""
        return b"".join(map(self.piece, np.asarray(tokens).tolist())).decode(errors="replace")

    @abc.abstractmethod
    def piece(self, token: int) -> bytes:
        """What a token adds to a text that goes on."""

    @abc.abstractmethod
    def plain(self) -> dict[str, Any]:
        """What JSON can keep of it, for `restore`."""

    def tokenizer(self) -> "Tokenizer | None":
        """The same as a tokenizer of the package tokenizers, which knows the special tokens too.

        None where there is none.
        """
        return None


class Bytes(Vocabulary):
    """UTF-8 as it is."""

    kind: Kind = "bytes"
    size = 256
    widths = np.ones(256, np.int64)

    def encode(self, text: str | bytes) -> Array:
        return np.frombuffer(_raw(text), np.uint8)

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def tokenizer(self) -> "Tokenizer | None":
        return _of_pairs(())


class Words(Vocabulary):
    """Words between blanks, an end after each line; those not in the training text are `<unk>`."""

    kind: Kind = "words"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.numbers = {word: n for n, word in enumerate(self.names)}
        self.size, self._unknown = len(self.names), self.numbers["<unk>"]

    @classmethod
    def learn(cls, text: bytes) -> "Words":
        """The words of a text, frequent ones first."""
        counts = Counter(_words(text))
        counts.setdefault("<unk>", 0)
        return cls([word for word, _ in counts.most_common()])

    def encode(self, text: str | bytes) -> Array:
        return np.array([self.numbers.get(word, self._unknown) for word in _words(text)], np.int32)

    def decode(self, tokens: Array) -> str:
        return " ".join(self.names[n] for n in np.asarray(tokens).tolist()).replace("<eos>", "\n")

    def piece(self, token: int) -> bytes:
        name = self.names[token]
        return b" " + (b"\n" if name == "<eos>" else name.encode())

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": self.names}


class BytePairs(Vocabulary):
    """Bytes, and merges of neighbours, by a byte-level tokenizer of the package tokenizers.

    What `plain` gives is what that package keeps in a `tokenizer.json`.
    """

    kind: Kind = "bpe"

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # "<mask>" in a text is a text
        numbers = tokenizer.get_vocab(with_added_tokens=False)
        self.size = len(numbers)
        if sorted(numbers.values()) != list(range(self.size)):
            raise ValueError("tokens must have the numbers from 0 on, without a gap")
        names = sorted(numbers, key=numbers.__getitem__)
        byte = {letter: n for n, letter in enumerate(_letters())}
        self.pieces = [bytes(byte[letter] for letter in name) for name in names]
        self.widths = np.array([len(piece) for piece in self.pieces])
        self._known: dict[str, list[int]] = {}

    @classmethod
    def learn(cls, text: bytes, size: int) -> "BytePairs":
        """The `size - 256` merges that are most frequent in a text, or as many as it has."""
        if not 256 < size <= 65536:
            raise ValueError(f"vocabulary must lie in 257 to 65,536, got {size}")
        _require_tokenizers()
        from tokenizers import models, pre_tokenizers, trainers

        tokenizer = _byte_level(models.BPE())
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, min_frequency=2, initial_alphabet=letters, show_progress=False
        )
        tokenizer.train_from_iterator(LINE.split(_decode(text)), trainer)
        return cls(_with_specials(tokenizer))

    def encode(self, text: str | bytes) -> Array:
        words = CUT.split(_decode(text))
        for word in words:
            if word not in self._known:
                self._known[word] = self._tokenizer.encode(word).ids
        found = itertools.chain.from_iterable(map(self._known.__getitem__, words))
        return np.fromiter(found, np.uint16)

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return found

    def tokenizer(self) -> "Tokenizer | None":
        return self._tokenizer


def create(
    kind: Kind, text: bytes, size: int | None = None, learnt: Vocabulary | None = None
) -> Vocabulary:
    """The vocabulary of a training text, `size` for `bpe` alone; or the one that was learnt before.

    Such a one must be as `kind` and `size` ask.
    """
    if learnt is not None:
        if kind != learnt.kind or size not in (None, learnt.size):
            raise ValueError(
                f"tokens must be of the vocabulary that was learnt before, {learnt.kind} of "
                f"{learnt.size:,}, got {kind}" + ("" if size is None else f" of {size:,}")
            )
        return learnt
    if kind == "bpe":
        return BytePairs.learn(text, 2048 if size is None else size)
    if size is not None:
        raise ValueError(f"vocabulary must be given for tokens = 'bpe' alone, got {size}")
    if kind == "bytes":
        return Bytes()
    if kind == "words":
        return Words.learn(text)
    raise ValueError(f"tokens must be one of bytes, bpe, words, got {kind!r}")


def restore(plain: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that `plain` describes.

    Byte pairs are a `tokenizer.json`, or, as older runs keep them, `{"kind": "bpe", "pairs": …}`.
    """
    kind = "bpe" if "model" in plain else plain.get("kind")
    if kind not in get_args(Kind):
        raise ValueError(f"vocabulary must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if kind == "bpe":
        _require_tokenizers()
    try:
        if kind == "bytes":
            return Bytes()
        if kind == "words":
            return Words(plain["names"])
        return BytePairs(_of_pairs(plain["pairs"]) if "pairs" in plain else _of_file(plain))
    except Exception as error:  # tokenizers raises that class itself for a broken file
        raise ValueError(
            f"vocabulary must be as it was kept, got a broken one: {error!r}"
        ) from None


def _decode(text: str | bytes) -> str:
    return _raw(text).decode(errors="replace")  # a cut may go through a character


def _raw(text: str | bytes) -> bytes:
    try:
        return text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:  # so Python reads bytes that are not UTF-8
        wrong = error.object[error.start]
        raise ValueError(
            f"text must be in UTF-8, got {wrong!r} as character {error.start + 1}"
        ) from None


def _words(text: str | bytes) -> list[str]:
    lines = _decode(text).removesuffix("\n").split("\n")
    return [word for line in lines for word in (*line.split(), "<eos>")]


def _of_file(content: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(content))


def _of_pairs(pairs: Iterable[tuple[int, int]]) -> "Tokenizer":
    """Token n is byte n, and token 256 + n the pair of tokens with number n."""
    _require_tokenizers()
    from tokenizers import Regex, models, pre_tokenizers

    names, merges = _letters(), list[tuple[str, str]]()
    for left, right in pairs:
        merges.append((names[left], names[right]))
        names.append(names[left] + names[right])
    numbers = {name: n for n, name in enumerate(names)}
    if len(numbers) < len(names):
        raise ValueError("pairs must be all different")
    tokenizer = _byte_level(models.BPE(vocab=numbers, merges=merges))
    words = pre_tokenizers.Split(Regex(WORD_OF_PAIRS), "isolated")
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_letters])
    return _with_specials(tokenizer)


def _byte_level(model: Any) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_specials(tokenizer: "Tokenizer") -> "Tokenizer":
    """Add the special tokens, and pairs of texts with a separator between them."""
    from tokenizers import processors

    tokenizer.add_special_tokens([f"<{name}>" for name in SPECIALS])
    between = "<separator>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A",
        pair=f"$A {between} $B",
        special_tokens=[(between, tokenizer.token_to_id(between))],
    )
    return tokenizer


def _require_tokenizers() -> None:
    if importlib.util.find_spec("tokenizers") is None:
        raise ModuleNotFoundError(
            "byte pairs need the package tokenizers: pip install 'cosformer[train]'",
            name="tokenizers",
        )


def _letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte.

    Bytes that are visible letters of Latin-1 are written as themselves, the others in order from
    the 256th letter on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
