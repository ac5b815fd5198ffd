"""Text from many streams at once, which join and leave at any time."""

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_whole
from cosformer.mechanisms import map_streams
from cosformer.models.backbone import Context, ModelState
from cosformer.models.decoder import LanguageModel
from cosformer.models.sampling import Plan, Sampling
from cosformer.models.slots import Slots, Stream, records
from cosformer.models.tokens import Tokens, check_sequence, pad
from cosformer.models.translation import EncoderDecoder

GREEDY = Sampling(temperature=0)
AHEAD = 16
"""Tokens of each stream that a GPU makes before the host looks at them."""
WASTE = 4
"""A graph that is already there is used if it has at most so many times the rows that a new graph
would have: steps of rows that nobody needs cost less than to record another graph."""
PIECE = 512
"""Tokens of a prompt that are read between two rounds of tokens."""
TOGETHER = 2**15
"""The most tokens of prompts that are read together, padding included; a prompt of more tokens is
read alone."""


@dataclass(eq=False)
class Request:
    """A stream that has been submitted and has not ended."""

    name: int
    sampling: Sampling
    given: Tokens | Stream
    left: int  # tokens that are still to be asked for
    owed: int  # tokens that have not come back yet
    length: int  # tokens that were given
    row: int | None = None
    ended: bool = False


class Round(NamedTuple):
    """Tokens that were asked for and have not come back yet."""

    rows: list[tuple[Request, int, int]]  # the request, its row, how many of its tokens count
    tokens: Tensor  # [steps, rows], on the host
    back: torch.cuda.Event | None  # after it the tokens are there


@dataclass
class Reading:
    """Prompts that are being read together, but for the last token of each."""

    requests: list[Request]
    tokens: Tensor  # [requests, longest]
    mask: Tensor | None
    state: ModelState
    done: int = 0  # tokens read


class Generator:
    """Continues prompts that may be submitted at any time, up to `slots` of them at once.

    Iterate over it for the tokens, as pairs of a request and a token; it ends when no request has
    tokens left, and goes on after the next `submit`. Prompts are read in pieces between rounds of
    tokens, so that running streams do not wait for a long one. A prompt that finds no free slot
    waits for one. The weights must not change while streams run; between streams they may. A stream
    whose logits are not finite ends and raises an error; iterate again for the tokens of the
    others.

    Args:
        model: a language model in evaluation mode, with mechanisms that stream.
        slots: the most streams at a time. Their memory is taken at once; `memory` says how much.
        length: the most tokens of a stream, prompt included, where layers keep all tokens (as
            softmax does): it decides on the size of their caches. None: the config's `max_length`.
            A model whose states are constant has no use for it, and refuses it.
        piece: tokens of a prompt that are read between two rounds.
        ahead: tokens of each stream in a round. A GPU makes a round without waiting for the host,
            which looks at a round while the next is made. None: 16 on a GPU, 1 on a CPU.
        context: how `generate` hands on what an encoder-decoder has read: request n looks at row n.

    >>> model = LanguageModel(ModelConfig()).eval()
    >>> generator = Generator(model, slots=2)
    >>> requests = [generator.submit(text, Sampling(max_new_tokens=3)) for text in (b"A", b"rose")]
    >>> sorted(request for request, token in generator)
    [0, 0, 0, 1, 1, 1]
    """

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        slots: int = 256,
        *,
        length: int | None = None,
        piece: int = PIECE,
        ahead: int | None = None,
        context: Context | None = None,
    ) -> None:
        if not isinstance(model, LanguageModel) and context is None:
            raise TypeError(f"model must be a LanguageModel, got {type(model).__name__}")
        check_evaluation(model)
        check_whole("slots", slots, 1)
        check_whole("piece", piece, 1)
        keeps = model.backbone.keeps_tokens
        if length is not None:
            check_whole("length", length, 1)
            if not keeps:
                raise ValueError(
                    f"length must be None where no layer keeps all tokens, got {length}: the "
                    "memory of such a stream does not depend on it"
                )
        elif keeps:
            length = model.config.max_length
        self.model, self.slots, self.length, self.piece = model, slots, length, piece
        usual = AHEAD if records(model) else 1
        self._ahead = usual if ahead is None else check_whole("ahead", ahead, 1)
        self._context = context
        self._streams = self._make_slots()
        # rounds that are made while the host looks at another
        self._depth = 1 if self._streams.records else 0
        self._rows: list[Request | None] = [None] * slots
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._reading: Reading | None = None
        self._rounds: deque[Round] = deque()
        self._ready: deque[tuple[int, int]] = deque()
        self._names = itertools.count()

    def _make_slots(self) -> Slots:
        rows = map_streams(lambda x: torch.zeros_like(x[: self.slots]), self._context)
        return Slots(self.model, self.slots, self.length, rows, self._ahead)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the streams of all slots by the mechanism that needs them, taken at once.

        >>> Generator(LanguageModel(ModelConfig()).eval(), slots=10).memory
        {'cosformer': 338080}
        """
        return self._streams.memory

    @property
    def active(self) -> set[int]:
        """The requests that have tokens left to give."""
        return set(self._requests)

    def submit(self, prompt: Tokens | Stream, sampling: Sampling = GREEDY) -> int:
        """Continue a prompt, or a stream from `save` or `read`; the number of this request.

        A stream is not used up: submitted again, with another seed, it is another sample.
        """
        return self.submit_checked(self._check(prompt, sampling), sampling)

    def submit_checked(self, prompt: Tokens | Stream, sampling: Sampling) -> int:
        """`submit` for callers that have checked their arguments."""
        request = self._request(prompt, sampling)
        self._requests[request.name] = request
        self._waiting.append(request)
        return request.name

    def _request(self, prompt: Tokens | Stream, sampling: Sampling) -> Request:
        count = sampling.max_new_tokens
        given = prompt if isinstance(prompt, Stream) else tuple(prompt)  # a list may change later
        return Request(next(self._names), sampling, given, count, count, _length(prompt))

    def save(self, request: int) -> Stream:
        """The stream of a request as it is after the tokens so far, to be submitted again.

        It continues as the request does if its sampling is the same. Some of the tokens so far may
        not have been iterated over yet: they still come. A GPU makes up to two rounds of `ahead`
        tokens before they are iterated over; a request whose last token is made has no stream.
        """
        found = self._requests.get(request)
        while found is not None and found.row is None and not found.ended:  # not read yet
            self._work()
        while self._rounds:
            self._land()
        if found is None or found.row is None or found.ended:
            raise ValueError(
                f"request must be one that has tokens left to make, got {request}, which is "
                f"unknown, cancelled or done: up to two rounds of ahead={self._ahead} tokens are "
                "made before they are iterated over"
            )
        return self._streams.take(found.row)

    def read(self, prompt: Tokens) -> Stream:
        """A prompt as a stream that has read it, to be submitted as often as samples are wanted."""
        if isinstance(prompt, Stream):
            raise TypeError("prompt must be tokens, got a Stream, which has read its own")
        tokens = self._check(prompt, Sampling(max_new_tokens=1))
        reading = self._begin_reading([self._request(tokens, GREEDY)])
        while not self._read_piece(reading):
            pass
        return Stream(int(prompt[-1]), reading.state)

    def cancel(self, request: int) -> None:
        """End a request: no more of its tokens come."""
        found = self._requests.get(request)
        if found is not None:
            self._end(found)
        self._ready = deque(pair for pair in self._ready if pair[0] != request)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        while not self._ready:
            if not self._work():
                raise StopIteration
        return self._ready.popleft()

    def _work(self) -> bool:
        """Read a piece, launch a round, take one in; return whether there was anything to do."""
        began = self._admit()
        launched = self._launch()
        if self._rounds and (not launched or len(self._rounds) > self._depth):
            self._land()
            return True
        return began or launched

    @torch.no_grad()
    def _admit(self) -> bool:
        """Read a piece of waiting prompts if slots are free; return whether anything was read."""
        if self._reading is None:
            if self._waiting and not any(self._rows) and self._streams.outdated:
                del self._streams  # its memory is given back before the next is taken
                self._streams = self._make_slots()
            group = self._next_group()
            began = bool(group)
            while group and isinstance(group[0].given, Stream):
                self._streams.put(self._seat(group[0]), group[0].given, group[0].sampling)
                group = self._next_group()
            if not group:
                return began
            self._reading = self._begin_reading(group)
        try:
            done = self._read_piece(self._reading)
        except Exception:  # it would be raised by every later call too, and nobody would go on
            for request in self._reading.requests:
                self._end(request)
            self._reading = None
            raise
        if done:
            for n, request in enumerate(self._reading.requests):
                if not request.ended:
                    row, given = self._seat(request), request.given
                    assert not isinstance(given, Stream)
                    self._streams.put_from(row, self._reading.state, n, len(given) - 1)
                    self._streams.begin(row, int(given[-1]), request.sampling)
            self._reading = None
        return True

    def _seat(self, request: Request) -> int:
        """Give the request a free row, and return the row."""
        row = request.row = self._rows.index(None)
        self._rows[row] = request
        return row

    def _next_group(self) -> list[Request]:
        """The requests that have waited longest and can be read together: a stream by itself, or
        prompts that padding may make equally long, or those that are."""
        free = self._rows.count(None)
        if not free or not self._waiting:
            return []
        first = self._waiting[0]
        group, longest, most = [first], first.length, first.sampling.max_new_tokens
        if not isinstance(first.given, Stream):
            backbone = self.model.backbone
            limit = backbone.limit or math.inf
            for request in itertools.islice(self._waiting, 1, None):
                if len(group) == free:
                    break
                length = max(longest, request.length)
                tokens = max(most, request.sampling.max_new_tokens)
                few = length * (len(group) + 1) <= TOGETHER
                fits = backbone.shifts and length + tokens - 1 <= limit
                alike = request.length == longest or fits
                if few and alike and not isinstance(request.given, Stream):
                    group, longest, most = [*group, request], length, tokens
        for request in group:
            self._waiting.remove(request)
        return group

    def _begin_reading(self, requests: list[Request]) -> Reading:
        device, names = self.model.head.weight.device, [request.name for request in requests]
        context = map_streams(lambda x: x[names], self._context)
        prompts = [request.given[:-1] for request in requests]  # the last is read by the first step
        tokens, mask = pad(prompts, device, left=True)  # type: ignore[arg-type]
        state = self.model.backbone.empty_state(len(requests), context)
        return Reading(requests, tokens, mask, state)

    @torch.no_grad()
    def _read_piece(self, reading: Reading) -> bool:
        """Read the next piece; return whether the prompts are read. Without streams it is long."""
        piece = max(self.piece, TOGETHER // len(reading.requests))
        if any(self._rows):
            piece = self.piece
        part = slice(reading.done, reading.done + piece)
        tokens = reading.tokens[:, part]
        if tokens.shape[1]:
            mask = None if reading.mask is None else reading.mask[:, part]
            _, reading.state = self.model.backbone.stream(tokens, reading.state, key_mask=mask)
        reading.done += tokens.shape[1]
        return reading.done == reading.tokens.shape[1]

    def _launch(self) -> bool:
        """Launch a round of tokens of all streams; return whether there are streams."""
        running = [request for request in self._rows if request is not None]
        if not running:
            return False
        plan = Plan.of(request.sampling for request in running)
        count = self._compact(len(running), plan)
        steps = min(self._ahead, max(request.left for request in running))
        on_gpu = self._streams.device.type == "cuda"
        for _ in range(steps):
            self._streams.step(count, plan)
        tokens = torch.empty(steps, count, dtype=torch.int64, pin_memory=on_gpu)
        tokens.copy_(self._streams.last(steps, count), non_blocking=on_gpu)
        back = None
        if on_gpu:
            back = torch.cuda.Event()
            back.record(torch.cuda.current_stream(self._streams.device))
        rows = []
        for request in running:
            assert request.row is not None
            rows.append((request, request.row, min(steps, request.left)))
            request.left -= steps
            if request.left <= 0:  # what comes after the round finds the row free
                self._leave(request)
        self._rounds.append(Round(rows, tokens, back))
        return True

    def _compact(self, running: int, plan: Plan) -> int:
        """How many rows a step takes: all that run are among the first ones.

        On a GPU few graphs serve any number of streams, because recording one takes as long as many
        steps: one for a power of two, with room for those that wait, or one that there is already.
        """
        count = running
        if self._streams.records:
            reading = 0 if self._reading is None else len(self._reading.requests)
            soon = min(self.slots, running + reading + len(self._waiting))
            wanted = min(self.slots, 1 << (soon - 1).bit_length())
            there = self._streams.recorded(plan)
            fitting = [each for each in there if running <= each <= WASTE * wanted]
            count = min(fitting, default=wanted)
        for row in range(count, self.slots):
            request = self._rows[row]
            if request is not None:
                to = self._rows.index(None)
                self._streams.move(row, to)
                self._rows[to], self._rows[row], request.row = request, None, to
        return count

    def _land(self) -> None:
        """Wait for the oldest round and take its tokens, which the iteration then returns."""
        rows, tokens, back = self._rounds.popleft()
        if back is not None:
            back.synchronize()
        diverged = False
        for n, line in enumerate(tokens.tolist()):
            for request, row, count in rows:
                if n < count and not request.ended:
                    diverged |= line[row] < 0
                    self._arrive(request, line[row])
        if diverged:  # not before the tokens of all other streams are kept
            raise ValueError("logits must be finite, got NaN or inf: the model has diverged")

    def _arrive(self, request: Request, token: int) -> None:
        request.owed -= 1
        if token >= 0:
            self._ready.append((request.name, token))
        if token < 0 or not request.owed or token in request.sampling.stop:
            self._end(request)

    def _leave(self, request: Request) -> None:
        if request.row is not None:
            self._rows[request.row] = None
        request.row = None

    def _end(self, request: Request) -> None:
        request.ended, request.left = True, 0
        self._leave(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._requests.pop(request.name, None)

    def _check(self, prompt: Tokens | Stream, sampling: Sampling) -> Tokens | Stream:
        """The prompt, a list if it is an array; refuses what could not be continued to its end."""
        config = self.model.config
        check_evaluation(self.model)
        check_sampling(self.model, sampling)
        if isinstance(prompt, Stream):
            layers, streams = len(prompt.state.layers), len(prompt.state.position)
            if layers != config.layers or streams != 1:
                raise ValueError(
                    f"prompt must be one stream of {config.layers} layers, got {streams} of "
                    f"{layers} layers"
                )
            check_sequence("prompt", [prompt.token], config.vocabulary)
            self._streams.check(prompt)
        else:
            prompt = check_sequence("prompt", prompt, config.vocabulary)
        length = _length(prompt)
        check_room(self.model, length, sampling)
        if self.length is not None and length + sampling.max_new_tokens - 1 > self.length:
            raise ValueError(
                f"length must be at least {length + sampling.max_new_tokens - 1} for "
                f"max_new_tokens={sampling.max_new_tokens} after a prompt of {length} tokens, got "
                f"{self.length}: make the generator with a larger one, for its caches"
            )
        return prompt


def check_evaluation(model: LanguageModel | EncoderDecoder) -> None:
    if model.training:
        raise ValueError("model must be in evaluation mode: call model.eval() first")


def check_sampling(model: LanguageModel | EncoderDecoder, sampling: Sampling) -> None:
    """Refuse what is no sampling, or stops at tokens that the model does not have."""
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, got {type(sampling).__name__}")
    last = model.config.vocabulary - 1
    if any(not 0 <= token <= last for token in sampling.stop):
        raise ValueError(f"stop must hold tokens from 0 to {last}, got {sampling.stop}")


def check_room(model: LanguageModel | EncoderDecoder, length: int, sampling: Sampling) -> None:
    """Refuse more tokens after a prompt of some length than the model is made for."""
    limit = model.backbone.limit
    if limit is None:
        return
    by, remedy = model.backbone.limited_by, "a model made with recommended('lm') has none"
    if length > limit:
        raise ValueError(
            f"prompt must be at most {limit} tokens, for the model's limit ({by}), got {length}: "
            f"{remedy}"
        )
    most = limit + 1 - length  # the last token is chosen, and not read again
    if sampling.max_new_tokens > most:
        raise ValueError(
            f"max_new_tokens must be at most {most} after a prompt of {length} tokens, for the "
            f"model's limit of {limit} ({by}), got {sampling.max_new_tokens}: {remedy}"
        )


def _length(prompt: Tokens | Stream) -> int:
    """The number of tokens of a prompt or stream that was submitted."""
    return int(prompt.state.position[0]) + 1 if isinstance(prompt, Stream) else len(prompt)
