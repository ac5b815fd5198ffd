"""Texts to tokens: bytes, words, or byte pairs merged by how often they occur.

Merging (BPE, Sennrich et al. 2016) is our own: this part needs torch and numpy alone, and the
libraries for it are compiled packages of their own.
"""

import heapq
import itertools
import re
from collections import Counter, defaultdict
from typing import Literal, Protocol

import numpy as np

from cosformer.tasks.ragged import Array

Kind = Literal["bytes", "bpe", "words"]
WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\w\s]+|\s+(?=\S)|\s+|_+")
"""Stretches that merging does not cross: words with the blank before them, numbers, signs."""


class Vocabulary(Protocol):
    """Texts as numbers and back."""

    size: int
    widths: Array | None
    """Bytes that each token stands for; None where a text's bytes are not known from its tokens."""

    def encode(self, text: bytes) -> Array: ...

    def decode(self, tokens: Array) -> str: ...


class Bytes:
    """UTF-8 as it is."""

    size = 256
    widths: Array | None = np.ones(256, np.int64)

    def encode(self, text: bytes) -> Array:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Array) -> str:
        return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


class Words:
    """Words between blanks, an end after each line; those not in the training text are `<unk>`."""

    widths: Array | None = None

    def __init__(self, text: bytes) -> None:
        counts = Counter(_words(text))
        counts.setdefault("<unk>", 0)
        self.names = [word for word, _ in counts.most_common()]
        self.numbers = {word: n for n, word in enumerate(self.names)}
        self.size = len(self.names)

    def encode(self, text: bytes) -> Array:
        unknown = self.numbers["<unk>"]
        return np.array([self.numbers.get(word, unknown) for word in _words(text)], np.int32)

    def decode(self, tokens: Array) -> str:
        return " ".join(self.names[n] for n in np.asarray(tokens).tolist()).replace("<eos>", "\n")


class Merges:
    """Bytes, and `size - 256` merges of neighbours, the most frequent ones of the training text."""

    def __init__(self, text: bytes, size: int) -> None:
        if not 256 < size <= 65536:
            raise ValueError(f"vocabulary must lie in 257 to 65,536, got {size}")
        self.ranks = _learn(text, size - 256)
        self.size = 256 + len(self.ranks)
        self.pieces = [bytes([n]) for n in range(256)]
        for left, right in self.ranks:
            self.pieces.append(self.pieces[left] + self.pieces[right])
        self.widths: Array | None = np.array([len(piece) for piece in self.pieces])
        self._known: dict[str, list[int]] = {}

    def encode(self, text: bytes) -> Array:
        found: list[int] = []
        for word in WORD.findall(_decode(text)):
            if word not in self._known:
                self._known[word] = self._merge(list(word.encode()))
            found += self._known[word]
        return np.array(found, np.uint16)

    def decode(self, tokens: Array) -> str:
        joined = b"".join(self.pieces[n] for n in np.asarray(tokens).tolist())
        return joined.decode(errors="replace")

    def _merge(self, tokens: list[int]) -> list[int]:
        while len(tokens) > 1:
            pairs = list(itertools.pairwise(tokens))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            tokens = _replace(tokens, best, 256 + self.ranks[best])
        return tokens


def create(kind: Kind, text: bytes, size: int | None = None) -> Vocabulary:
    """The vocabulary of a training text; `size` is for `bpe` alone."""
    if kind == "bpe":
        return Merges(text, 2048 if size is None else size)
    if size is not None:
        raise ValueError(f"vocabulary must be given for tokens = 'bpe' alone, got {size}")
    if kind == "bytes":
        return Bytes()
    if kind == "words":
        return Words(text)
    raise ValueError(f"tokens must be one of bytes, bpe, words, got {kind!r}")


def _decode(text: bytes) -> str:
    return text.decode(errors="replace")  # a cut may go through a character


def _words(text: bytes) -> list[str]:
    lines = _decode(text).removesuffix("\n").split("\n")
    return [word for line in lines for word in (*line.split(), "<eos>")]


def _learn(text: bytes, count: int) -> dict[tuple[int, int], int]:
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
    ranks: dict[tuple[int, int], int] = {}
    # ties go to the smaller pair: the same merges on every machine
    heap = [(-times_seen, pair) for pair, times_seen in pairs.items()]
    heapq.heapify(heap)
    while len(ranks) < count and heap:
        negative, best = heapq.heappop(heap)
        if -negative != pairs[best]:  # counted anew since: a later entry is right
            continue
        if pairs[best] < 2:
            break
        new, changed = 256 + len(ranks), set[tuple[int, int]]()
        ranks[best] = len(ranks)
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
    return ranks


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
