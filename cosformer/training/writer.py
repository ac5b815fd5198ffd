"""Text in, text out: a language model with the vocabulary that it was trained on."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cosformer.models import LanguageModel, Sampling, generate, generate_tokens
from cosformer.tasks import Vocabulary, Words


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
        """What follows one prompt, in pieces; a piece comes when later tokens cannot change it.

        Nothing that was shown is remembered, so that a text may have any length.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        waiting = ""  # text that may be the beginning of a stop
        for token in generate_tokens(self.model, self._read(prompt), self.sampling):
            waiting += decoder.decode(self.vocabulary.piece(token))
            if (end := until(waiting, stop)) != waiting:
                yield end
                return
            settled = len(waiting) - _begun(waiting, stop)
            if settled:
                yield waiting[:settled]
                waiting = waiting[settled:]
        yield until(waiting + decoder.decode(b"", final=True), stop)

    def _read(self, text: str) -> list[int]:
        tokens = encode(self.vocabulary, text)
        if not tokens:
            raise ValueError(f"prompt must be at least one token, got {text!r}")
        return tokens

    def _write(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.vocabulary.piece, tokens)).decode(errors="replace")


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    """Tokens of a text that goes on: words have no line's end after the last of them."""
    tokens: list[int] = vocabulary.encode(text).tolist()
    return tokens[:-1] if isinstance(vocabulary, Words) and not text.endswith("\n") else tokens


def until(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stops."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]


def _begun(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that later ones may turn into a stop."""
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(begun, default=0)
