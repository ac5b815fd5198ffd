"""Text in, text out: a language model with the vocabulary that it was trained on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cosformer.models import LanguageModel, Sampling, generate, generate_tokens
from cosformer.tasks import Vocabulary, Words

UNFINISHED = "\ufffd"
"""What the beginning of a character of several bytes decodes to."""


@dataclass(frozen=True)
class Writer:
    """A language model that reads and writes text."""

    model: LanguageModel
    vocabulary: Vocabulary
    sampling: Sampling

    def together(self, prompts: Sequence[str], stop: Sequence[str] = ()) -> list[str]:
        """What follows each prompt, all generated at once."""
        found = generate(self.model, [self._read(prompt) for prompt in prompts], self.sampling)
        return [until(self._write(tokens), stop) for tokens in found]

    def stream(self, prompt: str, stop: Sequence[str] = ()) -> Iterator[str]:
        """What follows one prompt, in pieces; a piece comes when later tokens cannot change it."""
        tokens, shown = list[int](), 0
        for token in generate_tokens(self.model, self._read(prompt), self.sampling):
            tokens.append(token)
            text = self._write(tokens)
            if (end := until(text, stop)) != text:
                yield end[shown:]
                return
            settled = len(text) - _open_end(text, stop)
            if settled > shown:
                yield text[shown:settled]
                shown = settled
        yield self._write(tokens)[shown:]

    def _read(self, text: str) -> list[int]:
        tokens = encode(self.vocabulary, text)
        if not tokens:
            raise ValueError(f"prompt must be at least one token, got {text!r}")
        return tokens

    def _write(self, tokens: Sequence[int]) -> str:
        begin = " " if isinstance(self.vocabulary, Words) else ""
        return begin + self.vocabulary.decode(np.array(tokens, np.int64))


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    """Tokens of a text that goes on: words have no line's end after the last of them."""
    tokens: list[int] = vocabulary.encode(text.encode()).tolist()
    return tokens[:-1] if isinstance(vocabulary, Words) and not text.endswith("\n") else tokens


def until(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stops."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]


def _open_end(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that the next token may still change, or turn into a stop."""
    unfinished = len(text) - len(text.rstrip(UNFINISHED))
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(unfinished, max(begun, default=0))
