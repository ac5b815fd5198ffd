"""What all models share: embeddings, a stack of blocks, the state of a stream, a token head."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_tensor, check_whole
from cosformer.mechanisms import Mechanism, Seeded, Split, ranks, real_first, refuse
from cosformer.models.config import ModelConfig
from cosformer.models.token_loss import NOT_ASKED, TokenLoss
from cosformer.nn import AttentionLayer, Block, FeedForward, LayerState, sinusoids, sinusoids_from
from cosformer.runtime import readable, recomputed

EMBEDDING_STD = 0.02


class Context(NamedTuple):
    """Another sequence that a backbone looks at."""

    vectors: Tensor  # [B, S, width]
    key_mask: Tensor | None  # [B, S] bool, True = real token; None: all tokens are real


class ModelState(NamedTuple):
    """The state of a stream through a model."""

    layers: tuple[LayerState, ...]
    position: Tensor  # [B] int64: real tokens so far
    length: int  # tokens so far, padding included
    context: Context | None  # what an encoder-decoder looks at


class Backbone(nn.Module):
    """Tokens `[B, T]` to vectors `[B, T, width]`: embedding, positions, blocks, norm.

    `forward` and `stream` take vectors `[B, T, width]` in place of tokens, which are then not
    embedded, and a list `hidden`, to which they add the vectors `[B, T, width]` that go into the
    first block and those that come out of each block, before the last norm.

    A token behind `key_mask` is as if it were not there, wherever it stands: positions count real
    tokens. The vectors of masked tokens mean nothing.

    Args:
        causal: every token sees itself and those before it, and the backbone streams.
        cross: every block also looks at a context.
    """

    split: Split | None = None
    """The ranks of which each has a stretch of every sequence in `forward`, set by
    ``cosformer.distributed.split``."""
    recompute = False
    """Whether blocks compute again in the backward pass what they would keep for it: every forward
    pass of a block is made twice, and only its input is kept."""
    calls: Sequence[Callable[..., Tensor]] | None = None
    """What `forward` calls in place of the blocks, as compiled ones; None: the blocks."""

    def __init__(self, config: ModelConfig, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.schemes = config.position_schemes(causal=causal)
        learned = "learned" in self.schemes.values()
        count = config.max_length if learned else 0
        self.positions = nn.Embedding(count, config.width) if learned else None
        self.cls = nn.Parameter(torch.empty(config.width)) if config.pooling == "cls" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            _block(config, name, self.schemes[name], cross=cross) for name in config.mechanisms
        )
        self.cross = cross
        self.norm = nn.LayerNorm(config.width)
        self._check_mechanisms()
        self._initialise()

    @property
    def limit(self) -> int | None:
        """The most tokens that a sequence may have; None: any number."""
        return min(self._limits.values(), default=None)

    @property
    def limited_by(self) -> str:
        """The names of what sets `limit`, for an error; empty where there is none."""
        return " and ".join(name for name, limit in self._limits.items() if limit == self.limit)

    @property
    def streams(self) -> bool:
        """Whether all mechanisms stream."""
        return all(inner.traits.state != "none" for inner in self._mechanisms)

    @property
    def shifts(self) -> bool:
        """Whether a stream may begin with padding: where weights depend on no absolute position."""
        return not self.cross and all(self._shifts(block.attention) for block in self._stack)

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        context: Context | None = None,
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        """Vectors `[B, T, width]`; with cls pooling `[B, 1 + T, width]`, that of the cls first."""
        self.check_tokens("tokens", tokens, key_mask)
        start, length, order = 0, tokens.shape[1], None
        if self.split is not None:
            start, length = self.split.start(length), self.split.total(length)
            if key_mask is not None:
                self.split.check_padding(key_mask)
        elif key_mask is not None:
            order = real_first(key_mask)
        self._check_length(length)
        if key_mask is not None and order is not None:  # padding goes last, where it shifts none
            tokens, key_mask = _taken(tokens, order), key_mask.gather(1, order)
        x = self.embed(tokens, start)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), 1, -1), x], 1)
            if key_mask is not None:
                key_mask = torch.cat([torch.ones_like(key_mask[:, :1]), key_mask], 1)
            if order is not None:
                order = torch.cat([torch.zeros_like(order[:, :1]), order + 1], 1)
        if self.causal and all(inner.traits.causal == "exact" for inner in self._mechanisms):
            key_mask = None  # no real token sees what stands last, and softmax is faster unmasked
        vectors, context_mask = context or (None, None)
        masks = {"key_mask": key_mask, "context_mask": context_mask}
        x = _told(x, hidden, order)
        for block in self.calls or self._stack:
            call = functools.partial(block, causal=self.causal, **masks)
            if self.recompute:
                x = recomputed(call, x, vectors, draws=self._draws)
            else:
                x = call(x, vectors)
            x = _told(x, hidden, order)
        x = self.norm(x)
        return x if order is None else _taken(x, order.argsort(1))

    def empty_state(self, batch: int, context: Context | None = None) -> ModelState:
        """The state before the first token of so many streams, which look at a context if any."""
        layers = tuple(block.empty_state(batch) for block in self._stack)
        position = torch.zeros(batch, dtype=torch.int64, device=self.embedding.weight.device)
        return ModelState(layers, position, 0, context)

    @property
    def keeps_tokens(self) -> bool:
        """Whether a layer keeps all tokens of a stream, so that its memory grows with them."""
        return any(inner.traits.state == "cache" for inner in self._mechanisms)

    def stream(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        *,
        key_mask: Tensor | None = None,
        hidden: list[Tensor] | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Vectors of the next tokens `[B, T]` of a stream, and the state after them.

        A state of None begins a stream; the given state is not changed. key_mask `[B, T]`: padding
        may stand among the first tokens of a stream, but not behind them, and only where `shifts`.
        """
        self.check_tokens("tokens", tokens, key_mask)
        if state is None:
            state = self.empty_state(len(tokens))
        check_model_state(state, tokens, len(self.blocks))
        order = None
        if key_mask is not None:
            self._check_padding(key_mask, state.position)
            order = real_first(~key_mask)  # padding goes first, where a state is still empty
            tokens, key_mask = _taken(tokens, order), key_mask.gather(1, order)
        real = every_token(tokens) if key_mask is None else key_mask
        length = state.length + tokens.shape[1]
        self._check_length(length)
        x = self.embed(tokens, state.position[:, None] + ranks(real))
        vectors, context_mask = state.context or (None, None)
        layers, x = [], _told(x, hidden, order)
        for block, before in zip(self._stack, state.layers, strict=True):
            x, after = block.stream(
                x, before, vectors, key_mask=key_mask, context_mask=context_mask
            )
            layers.append(after)
            x = _told(x, hidden, order)
        x, position = self.norm(x), state.position + real.sum(1)
        x = x if order is None else _taken(x, order.argsort(1))
        return x, ModelState(tuple(layers), position, length, state.context)

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """The vector `[B, 1, width]` of one more token `[B, 1]`, and the state after it.

        For inference. The given state is used up: go on with the returned one. The tokens are
        those that a model has checked.
        """
        length = state.length + 1
        self._check_length(length)
        x = self.embed(tokens, state.position[:, None])
        vectors, context_mask = state.context or (None, None)
        layers = []
        for block, before in zip(self._stack, state.layers, strict=True):
            x, after = block.take_step(x, before, vectors, context_mask=context_mask)
            layers.append(after)
        return self.norm(x), ModelState(tuple(layers), state.position + 1, length, state.context)

    def check_step(self, tokens: Tensor, state: ModelState) -> None:
        """Check the arguments of `step`."""
        self.check_tokens("tokens", tokens, None)
        check_model_state(state, tokens, len(self.blocks))
        if tokens.shape[1] != 1:
            raise ValueError(
                f"tokens must be [batch, 1] in step, got {list(tokens.shape)}: use stream for more"
            )
        for block, layer in zip(self._stack, state.layers, strict=True):
            block.attention.check_state(layer, len(tokens))
        if torch.is_grad_enabled() and self.embedding.weight.requires_grad:
            raise ValueError("step records no gradients: use stream, or torch.no_grad() around it")

    def check_tokens(self, name: str, tokens: Tensor, key_mask: Tensor | None) -> None:
        """Check tokens or vectors, which the message calls `name`, and their mask."""
        check_tensor(name, tokens)
        width = self.config.width
        is_whole = tokens.dim() == 2 and tokens.dtype in (torch.int64, torch.int32)
        is_vectors = tokens.dim() == 3 and tokens.is_floating_point() and tokens.shape[2] == width
        if not is_whole and not is_vectors:
            raise ValueError(
                f"{name} must be int64 [batch, length], or vectors [batch, length, {width}], "
                f"got {tokens.dtype} {list(tokens.shape)}"
            )
        if key_mask is None:
            return
        check_tensor("key_mask", key_mask)
        if key_mask.shape != tokens.shape[:2] or key_mask.dtype != torch.bool:
            raise ValueError(
                f"key_mask must be bool {list(tokens.shape[:2])}, as {name} (True = real token), "
                f"got {key_mask.dtype} {list(key_mask.shape)}"
            )

    @property
    def _limits(self) -> dict[str, int]:
        """The most tokens by the name of what has such a limit."""
        found = {} if self.positions is None else {"learned positions": self.config.max_length}
        for name, block in zip(self.config.mechanisms, self._stack, strict=True):
            for layer in _attention_of(block):
                limit, what = layer.mechanism.traits.max_length, name
                if layer is not block.attention:
                    what = f"{self.config.across(name)[0]} in cross attention"
                if limit is not None:
                    found[what] = min(limit, found.get(what, limit))
        return found

    @property
    def _draws(self) -> bool:
        """Whether a forward pass draws random numbers, as one in training does with dropout."""
        return self.config.dropout > 0 or any(inner.traits.random for inner in self._mechanisms)

    @property
    def _mechanisms(self) -> list[Mechanism]:
        return [block.attention.mechanism for block in self._stack]

    @property
    def _stack(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def embed(self, tokens: Tensor, position: int | Tensor) -> Tensor:
        """Vectors of tokens that stand at these positions, before the first block.

        A number is the position of the first one, which the others follow.
        """
        try:
            x = tokens if tokens.is_floating_point() else self.embedding(tokens)
        except IndexError:  # torch has looked: a GPU, which asserts it, does not wait for this
            raise _unknown_token(tokens, self.config.vocabulary) from None
        if self.positions is not None:
            if not isinstance(position, Tensor):
                position = position + torch.arange(x.shape[1], device=x.device)
            x = x + self.positions(position)
        elif "sinusoidal" in self.schemes.values():
            scale = EMBEDDING_STD * math.sqrt(2)  # as large as the embeddings are at first
            if isinstance(position, Tensor):
                x = x + (scale * sinusoids(position, self.config.width)).to(x.dtype)
            else:
                x = x + sinusoids_from(position, x, scale)
        out: Tensor = self.dropout(x)
        return out

    def _check_length(self, length: int) -> None:
        learned = self.positions is not None
        if learned and length > self.config.max_length:
            raise ValueError(
                f"length must be at most max_length={self.config.max_length}, got {length}: "
                "learned positions end there"
            )

    def _shifts(self, layer: AttentionLayer) -> bool:
        """Whether a layer's output does not depend on where the first token stands."""
        traits = layer.mechanism.traits
        # Rotated pairs know their distance alone, unless features are made of each one first.
        turned = layer.positions is not None and traits.state not in ("cache", "window")
        return traits.mask and traits.positions != "absolute" and not turned

    def _check_padding(self, key_mask: Tensor, position: Tensor) -> None:
        """Check that padding of a stream stands among the first tokens of each row, not behind."""
        if not readable(key_mask) or bool(key_mask.all()):
            return
        if not self.shifts:
            scheme = f"mechanism={self.config.mechanism!r}, positions={self.config.positions!r}"
            raise ValueError(
                f"key_mask must be all True in a stream with {scheme}"
                f"{' and a context' if self.cross else ''}: padding would shift its positions"
            )
        late = (position > 0) & ~key_mask.all(1) | key_mask.any(1) & ~key_mask[:, -1]
        if bool(late.any()):
            raise ValueError(
                "key_mask must have padding among the first tokens of a stream alone, with a real "
                f"token behind it, got other padding in row {int(late.nonzero()[0])}"
            )

    def _check_mechanisms(self) -> None:
        """Refuse now what the first call would refuse."""
        for block in self._stack:
            inner, conv = block.attention.mechanism, block.attention.conv
            if self.causal and inner.traits.causal == "no":
                raise refuse(inner, "attend causally", lambda other: other.causal == "exact")
            if not self.causal and not inner.traits.full:
                raise refuse(inner, "attend without causal=True", lambda other: other.full)
            if conv is not None and not self.causal:
                conv.check_centred()
            across = None if block.cross is None else block.cross.mechanism
            if across is not None and not (across.traits.cross and across.traits.full):
                task = "attend from one sequence to another"
                raise refuse(across, task, lambda other: other.cross and other.full)

    def _initialise(self) -> None:
        """Draw projections by Xavier, and scale down those whose output is added to x.

        The more blocks, the smaller: the variance of x after all blocks does not depend on them.
        """
        for table in (self.embedding, self.positions):
            if table is not None:
                nn.init.normal_(table.weight, std=EMBEDDING_STD)
        if self.cls is not None:
            nn.init.normal_(self.cls, std=EMBEDDING_STD)
        for n, block in enumerate(self._stack):
            for layer in _attention_of(block):
                if isinstance(layer.mechanism, Seeded):
                    layer.mechanism.plant(layer.mechanism.seed + n)  # no two layers alike
            forward = cast(FeedForward, block.feed_forward)
            added = [block.attention.out_proj, forward.down]
            added += [] if block.cross is None else [block.cross.out_proj]
            inner = [forward.up] + ([] if forward.gate is None else [forward.gate])
            scale = (len(added) * self.config.layers) ** -0.5
            for linear in (*inner, *added):
                nn.init.xavier_normal_(linear.weight, gain=scale if linear in added else 1.0)
                nn.init.zeros_(linear.bias)


class TokenModel(nn.Module):
    """Tokens `[B, T]` to logits `[B, T, vocabulary]`: a backbone and a token head."""

    token_loss = TokenLoss()
    """What `summed_loss` calls with vectors, the head's weights and labels."""

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        if config.classifies:
            raise ValueError(f"kind must be one that gives tokens, got {config.kind!r}")
        self.config = config
        self.backbone = Backbone(config, causal=causal)
        self.head = TokenHead(config, self.backbone.embedding)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """key_mask `[B, T]` bool: True = real token; padding may stand anywhere."""
        logits: Tensor = self.head(self.backbone(tokens, key_mask))
        return logits

    def summed_loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        key_mask: Tensor | None = None,
        asked: int | None = None,
    ) -> Tensor:
        """Cross entropy of labels `[B, T]`, summed; those of -100 are not asked for.

        It never holds all logits at once: with a large vocabulary they would be most of the memory
        of training. `asked`: the most labels other than -100 that a sequence has; logits are then
        made for so many tokens of each sequence. None: logits are made for every token.
        """
        if asked is not None:
            check_whole("asked", asked, 1)
        check_tensor("labels", labels)
        if labels.shape != tokens.shape[:2] or labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64 {list(tokens.shape[:2])}, as tokens, "
                f"got {labels.dtype} {list(labels.shape)}"
            )
        x = self.backbone(tokens, key_mask)
        if asked is not None and asked < labels.shape[1]:
            found = (labels != NOT_ASKED).int().topk(asked, dim=1).indices  # those not asked last
            x, labels = x.take_along_dim(found[..., None], 1), labels.gather(1, found)
        return self.token_loss(x, self.head.weight, labels)


class TokenHead(nn.Module):
    """Vectors `[..., width]` to logits `[..., vocabulary]`, by the embedding itself if tied."""

    def __init__(self, config: ModelConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        if config.tied:
            self.weight = embedding.weight
        else:
            self.weight = nn.Parameter(embedding.weight.detach().clone())
            nn.init.normal_(self.weight, std=EMBEDDING_STD)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def every_token(tokens: Tensor) -> Tensor:
    """The mask `[B, T]` by which all tokens `[B, T]`, or vectors `[B, T, width]`, are real."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def check_model_state(state: ModelState, tokens: Tensor, layers: int) -> None:
    """Check that a state is one of so many layers, for as many streams as tokens `[B, T]` have."""
    if not isinstance(state, ModelState):
        raise TypeError(f"state must be a ModelState, got {type(state).__name__}")
    if len(state.layers) != layers:
        raise ValueError(f"state must be of {layers} layers, got {len(state.layers)}")
    if len(state.position) != len(tokens):
        raise ValueError(
            f"state must be of {len(tokens)} streams, the batch of tokens, "
            f"got {len(state.position)}"
        )


def _told(x: Tensor, hidden: list[Tensor] | None, order: Tensor | None = None) -> Tensor:
    """x itself, after appending it to the list `hidden`, if there is one.

    In the list, tokens stand as they did before they were taken in `order`. What is returned is
    computed from the tensor in the list, so that a loss has a gradient with respect to that one.
    """
    if hidden is None:
        return x
    hidden.append(x if order is None else _taken(x, order.argsort(1)))
    return x if order is None else _taken(hidden[-1], order)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Tokens `[B, T]`, or vectors `[B, T, width]`, in an order `[B, T]`."""
    return x.gather(1, order if x.dim() == 2 else order[..., None].expand_as(x))


def _unknown_token(tokens: Tensor, vocabulary: int) -> ValueError:
    """The error that names the first token outside of the vocabulary."""
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
    rule = f"tokens must be at least 0 and below the vocabulary of {vocabulary:,}"
    return ValueError(f"{rule}, got {wrong}")


def _block(config: ModelConfig, mechanism: str, scheme: str, *, cross: bool) -> Block:
    def attention(mechanism: str, options: Mapping[str, Any], **given: Any) -> AttentionLayer:
        return AttentionLayer(
            config.width,
            config.heads,
            mechanism=mechanism,
            options=options,
            num_kv_heads=config.key_heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            gate=config.gate,
            norm=config.norm,
            qk_norm=config.qk_norm,
            **given,
        )

    positions = "rotary" if scheme == "rotary" else "none"
    return Block(
        attention(
            mechanism,
            config.mechanism_options[mechanism],
            positions=positions,
            conv=config.conv,
            conv_on=config.conv_on,
        ),
        FeedForward(config.width, config.feed_forward_width, glu=config.glu),
        attention(*config.across(mechanism)) if cross else None,
        dropout=config.dropout,
    )


def _attention_of(block: Block) -> list[AttentionLayer]:
    return [layer for layer in (block.attention, block.cross) if layer is not None]
