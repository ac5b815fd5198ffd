"""The interface of every mechanism: q, k, v to values, under one set of arguments."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypeVar

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
from cosformer.mechanisms.cache import Cache
from cosformer.mechanisms.refusal import name_of, refuse
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.runtime import full_precision

NO_CONTROLS: Mapping[str, Tensor] = {}
Counted = TypeVar("Counted")


class Request(NamedTuple):
    """How to attend, checked: what `attend` and `weights` of a mechanism receive."""

    causal: bool
    key_mask: Tensor | None  # [B, S] bool, True = real token; k, v and controls are 0 elsewhere
    start: int  # the key index that the first query stands at
    controls: Mapping[str, Tensor]  # name -> [B, H_kv, S], before any activation


def _of_a_length(count: Callable[[Any, int], Counted]) -> Callable[[Any, int], Counted]:
    """A method that counts something of so many tokens, and refuses what is no length."""

    @wraps(count)
    def checked(self: Any, length: int) -> Counted:
        return count(self, check_whole("length", length, 0))

    return checked


class Mechanism(nn.Module):
    """Maps q, k, v to values. A subclass has `traits`, `attend`, `dense` and `cost`.

    `attend(q, k, v, request) -> out` computes, `dense(q, k, request)` is the matrix A with
    out = A v. What streams with a cache or a window needs no more than `keep`; what has a constant
    state also has `empty_state`, `advance` and `state_size`.
    """

    traits: Traits  # of the class; an instance whose options change them has its own
    source: ClassVar[str]
    """Who published it."""
    length_hint: ClassVar[str] = "make it with a larger max_length"
    stream_option: ClassVar[str] = ""
    """What a stream needs a number for."""
    formula: ClassVar[str]
    """What it computes, in one line or a few."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name in ("cost", "state_size"):
            if name in vars(cls):
                setattr(cls, name, _of_a_length(vars(cls)[name]))

    def __init__(self, heads: int, width: int, *, key_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.value_width = width  # for `state_size`: a layer may have values of another
        self.key_heads = heads if key_heads is None else key_heads
        for name, size in (("heads", heads), ("width", width), ("key_heads", self.key_heads)):
            check_whole(name, size, 1)
        if heads % self.key_heads:
            raise ValueError(f"key_heads must divide heads={heads}, got {key_heads}")

    def set_max_length(self, max_length: int) -> None:
        """An option of those whose parameters have a place for every position."""
        self.traits = replace(self.traits, max_length=check_whole("max_length", max_length, 1))

    def set_block(self, block: int) -> None:
        """An option of those that compute in blocks."""
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
        controls: Mapping[str, Tensor] = NO_CONTROLS,
    ) -> tuple[Tensor, Any]:
        """Output `[B, H, T, V]` in the dtype of q, and the new state where one came in.

        Args:
            q, k, v: `[B, H, T, D]`, `[B, H_kv, S, D]`, `[B, H_kv, S, V]`.
            causal: a query sees keys at its own index and before.
            key_mask: `[B, S]` bool, True = real token.
            start: the key index that the first query stands at. None: the queries end with the
                keys if causal, and begin with them if not.
            state: from `empty_state` or the last call: these are the next tokens of a stream.
            controls: the `traits.controls`, each `[B, H_kv, S]`.
        """
        q, k, v = check_inputs(q, k, v)
        if state is None:
            request = self._request(q, k, causal, key_mask, start, controls)
            k, v = hide(k, key_mask), hide(v, key_mask)
            with full_precision(q):  # autocast has cast q, k and v, and shall round no more
                return self.attend(q, k, v, request), None
        if self.traits.state == "none":
            raise refuse(self, "stream", lambda traits: traits.state != "none")
        if not causal:
            raise ValueError(f"causal must be True with a state, got {causal}")
        if start is not None:
            raise ValueError(f"start must be None with a state, which knows it, got {start}")
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"a stream needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
            )
        request = self._request(q, k, True, key_mask, None, controls)
        k, v = hide(k, key_mask), hide(v, key_mask)
        with full_precision(q):
            return self.advance(q, k, v, state, request)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        start: int | None = None,
        controls: Mapping[str, Tensor] = NO_CONTROLS,
    ) -> Tensor:
        """The dense matrix A `[B, H, T, S]` with out = A v; quadratic, for tests and pictures."""
        q, k, _ = check_inputs(q, k, k)
        request = self._request(q, k, causal, key_mask, start, controls)
        with full_precision(q):
            return self.dense(q, hide(k, key_mask), request)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        raise NotImplementedError

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        raise NotImplementedError

    def cost(self, length: int) -> Cost:
        """Of a forward pass over one sequence, with values as wide as keys."""
        raise NotImplementedError

    def empty_state(self, k: Tensor, v: Tensor) -> Any:
        """The state before the first of tokens such as these `[B, H_kv, ·, ·]`."""
        if self.traits.state == "none":
            raise refuse(self, "stream", lambda traits: traits.state != "none")
        return Cache(k[:, :, :0], v[:, :, :0], None, 0)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, Any]:
        """The next tokens of a stream; here, of one that keeps its tokens."""
        if not isinstance(state, Cache):
            raise TypeError(f"state must be a Cache, got {type(state).__name__}")
        held, kept = state.k.shape[2], self.keep(state.position)
        if held < kept or (held > kept and state.key_mask is None):  # of one that forgets others
            raise ValueError(
                f"state must hold {kept} of {state.position} tokens for {name_of(self)}, got {held}"
            )
        self._check_length(state.position + k.shape[2])
        grown = state.append(k, v, request.key_mask)
        seen = request._replace(key_mask=grown.key_mask, start=state.k.shape[2])
        out = self.attend(q, grown.k, grown.v, seen)
        return out, self.forget(grown)

    def forget(self, cache: Cache) -> Cache:
        """What of the tokens so far a stream still needs."""
        return cache.last(self.keep(cache.position))

    def keep(self, position: int) -> int:
        """How many of the last tokens a stream still needs after so many."""
        return position

    @_of_a_length
    def state_size(self, length: int) -> int:
        """Numbers that one stream remembers after so many tokens."""
        if self.traits.state == "none":
            raise refuse(self, "stream", lambda traits: traits.state != "none")
        return self.key_heads * (self.width + self.value_width) * self.keep(length)

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
        controls: Mapping[str, Tensor],
    ) -> Request:
        """Refuse what the traits do not have."""
        traits = self.traits
        check_bool("causal", causal)
        check_key_mask(key_mask, k)
        if start is not None and (isinstance(start, bool) or not isinstance(start, int)):
            raise ValueError(f"start must be a whole number, got {start!r}")
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
        self._check_length(max(q.shape[2], k.shape[2]))
        check_mapping("controls", controls)
        if set(controls) != set(traits.controls):
            raise ValueError(
                f"controls must be {', '.join(traits.controls) or 'none'}, "
                f"got {', '.join(controls) or 'none'}"
            )
        for name, control in controls.items():
            check_tensor(name, control)
            if not control.dtype.is_floating_point:
                raise ValueError(f"{name} must be real numbers, got {control.dtype}")
            if control.device != k.device:
                raise ValueError(
                    f"{name} must be on the device of k, {k.device}, got {control.device}"
                )
            if control.shape != k.shape[:3]:
                raise ValueError(
                    f"{name} must be [batch, key heads, length] = {list(k.shape[:3])}, "
                    f"got {list(control.shape)}"
                )
        if start is None:
            start = k.shape[2] - q.shape[2] if causal else 0
        shown = {name: hide(control, key_mask) for name, control in controls.items()}
        return Request(causal, key_mask, start, shown)

    def _check_length(self, length: int) -> None:
        limit = self.traits.max_length
        if limit is not None and length > limit:
            raise refuse(
                self,
                f"attend over {length} tokens",
                lambda other: (other.max_length or length) >= length,
                self.length_hint,
            )


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros at masked tokens of `[B, H, S, …]`, whatever stood there: 0 · NaN would be NaN."""
    if key_mask is None:
        return x
    return x.masked_fill(~key_mask.view(x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3)), 0)


def repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    """A key head for every query head."""
    groups = q.shape[1] // k.shape[1]
    return k if groups == 1 else k.repeat_interleave(groups, 1)


def seen(request: Request, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys a query may see by causality and mask, bool `[B or 1, 1, T, S]`; None for all."""
    found = None if request.key_mask is None else request.key_mask[:, None, None, :]
    if not request.causal or request.start >= keys - 1:  # the first query sees every key
        return found
    i = torch.arange(queries, device=device)[:, None] + request.start
    past = (torch.arange(keys, device=device) <= i)[None, None]
    return past if found is None else past & found
