"""Texts to tokens: bytes, words, or byte pairs merged by how often they occur.

Merging (BPE, Sennrich et al. 2016) is our own: this part needs torch and numpy alone, and the
libraries for it are compiled packages of their own.
"""

import heapq
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from cosformer.tasks.ragged import Array

Kind = Literal["bytes", "bpe", "words"]
WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\w\s]+|\s+(?=\S)|\s+|_+")
"""Stretches that merging does not cross: words with the blank before them, numbers, signs."""


class Vocabulary(Protocol):
    """Texts as numbers and back."""

    kind: Kind
    size: int
    widths: Array | None
    """Bytes that each token stands for; None where a text's bytes are not known from its tokens."""

    def encode(self, text: str | bytes) -> Array:
        """The tokens of a text; bytes are read as UTF-8."""

    def decode(self, tokens: Array) -> str: ...

    def piece(self, token: int) -> bytes:
        """What a token adds to a text that goes on."""

    def plain(self) -> dict[str, Any]:
        """What JSON can keep of it, for `restore`."""


class Bytes:
    """UTF-8 as it is."""

    kind: Kind = "bytes"
    size = 256
    widths: Array | None = np.ones(256, np.int64)

    def encode(self, text: str | bytes) -> Array:
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, tokens: Array) -> str:
        return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind}


class Words:
    """Words between blanks, an end after each line; those not in the training text are `<unk>`."""

    kind: Kind = "words"
    widths: Array | None = None

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.numbers = {word: n for n, word in enumerate(self.names)}
        self.size = len(self.names)

    @classmethod
    def learn(cls, text: bytes) -> "Words":
        """The words of a text, frequent ones first."""
        counts = Counter(_words(text))
        counts.setdefault("<unk>", 0)
        return cls([word for word, _ in counts.most_common()])

    def encode(self, text: str | bytes) -> Array:
        unknown = self.numbers["<unk>"]
        return np.array([self.numbers.get(word, unknown) for word in _words(text)], np.int32)

    def decode(self, tokens: Array) -> str:
        return " ".join(self.names[n] for n in np.asarray(tokens).tolist()).replace("<eos>", "\n")

    def piece(self, token: int) -> bytes:
        name = self.names[token]
        return b" " + (b"\n" if name == "<eos>" else name.encode())

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": self.names}


class Merges:
    """Bytes, and merges of neighbours: token 256 + n is the pair of tokens with number n."""

    kind: Kind = "bpe"

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.ranks = {pair: n for n, pair in enumerate(pairs)}
        self.size = 256 + len(self.ranks)
        self.pieces = [bytes([n]) for n in range(256)]
        for left, right in self.ranks:
            self.pieces.append(self.pieces[left] + self.pieces[right])
        self.widths: Array | None = np.array([len(piece) for piece in self.pieces])
        self._known: dict[str, list[int]] = {}

    @classmethod
    def learn(cls, text: bytes, size: int) -> "Merges":
        """The `size - 256` merges that are most frequent in a text, or as many as it has."""
        if not 256 < size <= 65536:
            raise ValueError(f"vocabulary must lie in 257 to 65,536, got {size}")
        return cls(_learn(text, size - 256))

    def encode(self, text: str | bytes) -> Array:
        found: list[int] = []
        for word in WORD.findall(_decode(text)):
            if word not in self._known:
                self._known[word] = self._merge(list(word.encode()))
            found += self._known[word]
        return np.array(found, np.uint16)

    def decode(self, tokens: Array) -> str:
        joined = b"".join(self.pieces[n] for n in np.asarray(tokens).tolist())
        return joined.decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "pairs": [list(pair) for pair in self.ranks]}

    def _merge(self, tokens: list[int]) -> list[int]:
        while len(tokens) > 1:
            pairs = list(itertools.pairwise(tokens))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            tokens = _replace(tokens, best, 256 + self.ranks[best])
        return tokens


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
        return Merges.learn(text, 2048 if size is None else size)
    if size is not None:
        raise ValueError(f"vocabulary must be given for tokens = 'bpe' alone, got {size}")
    if kind == "bytes":
        return Bytes()
    if kind == "words":
        return Words.learn(text)
    raise ValueError(f"tokens must be one of bytes, bpe, words, got {kind!r}")


def restore(plain: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that `plain` describes."""
    try:
        if plain["kind"] == "bytes":
            return Bytes()
        if plain["kind"] == "words":
            return Words(plain["names"])
        if plain["kind"] == "bpe":
            return Merges((left, right) for left, right in plain["pairs"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"vocabulary must be as it was kept, got a broken one: {error!r}"
        ) from None
    raise ValueError(f"vocabulary must be bytes, words or bpe, got {plain['kind']!r}")


def _decode(text: str | bytes) -> str:
    if isinstance(text, str):
        return text
    return text.decode(errors="replace")  # a cut may go through a character


def _words(text: str | bytes) -> list[str]:
    lines = _decode(text).removesuffix("\n").split("\n")
    return [word for line in lines for word in (*line.split(), "<eos>")]


def _learn(text: bytes, count: int) -> list[tuple[int, int]]:
    """Pairs in the order in which they are merged. Counts are kept, not taken anew each time."""
    found = Counter(WORD.findall(_decode(text)))
    words = [list(word.encode()) for word in found]
    times = list(found.values())
    pairs: Counter[tuple[int, int]] = Counter()
    where: dict[tuple[int, int], set[int]] = defaultdict(set)
    for n, tokens in enumerate(words):
        for pair in itertools.pairwise(tokens):
            pairs[pair] += times[n]
            where[pair].add(n)
    merges: list[tuple[int, int]] = []
    # ties go to the smaller pair: the same merges on every machine
    heap = [(-times_seen, pair) for pair, times_seen in pairs.items()]
    heapq.heapify(heap)
    while len(merges) < count and heap:
        negative, best = heapq.heappop(heap)
        if -negative != pairs[best]:  # counted anew since: a later entry is right
            continue
        if pairs[best] < 2:
            break
        new, changed = 256 + len(merges), set[tuple[int, int]]()
        merges.append(best)
        for n in where.pop(best):
            before, words[n] = words[n], _replace(words[n], best, new)
            for sign, tokens in ((-1, before), (1, words[n])):
                for pair in itertools.pairwise(tokens):
                    pairs[pair] += sign * times[n]
                    changed.add(pair)
            for pair in itertools.pairwise(words[n]):
                where[pair].add(n)
        for pair in changed:
            heapq.heappush(heap, (-pairs[pair], pair))
    return merges


def _replace(tokens: list[int], pair: tuple[int, int], new: int) -> list[int]:
    merged, n = list[int](), 0
    while n < len(tokens):
        if n + 1 < len(tokens) and (tokens[n], tokens[n + 1]) == pair:
            merged.append(new)
            n += 2
        else:
            merged.append(tokens[n])
            n += 1
    return merged
