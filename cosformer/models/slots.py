"""Many streams of a model in memory of a fixed size, all moved on by one call.

The whole step (embedding, all layers, head, choice of a token) reads and writes tensors that stay
where they are. On a GPU it is recorded as a CUDA graph for each number of streams, and a replay
asks for all its kernels at once.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from cosformer.mechanisms import HeldCache, map_streams
from cosformer.models.backbone import Context, ModelState, TokenHead
from cosformer.models.decoder import LanguageModel
from cosformer.models.sampling import Choices, Plan, Sampling, choose
from cosformer.models.translation import EncoderDecoder
from cosformer.nn import Block, BlockStep, LayerState, PreparedBlock, is_own, norm_of
from cosformer.ops import Clock, Linear, State, likeliest_serves, normed_linear, take_likeliest
from cosformer.runtime import autocasts

LIKELIEST = Plan()
"""The plan of streams that all take their likeliest token."""

GRAPHS = 64
"""The most graphs that are kept."""


class Stream(NamedTuple):
    """A stream by itself: all that it needs to go on, here or in another generator."""

    token: int  # the last token, which the state has not read yet
    state: ModelState  # after all tokens before it, of one stream
    drawn: int = 0  # how many of its tokens were chosen


class Held(NamedTuple):
    """What a step reads and writes, for B streams in memory of a fixed size."""

    layers: tuple[LayerState, ...]
    context: Context | None  # what an encoder-decoder looks at
    room: int | None  # the most tokens of a stream, which then stays at its last one; None: any
    position: Tensor  # [B] int64: real tokens so far
    length: Tensor  # [B] int64: tokens so far, padding included
    token: Tensor  # [B] int64: the token that each stream reads next
    chosen: Tensor  # [B, ahead] int64: the last tokens; -1 where logits were not finite
    choices: Choices


class Slots:
    """A fixed number of streams of a model; a step takes a token for the first `count` of them."""

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        count: int,
        length: int | None = None,
        context: Context | None = None,
        ahead: int = 1,
    ) -> None:
        """The streams begin empty.

        Args:
            length: the most tokens of a stream, where layers keep all tokens.
            ahead: how many of the tokens that were chosen last are kept.
        """
        self.model, self.device = model, model.head.weight.device
        self._versions = _versions(model)
        self.held = _held(model, count, length, context, ahead)
        self._blocks = [PreparedBlock(cast(Block, block)) for block in model.backbone.blocks]
        self._steps: dict[int, Step] = {}
        self._graphs: dict[tuple[int, Plan], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def records(self) -> bool:
        """Whether steps are CUDA graphs."""
        return records(self.model)

    @property
    def outdated(self) -> bool:
        """Whether the model's weights have changed since its blocks were prepared."""
        return self._versions != _versions(self.model)

    def recorded(self, plan: Plan) -> list[int]:
        """The numbers of rows for which a graph of such a step was recorded."""
        return [count for count, known in self._graphs if known == plan]

    @torch.no_grad()
    def step(self, count: int, plan: Plan) -> None:
        """Move the first `count` streams on by a token; `last` has what they chose."""
        if not self.records:
            self._rows(count)(plan)
            return
        with torch.cuda.device(self.device):
            self._graph(count, plan).replay()

    @torch.no_grad()
    def last(self, steps: int, count: int) -> Tensor:
        """What the first `count` streams chose in the last steps, `[steps, count]`."""
        chosen, length = self.held.chosen[:count], self.held.length
        ahead = chosen.shape[1]
        if ahead == 1:
            return chosen.T
        back = torch.arange(-steps, 0, device=self.device)
        return chosen.gather(1, (length[:count, None] + back) % ahead).T

    def check(self, stream: Stream) -> None:
        """Refuse a stream of a model with other layers; it may be on another device."""
        state = map_streams(lambda x: x.to(self.device), stream.state)
        for n, (block, layer) in enumerate(zip(self._blocks, state.layers, strict=True)):
            try:
                block.block.attention.check_state(layer, 1)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"prompt must be a stream of such a model, got one whose layer {n} differs: "
                    f"{error}"
                ) from error

    @torch.no_grad()
    def put(self, row: int, stream: Stream, sampling: Sampling) -> None:
        """Copy a stream into a row, and set how it chooses its tokens."""
        self.put_from(row, stream.state, 0, int(stream.state.position[0]))
        self.begin(row, stream.token, sampling, stream.drawn)

    def begin(self, row: int, token: int, sampling: Sampling, drawn: int = 0) -> None:
        """Set the token that a row reads next, and how it chooses its tokens."""
        self.held.token[row] = token
        self.held.choices.set(row, sampling, drawn)

    @torch.no_grad()
    def put_from(self, row: int, given: ModelState, of: int, position: int) -> None:
        """Copy one stream out of a state of several streams into a row.

        of: the number of the stream in `given`. position: how many real tokens it has read.
        """
        held = self.held

        def copy(mine: Tensor, theirs: Tensor) -> Tensor:
            mine[row] = theirs[of] if theirs.dim() else theirs
            return mine

        for mine, theirs in zip(held.layers, given.layers, strict=True):
            if isinstance(mine.mechanism, HeldCache):
                mine.mechanism.put(row, theirs.mechanism, of, position)
            else:
                map_streams(copy, mine.mechanism, theirs.mechanism)
            map_streams(copy, mine.conv, theirs.conv)
        map_streams(copy, held.context, given.context)
        held.position[row], held.length[row] = position, given.length

    @torch.no_grad()
    def take(self, row: int) -> Stream:
        """A copy of a row as a stream of its own."""
        held = self.held
        position, length = int(held.position[row]), int(held.length[row])

        def own(mine: Tensor) -> Tensor:
            return mine[row : row + 1].clone()

        layers = []
        for block, layer in zip(self.model.backbone.blocks, held.layers, strict=True):
            inner, mine = block.attention.mechanism, layer.mechanism  # type: ignore[union-attr]
            if isinstance(mine, HeldCache):
                kept = mine.take(row, inner.keep(position))  # type: ignore[operator, union-attr]
            else:
                kept = _at(map_streams(own, mine), length)
            layers.append(LayerState(kept, length, map_streams(own, layer.conv)))
        context = map_streams(own, held.context)
        taken = ModelState(tuple(layers), own(held.position), length, context)
        return Stream(int(held.token[row]), taken, int(held.choices.drawn[row]))

    @torch.no_grad()
    def move(self, row: int, to: int) -> None:
        """Copy the stream of one row into another row."""

        def copy(mine: Tensor) -> Tensor:
            mine[to] = mine[row]
            return mine

        map_streams(copy, self.held)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of all streams by the mechanism that needs them; `conv`: short convolutions."""
        found: dict[str, int] = {}
        names = self.model.config.mechanisms
        for name, layer in zip(names, self.held.layers, strict=True):
            for what, part in ((name, layer.mechanism), ("conv", layer.conv)):
                if isinstance(part, HeldCache):
                    part = (part.k, part.v)  # layers share their positions
                if part is not None:
                    found[what] = found.get(what, 0) + sum(x.nbytes for x in _tensors(part))
        return found

    def _rows(self, count: int) -> "Step":
        """The step of the first rows."""
        if count not in self._steps:
            held = map_streams(lambda mine: mine[:count], self.held)
            self._steps[count] = Step(self.model, self._blocks, held)
        return self._steps[count]

    def _graph(self, count: int, plan: Plan) -> torch.cuda.CUDAGraph:
        """The graph of a step, recorded where there is none; the one used longest ago goes."""
        graph = self._graphs.pop((count, plan), None) or self._record(count, plan)
        self._graphs[count, plan] = graph
        if len(self._graphs) > GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _record(self, count: int, plan: Plan) -> torch.cuda.CUDAGraph:
        """The step as a graph. One step before it compiles kernels and sets libraries up, and is
        undone: its token of a cache will be written over by the step that comes next."""
        step = self._rows(count)
        kept = _changed(step.held)
        before = [tensor.clone() for tensor in kept]
        side, here = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            step(plan)
        here.wait_stream(side)
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
        del before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step(plan)
        return graph


class Step:
    """One token of streams in memory of a fixed size, from the last token to the next."""

    def __init__(
        self, model: LanguageModel | EncoderDecoder, blocks: list[PreparedBlock], held: Held
    ) -> None:
        self.model, self.held = model, held
        self.clock = Clock(held.position, held.length)
        self.norm, self.head = norm_of(model.backbone.norm), Linear.of(model.head.weight, None)
        last = is_own(model.head, TokenHead) and is_own(model.backbone.norm, nn.LayerNorm)
        self.own_head = last and not autocasts(model.head.weight)
        self.by_kernel = likeliest_serves(model.head.weight)
        layers = zip(blocks, held.layers, strict=True)
        self.blocks = [self._bound(block, layer) for block, layer in layers]

    def _bound(self, block: PreparedBlock, layer: LayerState) -> BlockStep:
        found = block.bind(layer, self.clock)
        if found is not None:
            return found
        vectors, mask = self.held.context or (None, None)

        def step(x: Tensor, added: Tensor | None) -> tuple[Tensor, None]:
            x = x if added is None else x + added
            out, _ = block.block.take_step(x[:, None], layer, vectors, context_mask=mask)
            return out[:, 0], None

        return step

    def __call__(self, plan: Plan) -> None:
        held, added = self.held, None
        self.clock.tick()
        x = self.model.backbone.embed(held.token, held.position)
        for block in self.blocks:
            x, added = block(x, added)
        if self.own_head:
            _, logits = normed_linear(x, added, self.norm, self.head)
        else:
            logits = self.model.head(self.model.backbone.norm(x if added is None else x + added))
        if self.by_kernel and plan == LIKELIEST:
            take_likeliest(
                logits, held.chosen, held.token, drawn=held.choices.drawn, length=held.length,
                position=held.position, room=held.room,
            )  # fmt: skip
            return
        chosen, ahead = choose(logits, held.choices, plan), held.chosen.shape[1]
        if ahead == 1:
            held.chosen.copy_(chosen[:, None])
        else:
            held.chosen.scatter_(1, (self.clock.length % ahead)[:, None], chosen[:, None])
        torch.clamp(chosen, min=0, out=held.token)
        for count in (held.choices.drawn, held.length, held.position):
            count.add_(1)
        if held.room is not None:
            held.position.clamp_(max=held.room - 1)


def records(model: LanguageModel | EncoderDecoder) -> bool:
    """Whether steps of a model are CUDA graphs: cross attention reads positions on the host."""
    return model.head.weight.device.type == "cuda" and not model.backbone.cross


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Where each parameter lies, and how often it was changed there, as optimisers do."""
    return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in model.parameters()]


@torch.no_grad()
def _held(
    model: LanguageModel | EncoderDecoder,
    count: int,
    most: int | None,
    context: Context | None,
    ahead: int,
) -> Held:
    backbone = model.backbone
    rooms = [most if backbone.keeps_tokens else None, backbone.limit]
    room = min((each for each in rooms if each is not None), default=None)
    position = torch.zeros(count, dtype=torch.int64, device=model.head.weight.device)
    length, token, chosen = position.clone(), position.clone(), position.new_zeros(count, ahead)
    layers = tuple(
        cast(Block, block).attention.held_state(count, room or 0, position, length)
        for block in backbone.blocks
    )
    choices = Choices.empty(count, position.device)
    return Held(layers, context, room, position, length, token, chosen, choices)


def _changed(held: Held) -> list[Tensor]:
    """All tensors that a step changes, but for caches."""
    counts = (held.position, held.length, held.token, held.chosen, held.choices)
    sums = [each.mechanism for each in held.layers if not isinstance(each.mechanism, HeldCache)]
    return _tensors(*counts, *sums, *(each.conv for each in held.layers))


def _tensors(*states: Any) -> list[Tensor]:
    """The tensors in states whose first dimension is the streams."""
    found: list[Tensor] = []

    def keep(mine: Tensor) -> Tensor:
        found.append(mine)
        return mine

    map_streams(keep, states)
    return found


def _at(state: Any, position: int) -> Any:
    """A state whose sums stand at a position, which prepared blocks count once for all layers."""
    if isinstance(state, State):
        return state._replace(position=torch.full_like(state.position, position))
    if isinstance(state, tuple):
        return type(state)(*(_at(part, position) for part in state))
    return state
