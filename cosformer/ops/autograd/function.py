"""The one differentiable function around all implementations in linear time."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops import chunked
from cosformer.ops.autograd.both_ways import both_ways
from cosformer.ops.problem import (
    FEATURE_MAPS,
    Asked,
    Constants,
    Given,
    Gradients,
    Grads,
    Options,
    Problem,
    Results,
    least_gate,
    with_basis,
    zero_masked,
)
from cosformer.runtime import (
    NEED_REFERENCE,
    compute_dtype,
    eager,
    join_batch,
    join_shared,
    recorded,
    refuse_mapped,
    refuse_older_vmap,
)


def attend(given: Given) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, T, V]`, and the state `[B, H_kv, R, D, V(+1)]` after the keys.

    A causal problem has query i at key i. The last state may be None unless it is to be kept.
    """
    if _goes_both_ways(given) and not _native(given):
        return both_ways(_causal_sums, given), None
    results = _results(given)
    return results.out, results.last


def given_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    state: Tensor | None,
    *,
    impl: str,
    keep_state: bool,
) -> Given:
    """The problem as the implementations take it."""
    if problem.query_basis is None or problem.key_basis is None:
        problem = with_basis(problem, compute_dtype(q.dtype))
    decay = problem.query_decay if q.shape[2] else problem.key_decay
    gated = problem.gates is not None and impl == "hopper" and eager(q, k, v, problem.gates)
    if problem.gates is not None:
        from cosformer.ops.autograd.gates import joint_gates, summed_gates

        if gated:
            decay = joint_gates(problem.gates, decay, q.dtype)
        else:
            sums = summed_gates(problem.gates, q.dtype)
            decay = sums if decay is None else decay + sums
    feature_map = problem.feature_map
    if impl != "chunked" and feature_map not in implementation(impl).maps(impl):
        phi, feature_map = FEATURE_MAPS[feature_map].forward, "identity"
        q, k = phi(q), phi(zero_masked(k, problem.key_mask))  # the slope of φ at NaN would be NaN
    options = Options(
        problem.causal, feature_map, problem.rule, problem.eps, problem.scale, impl, keep_state,
        even=problem.gates is None, mild=problem.mild and problem.gates is None,
        gated=gated,
    )  # fmt: skip
    assert problem.query_basis is not None
    assert problem.key_basis is not None
    constants = Constants(
        problem.key_mask,
        problem.query_basis,
        problem.key_basis,
        problem.sequence,
        problem.bounds,
    )
    return Given(q, k, v, decay, state, constants, options)


def _goes_both_ways(given: Given) -> bool:
    """Whether queries see later keys under a decay."""
    some = given.decay is not None and not given.options.causal
    return some and bool(given.q.shape[2] and given.k.shape[2])


def _native(given: Given) -> bool:
    """Whether the implementation itself computes a decay without causality."""
    impl = given.options.impl
    return impl == "hopper" or (impl == "chunked" and eager(given.q, given.k, given.v))


def _results(given: Given) -> Results:
    # Plain eager calls skip the binding of arguments and functorch, which saves 40 µs.
    plain = eager(given.q, given.k, given.v)
    apply = super(Function, _Attention).apply if plain else _Attention.apply
    if torch.compiler.is_compiling():
        return Results(*apply(*given))
    try:
        return Results(*apply(*given))
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(f"forward-mode derivatives {NEED_REFERENCE}") from error


def _causal_sums(given: Given) -> Tensor:
    return _results(given).out


def implementation(impl: str) -> ModuleType:
    """The room whose `forward` and `backward` compute a problem."""
    if impl == "chunked":
        return chunked
    from cosformer.ops.autograd import kernels

    return kernels


class _Attention(Function):
    """(q, k, v, decay, state) -> `Results`."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        state: Tensor | None,
        constants: Constants,
        options: Options,
    ) -> tuple[Tensor | None, ...]:
        given = Given(q, k, v, decay, state, constants, options)
        return tuple(implementation(options.impl).forward(given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        given, results = Given(*inputs), Results(*output)
        ctx.options = given.options
        if given.decay is None:  # only a decay's gradient asks for the last state
            results = results._replace(last=None)
        *tensors, constants, _ = given
        ctx.save_for_backward(*tensors, *constants, *results)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_older_vmap(*grads)
        of_out, of_total, of_last, *_ = grads
        *needed, _, _ = ctx.needs_input_grad
        q, k, v, decay, state, *saved = ctx.saved_tensors
        count = len(Constants._fields)
        given = Given(q, k, v, decay, state, Constants(*saved[:count]), ctx.options)
        incoming = Grads(of_out, of_total, of_last)
        return *gradients(given, Results(*saved[count:]), incoming, Asked(*needed)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """The mapped dimension joins the batch, the first of every tensor but those of packing."""
        given = Given(*inputs)
        dims: Any = Given(*in_dims)  # the same names, for dimensions
        size, batch = info.batch_size, given.q.shape[0 if dims.q is None else int(dims.q == 0)]
        about, at = given.constants, dims.constants
        refuse_mapped("cu_seqlens", at.sequence)
        refuse_mapped("cu_seqlens", at.bounds)

        def shared(x: Tensor | None, dim: int | None) -> Any:
            return join_shared(x, dim, size, batch)

        state = given.state
        joined = given._replace(
            q=join_batch(given.q, dims.q, size, batch),
            k=join_batch(given.k, dims.k, size, batch),
            v=join_batch(given.v, dims.v, size, batch),
            decay=shared(given.decay, dims.decay),
            state=state if state is None else join_batch(state, dims.state, size, batch),
            constants=about._replace(
                key_mask=shared(about.key_mask, at.key_mask),
                query_basis=shared(about.query_basis, at.query_basis),
                key_basis=shared(about.key_basis, at.key_basis),
            ),
            options=given.options._replace(keep_state=True),
        )
        results = Results(*_Attention.apply(*joined))._replace(kept=None, fading=None)
        outputs = tuple(None if x is None else x.unflatten(0, (size, batch)) for x in results)
        return outputs, tuple(None if x is None else 0 for x in outputs)


# Each call of apply reads the signature: from here in a microsecond, by inspection in a hundred.
_Attention.forward.__signature__ = inspect.signature(_Attention.forward)  # type: ignore[attr-defined]


def gradients(given: Given, results: Results, grads: Grads, asked: Asked) -> Gradients:
    """The gradients of q, k, v, the decay and the state.

    Derivatives beyond the first, and that of the row totals, go by plain torch for every
    implementation.
    """
    # a graph has zeros for the gradient of totals, which nobody uses there
    by_torch = recorded() or (grads.total is not None and not torch.compiler.is_compiling())
    if by_torch and given.decay is not None and given.options.gated:
        from cosformer.ops.autograd.gates import gradient_of_gates, with_sums

        gates = given.decay
        with torch.enable_grad():  # sums need a gradient where gates do
            summed = with_sums(given)
        found = gradients(summed, results, grads, asked)
        if found.decay is None:
            return found
        least = least_gate(given.q.dtype)
        return found._replace(decay=gradient_of_gates(found.decay, gates, least))
    if by_torch and _goes_both_ways(given):
        return _gradients_both_ways(given, grads, asked)
    chosen = chunked if by_torch else implementation(given.options.impl)
    return Gradients(*chosen.backward(given, results, grads, asked))


def _gradients_both_ways(given: Given, grads: Grads, asked: Asked) -> Gradients:
    """The gradients of a decay without causality; differentiable, by two causal problems."""
    by_torch = given._replace(options=given.options._replace(impl="chunked"))
    return differentiable(functools.partial(both_ways, _causal_sums), by_torch, grads.out, asked)


def differentiable(
    attend: Callable[[Given], Tensor], given: Given, of_out: Tensor | None, asked: Asked
) -> Gradients:
    """Gradients that have gradients: those of an output that is computed anew, by torch.

    Args:
        attend: computes the output of what is given.
        of_out: the output's gradient; None stands for zeros.
    """
    names = [name for name in ("q", "k", "v", "decay") if getattr(asked, name)]
    with torch.enable_grad():
        # of their own each: q may be k, or k may be made of q, and a gradient is of one argument
        leaves = {name: getattr(given, name).view_as(getattr(given, name)) for name in names}
        out = attend(given._replace(**leaves))
        of_out = torch.zeros_like(out) if of_out is None else of_out
        found = torch.autograd.grad(out, list(leaves.values()), of_out, create_graph=True)
    return Gradients(**dict(zip(names, found, strict=True)))
