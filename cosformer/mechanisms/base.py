"""The interface of every mechanism: q, k, v to values, under one set of arguments."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from cosformer.check import (
    check_bool,
    check_index,
    check_inputs,
    check_key_mask,
    check_mapping,
    check_tensor,
    check_whole,
)
from cosformer.mechanisms.cache import Cache, HeldCache, with_positions
from cosformer.mechanisms.request import NO_CONTROLS, Controls, Request, Split, hide
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.ops import After, Clock, Layout
from cosformer.runtime import full_precision

Counted = TypeVar("Counted")


def _of_a_length(count: Callable[[Any, int], Counted]) -> Callable[[Any, int], Counted]:
    """A method of a length, which now raises for anything but a whole number from 0 on."""

    @wraps(count)
    def checked(self: Any, length: int) -> Counted:
        return count(self, check_whole("length", length, 0))

    return checked


FASTER = {
    "step": ("advance",),
    "attend_held": ("attend",),
    "attend_split": ("attend",),
    "prepared": ("attend", "advance", "step", "queries", "keys", "share", "weight"),
}
"""A method that is faster than `Mechanism`'s own -> the methods whose results it must have. A
subclass that changes one of these, but not the faster method, gets `Mechanism`'s own back."""


class Mechanism(nn.Module):
    """Maps q, k, v to values. A subclass has `traits`, `attend`, `dense` and `cost`.

    `attend(q, k, v, request) -> out` computes, `dense(q, k, request)` is the matrix A with
    out = A v. A mechanism that streams with a cache or a window also has `keep`, and where not all
    that is kept is seen `seen_held`. One with a state of constant size also has `state_type`,
    `empty_state`, `check_state`, `advance`, `step` and `state_size`.
    """

    traits: Traits  # of the class; an instance whose options change them has its own
    source: ClassVar[str]
    """Who published it."""
    formula: ClassVar[str]
    """What it computes, in one line or a few."""
    length_hint: ClassVar[str] = "make it with a larger max_length"
    """What an error about a sequence that is too long advises."""
    stream_option: ClassVar[str] = ""
    """The option that must be a number before the mechanism can stream."""
    cross_form: ClassVar[str] = ""
    """The mechanism that an encoder-decoder of this one has for its cross attention, with the same
    options but for `decay`. The empty name: this mechanism, with all options."""
    state_type: ClassVar[type] = Cache
    """The class of its states; a state remembers in `owner` the class of its mechanism."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name in ("cost", "state_size"):
            if name in vars(cls):
                setattr(cls, name, _of_a_length(vars(cls)[name]))
        for name, others in FASTER.items():
            if any(_made_in(cls, other) < _made_in(cls, name) for other in others):
                setattr(cls, name, getattr(Mechanism, name))

    def __init__(self, heads: int, width: int, *, key_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.value_width = width  # for `state_size`: a layer may have values of another width
        self.key_heads = heads if key_heads is None else key_heads
        self._recurrences: dict[torch.device, Any] = {}  # what a step computes, made when needed
        for name, size in (("heads", heads), ("width", width), ("key_heads", self.key_heads)):
            check_whole(name, size, 1)
        if heads % self.key_heads:
            raise ValueError(f"key_heads must divide heads={heads}, got {key_heads}")

    def set_max_length(self, max_length: int) -> None:
        """Set the option of mechanisms whose parameters have a row for every position."""
        self.traits = replace(self.traits, max_length=check_whole("max_length", max_length, 1))

    def set_block(self, block: int) -> None:
        """Set the option of mechanisms that compute in blocks."""
        self.block = check_whole("block", block, 1)
        self.traits = replace(self.traits, multiple_of=block)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        start: int | None = None,
        state: Any = None,
        controls: Controls = NO_CONTROLS,
        split: Split | None = None,
    ) -> tuple[Tensor, Any]:
        """Output `[B, H, T, V]` in the dtype of q, and the new state where one came in.

        Args:
            q, k, v: `[B, H, T, D]`, `[B, H_kv, S, D]`, `[B, H_kv, S, V]`.
            causal: a query sees keys at its own index and before.
            key_mask: `[B, S]` bool, True = real token.
            start: the key index that the first query stands at. None: the queries end with the
                keys if causal, and begin with them if not.
            state: from `empty_state` or the last call: these are the next tokens of a stream. The
                state is not changed.
            controls: the `traits.controls`, each `[B, H_kv, S]`.
            split: the ranks of which each has a stretch of every sequence, without a state.
        """
        q, k, v = check_inputs(q, k, v)
        if state is None:
            request = self._request(q, k, causal, key_mask, start, controls)
            k, v = hide(k, key_mask), hide(v, key_mask)
            with full_precision(q):  # autocast has cast q, k and v, and shall round no more
                if split is None:
                    return self.attend(q, k, v, request), None
                self.check_length(split.total(q.shape[2]))
                return self.attend_split(q, k, v, request, split), None
        self._check_streams()
        if not causal:
            raise ValueError(f"causal must be True with a state, got {causal}")
        if start is not None:
            raise ValueError(f"start must be None with a state, which knows it, got {start}")
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"a stream needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
            )
        request = self._request(q, k, True, key_mask, None, controls)
        self.check_state(state, k, v)
        self.check_position(state, k.shape[2])
        if q.shape[2] == 1 and key_mask is None and not torch.is_grad_enabled():
            return self.step(q, k, v, _copied(state), controls=request.controls)
        k, v = hide(k, key_mask), hide(v, key_mask)
        with full_precision(q):
            return self.advance(q, k, v, state, request)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, controls: Controls = NO_CONTROLS
    ) -> tuple[Tensor, Any]:
        """One token of a stream: output `[B, H, 1, V]` and the state after it.

        For callers that have checked their arguments; without a gradient. The state is used up:
        its tensors may be changed in place, and the caller goes on with the state it gets back.

        Args:
            q, k, v: `[B, H, 1, D]`, `[B, H_kv, 1, D]`, `[B, H_kv, 1, V]`.
            state: from `empty_state`, `forward` or the last step.
            controls: the `traits.controls`, each `[B, H_kv, 1]`.
        """
        with full_precision(q):
            if isinstance(state, HeldCache):
                state.write(k, v)  # in the dtype of the weights, where autocast rounds q, k and v
                return self.attend_held(q.to(state.k.dtype), state).to(q.dtype), state
            return self.advance(q, k, v, state, Request(True, None, 0, controls))

    def held_state(self, k: Tensor, v: Tensor, length: int, position: Tensor) -> Any:
        """The state before the first token in memory of a fixed size, which `step` alone changes.

        Args:
            k, v: `[B, H_kv, 0, ·]`, tokens such as will come.
            length: the most tokens of a stream, for a mechanism that keeps all of them.
            position: `[B]` int64, how many tokens each stream has had; the caller moves it on.
        """
        empty = self.empty_state(k, v)
        if not isinstance(empty, Cache):
            return with_positions(empty, k.shape[0])
        kind, base = type(self), Mechanism
        simple = self.traits.positions == "none" and kind.keep is base.keep
        if not simple and kind.attend_held is base.attend_held and kind.seen_held is base.seen_held:
            raise ValueError(
                f"{name_of(self)} cannot generate: it must have seen_held, or attend_held, to say "
                "what the newest token sees of its cache"
            )
        length = self.held_length(length)
        k, v = (x.new_zeros(*x.shape[:2], length, x.shape[3]) for x in (empty.k, empty.v))
        return HeldCache(k, v, position, self.owner)

    def held_length(self, length: int) -> int:
        """How many tokens `held_state` keeps of a stream of at most `length` tokens."""
        return length

    def prepared(
        self, state: Any, layout: Layout, after: After, clock: Clock, base: float | None
    ) -> Callable[[Tensor], Tensor] | None:
        """A step from a layer's projections to its heads, which changes such a state in place.

        None where there is none: the layer then goes through `step`.

        Args:
            state: from `held_state`.
            layout: where the numbers of a token lie in a row of projections.
            after: norm and gate of the heads.
            clock: what all layers of a step share.
            base: of rotary positions, which the layer has; None: it has no positions.
        """
        return None

    def attend_held(self, q: Tensor, state: HeldCache) -> Tensor:
        """Output `[B, H, 1, V]` of the newest token of every stream, which the state holds."""
        return self.attend(q, state.k, state.v, Request(False, self.seen_held(state), 0, {}))

    def seen_held(self, state: HeldCache) -> Tensor:
        """Which entries the newest token of every stream sees, bool `[B, length]`."""
        return state.entries() <= state.position[:, None]

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        start: int | None = None,
        controls: Controls = NO_CONTROLS,
    ) -> Tensor:
        """The dense matrix A `[B, H, T, S]` with out = A v; quadratic, for tests and pictures."""
        q, k, _ = check_inputs(q, k, k)
        request = self._request(q, k, causal, key_mask, start, controls)
        with full_precision(q):
            return self.dense(q, hide(k, key_mask), request)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        """Output `[B, H, T, V]` of a whole sequence."""
        raise NotImplementedError

    @property
    def splits(self) -> bool:
        """Whether the mechanism attends over ranks, of which each has a stretch of a sequence."""
        return type(self).attend_split is not Mechanism.attend_split

    @property
    def queries_later(self) -> bool:
        """Whether `attend_split` does no more with queries than hand them to the split's attention.

        A layer then makes them while other ranks are told of its keys; before that, q is a tensor
        of their shape without numbers.
        """
        return False

    def attend_split(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, split: Split
    ) -> Tensor:
        """Output `[B, H, T, V]` of the tokens of this rank, which has a stretch of a sequence."""
        raise self.unsplit_error()

    def unsplit_error(self) -> ValueError:
        """The error of a mechanism that does not attend over ranks."""
        return ValueError(
            f"{name_of(self)} cannot attend over ranks: it is not built for them. cosFormer "
            "and most of the linear family can, and softmax by gathering all keys and values"
        )

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        """The matrix A `[B, H, T, S]` with out = A v."""
        raise NotImplementedError

    def cost(self, length: int) -> Cost:
        """What a forward pass over one sequence costs, with values as wide as keys."""
        raise NotImplementedError

    def numbers(self, length: int) -> int:
        """How many numbers q, k, v and the output of a sequence hold, for `cost`."""
        return 2 * (self.heads + self.key_heads) * length * self.width

    def cost_of_pairs(self, length: int, pairs: int) -> Cost:
        """What softmax over so many pairs of each head costs, with no score stored."""
        return Cost(self.heads * pairs * (4 * self.width + 5), 4 * self.numbers(length))

    def empty_state(self, k: Tensor, v: Tensor) -> Any:
        """The state before the first token, for tokens such as these `[B, H_kv, ·, ·]`."""
        self._check_streams()
        return Cache(k[:, :, :0], v[:, :, :0], None, 0, self.owner)

    @property
    def owner(self) -> str:
        """What the states of this mechanism remember of it."""
        return type(self).__name__

    def check_state(self, state: Any, k: Tensor, v: Tensor) -> None:
        """Refuse a state that is not this mechanism's, or not for tokens such as these."""
        kind = self.state_type
        if not isinstance(state, kind):
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise TypeError(f"state must be {article} {kind.__name__}, got {type(state).__name__}")
        of = getattr(state, "owner", self.owner)
        if of != self.owner:
            raise ValueError(f"state must be one of {self.owner}, got one of {of}")
        if isinstance(state, Cache):
            state.check_tokens(k, v)
            held, kept = state.k.shape[2], self.keep(state.position)
            if held < kept or (held > kept and state.key_mask is None):
                raise ValueError(
                    f"state must hold {kept} of {state.position} tokens for {name_of(self)}, "
                    f"got {held}"
                )

    def check_position(self, state: Any, tokens: int) -> None:
        """Refuse more tokens than a stream may have, where its state counts its tokens."""

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, Any]:
        """Output and state after the next tokens of a stream that keeps its tokens."""
        self.check_length(state.position + k.shape[2])
        grown = state.append(k, v, request.key_mask)
        longer = request._replace(key_mask=grown.key_mask, start=state.k.shape[2])
        return self.attend(q, grown.k, grown.v, longer), self.forget(grown)

    def forget(self, cache: Cache) -> Cache:
        """The part of the tokens so far that a stream still needs."""
        return cache.last(self.keep(cache.position))

    def keep(self, position: int) -> int:
        """How many of the last tokens a stream still needs after `position` tokens."""
        return position

    @_of_a_length
    def state_size(self, length: int) -> int:
        """How many numbers one stream remembers after so many tokens."""
        self._check_streams()
        return self.key_heads * (self.width + self.value_width) * self.keep(length)

    def control_bias(self, name: str) -> Tensor | None:
        """What a control should be at first, `[H_kv]`; None: what the layer's projection draws.

        A layer projects a control from its input. With a bias from here, the weights of the
        projection begin at 0, so that the control is at first the same for every token.
        """
        return None

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the random numbers anew; None stands for torch's own generator."""
        raise refuse(self, "redraw: nothing in it is random", lambda traits: traits.random)

    def _request(
        self,
        q: Tensor,
        k: Tensor,
        causal: bool,
        key_mask: Tensor | None,
        start: int | None,
        controls: Controls,
    ) -> Request:
        """The checked request; what the traits do not have is refused."""
        traits = self.traits
        check_bool("causal", causal)
        check_key_mask(key_mask, k)
        if start is not None and (isinstance(start, bool) or not isinstance(start, int)):
            raise TypeError(f"start must be an int, got {type(start).__name__}")
        check_index("start", start)
        for name, x, heads in (("q", q, self.heads), ("k", k, self.key_heads)):
            if x.shape[1] != heads or x.shape[3] != self.width:
                raise ValueError(
                    f"{name} must have {heads} heads of width {self.width}, as the mechanism "
                    f"was made for, got {list(x.shape)}"
                )
        if causal and traits.causal == "no":
            raise refuse(self, "attend causally", lambda other: other.causal == "exact")
        if not causal and not traits.full:
            raise refuse(self, "attend without causal=True", lambda other: other.full)
        if (q.shape[2] != k.shape[2] or start not in (None, 0)) and not traits.cross:
            task = f"attend from {q.shape[2]} queries to {k.shape[2]} keys"
            raise refuse(self, task, lambda other: other.cross)
        if key_mask is not None and not traits.mask:
            raise refuse(self, "obey a key_mask", lambda other: other.mask)
        self.check_length(max(q.shape[2], k.shape[2]))
        check_mapping("controls", controls)
        if set(controls) != set(traits.controls):
            raise ValueError(
                f"controls must be {', '.join(traits.controls) or 'none'}, "
                f"got {', '.join(controls) or 'none'}"
            )
        for name, control in controls.items():
            _check_control(name, control, k)
        if start is None:
            start = k.shape[2] - q.shape[2] if causal else 0
        shown = {name: hide(control, key_mask) for name, control in controls.items()}
        return Request(causal, key_mask, start, shown)

    def _check_streams(self) -> None:
        if self.traits.state == "none":
            raise refuse(self, "stream", lambda traits: traits.state != "none")

    def check_length(self, length: int) -> None:
        """Refuse more tokens than the mechanism is made for."""
        limit = self.traits.max_length
        if limit is not None and length > limit:
            task, hint = f"attend over {length} tokens", self.length_hint
            raise refuse(self, task, lambda other: (other.max_length or length) >= length, hint)


MECHANISMS: dict[str, type[Mechanism]] = {}
"""Every mechanism by its name. `table.py` fills it, `register` adds to it."""


def refuse(
    mechanism: Mechanism, task: str, able: Callable[[Traits], bool], hint: str = ""
) -> ValueError:
    """An error that says who refuses, what it can do, and who could do the task instead.

    `raise refuse(self, "attend causally", lambda traits: traits.causal == "exact")`
    """
    other = nearest(mechanism, able)
    remedies = [hint] if hint else []
    if other is not None:
        option = MECHANISMS[other].stream_option if task == "stream" else ""
        made_with = f", made with {option}=…" if option else ""
        remedies += [f"the nearest that can is {other!r}{made_with}"]
    return ValueError(
        f"{name_of(mechanism)} cannot {task}. It can do: "
        + "; ".join([mechanism.traits.abilities, *remedies])
    )


def nearest(mechanism: Mechanism, able: Callable[[Traits], bool]) -> str | None:
    """The name of the most similar mechanism that is able to do something.

    The most similar one loses the fewest abilities, then shares the most base classes, then grows
    in the same way with the length.
    """
    mine, bases = mechanism.traits, set(type(mechanism).__mro__)

    def distance(name: str) -> tuple[int | bool, ...]:
        kind = MECHANISMS[name]
        theirs = kind.traits
        lost = sum(a and not b for a, b in zip(_abilities(mine), _abilities(theirs), strict=True))
        shared = len(bases & set(kind.__mro__))
        cost, norm = theirs.growth != mine.growth, theirs.norm_after != mine.norm_after
        return lost, -shared, cost, norm, len(theirs.controls)

    others = (name for name, kind in MECHANISMS.items() if kind is not type(mechanism))
    return min((x for x in others if able(MECHANISMS[x].traits)), key=distance, default=None)


def name_of(mechanism: Mechanism) -> str:
    """The name in `MECHANISMS`; the name of the class for a mechanism that is not there."""
    kind = type(mechanism)
    return next((name for name, other in MECHANISMS.items() if other is kind), kind.__name__)


def _made_in(kind: type, name: str) -> float:
    """How many classes stand between this one and the one that has its method."""
    found = (n for n, each in enumerate(kind.__mro__) if name in vars(each))
    return next(found, math.inf)


def _abilities(traits: Traits) -> tuple[bool, ...]:
    streams = traits.state != "none"
    return traits.causal != "no", traits.full, traits.cross, traits.mask, streams


def _check_control(name: str, control: Any, k: Tensor) -> None:
    check_tensor(name, control)
    if not control.dtype.is_floating_point:
        raise ValueError(f"{name} must be real numbers, got {control.dtype}")
    if control.device != k.device:
        raise ValueError(f"{name} must be on the device of k, {k.device}, got {control.device}")
    if control.shape != k.shape[:3]:
        raise ValueError(
            f"{name} must be [batch, key heads, length] = {list(k.shape[:3])}, "
            f"got {list(control.shape)}"
        )


def _copied(state: Any) -> Any:
    """A state that a step may change: sums are copied; a cache is not, as a step appends to it."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, tuple) and not isinstance(state, Cache):
        return type(state)(*map(_copied, state))  # a NamedTuple
    return state
