"""Both passes by kernels, Triton's or Hopper's: states for every head, and the decay's gradient.

Inside a graph, a transform or a mode the kernels are two operators of torch,
`cosformer::kernels_forward` and `cosformer::kernels_backward`; an eager call goes past them, since
an operator costs 20 µs.
"""

from collections.abc import Container
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cosformer.ops import hopper, triton
from cosformer.ops.autograd.gates import gradient_of_gates, with_sums
from cosformer.ops.problem import (
    Asked,
    Constants,
    Given,
    Gradients,
    Grads,
    Options,
    Results,
    Swept,
    decay_gradient,
    for_each_query_head,
    into_first_of_group,
    least_gate,
    of_first_in_group,
    room_for_outputs,
    summed_over_groups,
)
from cosformer.runtime import eager, kernels_serve


def maps(impl: str) -> Container[str]:
    """The feature maps that the kernels know; of `kernels` all must know them."""
    return hopper.MAPS if impl == "hopper" else triton.MAPS


def forward(given: Given) -> Results:
    """Output, row totals, the last state of the key heads, and what is kept for backward."""
    groups = given.q.shape[1] // given.k.shape[1]
    spread = _spread(given, groups)
    if eager(given.q, given.k, given.v):
        results = _room(given).forward(spread)
    else:
        results = Results(*kernels_forward(*_flat(spread)))
        if not given.options.keep_state:  # else a graph would make zeros for its gradient
            results = results._replace(last=None)
    last = None if results.last is None else of_first_in_group(results.last, groups)
    return results._replace(last=last)


def backward(given: Given, results: Results, grads: Grads, asked: Asked) -> Gradients:
    """The gradients that are asked for."""
    groups = given.q.shape[1] // given.k.shape[1]
    spread, state = _spread(given, groups), given.state
    end = None if grads.last is None else into_first_of_group(grads.last, groups)
    of_out = torch.zeros_like(results.out) if grads.out is None else grads.out
    incoming = Grads(of_out, None, end)
    # the gradient of a state tells what that of the decay sums to
    needed = asked._replace(state=asked.state or (asked.decay and state is not None))
    if eager(given.q, given.k, of_out):
        room = _room(given)
        sweep = hopper.backward_with_decay if room is hopper else room.backward
        swept = sweep(spread, results, incoming, needed)
    else:
        about = (results.out, results.total, of_out, end, list(needed))
        swept = Swept(*kernels_backward(*_flat(spread), *about))
    grad_decay = swept.decay
    if asked.decay and grad_decay is None:
        grad_decay = gradient_of_decay(spread, results, end, swept, groups)
    back = None
    if asked.state and state is not None and swept.state is not None:
        back = summed_over_groups(swept.state, groups).to(state.dtype)
    return Gradients(
        swept.q if asked.q else None,
        swept.k if asked.k else None,
        swept.v if asked.v else None,
        grad_decay,
        back,
    )


def gradient_of_decay(
    given: Given, results: Results, end: Tensor | None, swept: Swept, groups: int
) -> Tensor:
    """The gradient dL from the results of the sweeps; `end` is the gradient of the last state."""
    by_query, by_key, decay = swept.by_query, swept.by_key, given.decay
    assert by_query is not None
    assert by_key is not None
    assert decay is not None
    alone = given.state is None and end is None and not given.options.gated
    if alone and kernels_serve(by_query) and by_query.shape[:3] == decay.shape:
        return triton.balanced_decay_gradient(by_query, by_key, decay)
    at_end = None
    if end is not None and results.last is not None:
        at_end = end * for_each_query_head(results.last, groups)
    at_start = by_key.new_zeros(by_key.shape[:2])
    if given.state is not None and swept.state is not None:
        at_start = (given.state * swept.state).sum((-3, -2, -1))
    if given.options.gated:
        of_sums = decay_gradient(by_query, by_key, at_end, decay.double(), at_start)
        return gradient_of_gates(of_sums, decay, least_gate(given.q.dtype))
    return decay_gradient(by_query, by_key, at_end, decay, at_start)


def _spread(given: Given, groups: int) -> Given:
    """The problem with a state for every query head instead of every key head."""
    if given.state is None:
        return given
    return given._replace(state=for_each_query_head(given.state.float(), groups))


def _room(given: Given) -> ModuleType:
    """The room that computes the problem; `kernels` means hopper where it serves, else triton."""
    if given.options.impl == "hopper":
        return hopper
    if given.options.impl == "kernels" and hopper.why_not_given(given) is None:
        return hopper
    return triton


ARRAYS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? state, Tensor? key_mask, \
Tensor query_basis, Tensor key_basis, Tensor? sequence, Tensor? bounds"
OPTIONS = "bool causal, str feature_map, str rule, float eps, float scale, str impl, \
bool keep_state, bool even, bool mild"
GRADIENTS = "Tensor out, Tensor total, Tensor grad_out, Tensor? grad_last, bool[] asked"
PASSED = tuple(name for name in Options._fields if name != "gated")  # an operator gets no gates


def _flat(given: Given) -> tuple[Any, ...]:
    """The arguments of an operator, in the order of its schema; gates as their sums."""
    given = with_sums(given)
    tensors = (given.q, given.k, given.v, given.decay, given.state)
    return (*tensors, *given.constants, *(getattr(given.options, name) for name in PASSED))


def _given(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, *others: Any
) -> tuple[Given, list[Any]]:
    """The inverse of `_flat`, and the arguments after it."""
    rest = list(others)
    constants = Constants(*(rest.pop(0) for _ in Constants._fields))
    options = Options(**{name: rest.pop(0) for name in PASSED})
    return Given(q, k, v, decay, state, constants, options), rest


def _checked_room(given: Given) -> ModuleType:
    """`_room` of an operator: nobody saw the addresses of its tensors when it was traced."""
    if given.options.impl == "hopper" and (reason := hopper.why_not_given(given)):
        raise ValueError(f"impl='hopper' needs {reason}: use impl='auto'")
    return _room(given)


def _forward(*flat: Any) -> tuple[Tensor, ...]:
    given, _ = _given(*flat)
    results = _checked_room(given).forward(given)
    last = results.last if given.options.keep_state else None
    return _tensors(given.q, (results.out, results.total, last))


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    given, (out, total, grad_out, grad_last, asked) = _given(*flat)
    grads = Grads(grad_out, None, grad_last)
    found = _checked_room(given).backward(given, Results(out, total, None), grads, Asked(*asked))
    return _of_sweeps(given.q, found)


kernels_forward = torch.library.custom_op(
    "cosformer::kernels_forward",
    _forward,
    mutates_args=(),
    schema=f"({ARRAYS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
kernels_backward = torch.library.custom_op(
    "cosformer::kernels_backward",
    _backward,
    mutates_args=(),
    schema=f"({ARRAYS}, {OPTIONS}, {GRADIENTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@kernels_forward.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    given, _ = _given(*flat)
    last = _state_like(given) if given.options.keep_state else None
    return _tensors(given.q, (*room_for_outputs(given.q, given.v, given.options.rule), last))


@kernels_backward.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    given, (*_, listed) = _given(*flat)
    q, k, v, asked = given.q, given.k, given.v, Asked(*listed)

    def dots(rows: Tensor) -> Tensor | None:
        shape = (*q.shape[:2], rows.shape[2], 1)
        return q.new_empty(shape, dtype=torch.float32) if asked.decay else None

    swept = Swept(
        torch.empty_like(q) if asked.q else None,
        k.new_empty(k.shape) if asked.k else None,
        v.new_empty(v.shape) if asked.v else None,
        _state_like(given) if asked.state else None,
        dots(q),
        dots(k),
    )
    return _of_sweeps(q, swept)


def _of_sweeps(like: Tensor, swept: Swept) -> tuple[Tensor, ...]:
    """What an operator of a backward pass returns: the decay's gradient is made of it outside."""
    kept = (swept.q, swept.k, swept.v, swept.state, swept.by_query, swept.by_key)
    return _tensors(like, kept)


def _tensors(like: Tensor, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An operator returns tensors: empty ones for None."""
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in found)


def _state_like(given: Given) -> Tensor:
    q, options = given.q, given.options
    columns = given.v.shape[3] + int(options.rule != "none")
    states = given.constants.query_basis.shape[3]
    return q.new_empty((*q.shape[:2], states, q.shape[3], columns), dtype=torch.float32)
