"""Both passes of attention in plain torch.

The backward is three sweeps, the last two in one where both are asked for (D divides, total is a
row's sum of weights):

    g_i = dout_i / D_i        δ_i = −(dout_i · out_i) / D_i · dD_i/dtotal_i
    dφ(q) = sweep([g δ], [v 1], φ(k))
    dφ(k) = reverse sweep([v 1], [g δ], φ(q))        dv = reverse sweep(φ(k), φ(q), g)

A decay's gradient is made of φ(k_j)·dφ(k_j) and φ(q_i)·dφ(q_i) = g_i·(out_i D_i) + δ_i total_i,
where the output is causal and as it was summed. Otherwise φ(q_i)·dφ(q_i) is taken from dφ(q_i). In
both directions the terms of pairs j > i have a minus, as w(i, j) is exp(L_j − L_i) there.

It keeps q, k, v, out and total, and nothing larger. A sweep's gradients are sweeps, so under
`create_graph` the same lines run on differentiable sweeps, to any order.
"""

import torch
from torch import Tensor

from cosformer.ops.chunked.chunks import Plan, cut, plan, sink, whole
from cosformer.ops.chunked.sweep import Pattern, Reader, run
from cosformer.ops.chunked.trilinear import Result, trilinear
from cosformer.ops.problem import (
    DENOMINATORS,
    FEATURE_MAPS,
    FOLLOWS,
    Asked,
    Given,
    Gradients,
    Grads,
    Results,
    decay_gradient,
    for_each_query_head,
    into_first_of_group,
    summed_over_groups,
)
from cosformer.runtime import compute_dtype, full_precision, recorded


def forward(given: Given) -> Results:
    """Output, row totals and the last state."""
    q, v, options = given.q, given.v, given.options
    rows = _Rows(given)
    spans = rows.spans
    same_width = q.shape[-1] == v.shape[-1]
    out = torch.empty_like(q) if same_width else q.new_empty(*q.shape[:3], v.shape[-1])
    total = q.new_empty(*q.shape[:2], q.shape[2] if rows.divides else 0, dtype=rows.dtype)
    in_place = out.dtype == rows.dtype and not torch.compiler.is_compiling()
    if in_place and rows.divides:
        outs, totals = cut(out, spans.queries), cut(total[..., None], spans.queries)
    else:
        put = sink(out, spans.queries)
        put_total = sink(total[..., None], spans.queries) if rows.divides else None

    def store_in_place(n: int, sums: Tensor, factor: Tensor | None) -> None:
        row_total = totals[n].copy_(sums[..., -1:])
        if factor is not None:
            row_total.mul_(factor)
        divisor = DENOMINATORS[options.rule](row_total, options.eps)
        torch.div(sums[..., :-1], divisor if factor is None else divisor / factor, out=outs[n])

    def store(n: int, sums: Tensor, factor: Tensor | None) -> None:
        if put_total is not None:
            row_total = sums[..., -1:] if factor is None else sums[..., -1:] * factor
            put_total(n, row_total, None)
            sums = sums[..., :-1] / DENOMINATORS[options.rule](row_total, options.eps)
        elif options.scale != 1:
            sums = sums * options.scale
        put(n, sums, factor)

    first = rows.first_state()
    reader = Reader(rows.q, store_in_place if in_place and rows.divides else store)
    last = run(_pattern(given), spans, rows.k, rows.v, first, reader)
    last = last if last is not first and v.shape[2] else last.clone()
    return Results(out, total, last[:, :: rows.groups])


def backward(given: Given, results: Results, grads: Grads, asked: Asked) -> Gradients:
    """The gradients that are asked for."""
    rows = _Rows(given, whole(given.q.shape[2], given.k.shape[2]) if recorded() else None)
    spans, pattern = rows.spans, _pattern(given)
    by = _Backward(given, results, grads, asked, rows, spans)
    with full_precision(given.q):
        first = rows.first_state()
        if grads.last is None:
            grad_state = torch.zeros_like(first)
        else:
            grad_state = into_first_of_group(grads.last, rows.groups)
        of_q: tuple[Tensor, ...] = ()
        of_k = of_v = of_q
        grad_decay = back = None
        if asked.q or by.dots:
            by_q = Result(by.rows, by.finish_q, by.room_for_queries(), signed=by.dots)
            of_q, _ = trilinear(pattern, spans, rows.v, rows.k, first.mT, by_q)
        by_k = None
        if asked.k or asked.decay:  # the state's gradient is at the end of dv's sweep
            by_k = Result(rows.v, by.finish_k, by.room_for_keys(), rows.groups > 1, asked.decay)
        if asked.v or asked.state:
            room = (torch.empty_like(given.v),)
            by_v = Result(rows.k, by.finish_v, room, rows.groups > 1)
            both, grad_first = trilinear(
                pattern, spans, rows.q, by.rows, grad_state, by_v, mirror=by_k, reverse=True
            )
            of_v, of_k = both[:1], both[1:]
            if asked.state and given.state is not None:
                back = summed_over_groups(grad_first, rows.groups).to(given.state.dtype)
        elif by_k is not None:
            of_k, _ = trilinear(pattern, spans, by.rows, rows.q, grad_state.mT, by_k, reverse=True)
        if asked.decay and given.decay is not None:
            at_end = None
            if grads.last is not None and results.last is not None:
                at_end = grad_state * for_each_query_head(results.last, rows.groups)
            _, by_key = of_k
            by_query = of_q[1] if by.dots else by.by_query()
            grad_decay = decay_gradient(by_query, by_key, at_end, given.decay)

    def found(made: tuple[Tensor, ...], x: Tensor, wanted: bool) -> Tensor | None:
        return made[0].to(x.dtype) if made and wanted else None

    return Gradients(
        found(of_q, given.q, asked.q),
        found(of_k, given.k, asked.k),
        found(of_v, given.v, asked.v),
        grad_decay,
        back,
    )


def _pattern(given: Given) -> Pattern:
    about = given.constants
    return Pattern(
        about.query_basis,
        about.key_basis,
        given.decay,
        about.sequence,
        given.options.causal,
        given.options.even,
    )


class _Rows:
    """q, k and v as sweeps load them: a span at a time, in full precision, mapped and masked."""

    def __init__(self, given: Given, spans: Plan | None = None) -> None:
        self.given = given
        self.dtype = compute_dtype(given.q.dtype)
        self.groups = given.q.shape[1] // given.k.shape[1]
        self.divides = given.options.rule != "none"
        self._recorded = recorded()
        self._map = FEATURE_MAPS[given.options.feature_map]
        batch, heads, length, _ = given.q.shape
        if spans is None:
            spans = plan(length, given.k.shape[2], batch * heads, given.q.device.type)
        self.spans = spans
        self._q = cut(given.q, spans.queries)
        self._k, self._v = cut(given.k, spans.keys), cut(given.v, spans.keys)
        mask = given.constants.key_mask
        self._real = None if mask is None else cut(mask[:, None, :, None], spans.keys)

    def q(self, n: int, into: Tensor | None) -> Tensor:
        return self._mapped(self._q[n].to(self.dtype), into)

    def k(self, n: int, into: Tensor | None) -> Tensor:
        keys = self.keys(n)
        if self.groups > 1:
            keys = for_each_query_head(keys, self.groups)
        return self.hide(self._mapped(keys, into), n)

    def queries(self, n: int) -> Tensor:
        """q before φ."""
        return self._q[n].to(self.dtype)

    def keys(self, n: int) -> Tensor:
        """k before φ; zeros at masked keys where φ is differentiated: its slope at NaN is NaN."""
        rows = self._k[n].to(self.dtype)
        return self.hide(rows, n) if self._recorded else rows

    def v(self, n: int, into: Tensor | None) -> Tensor:
        """[v 1], whose last column sums the weights; v alone where nothing is divided."""
        values = self.hide(self._v[n].to(self.dtype), n)
        if self.groups > 1:
            values = for_each_query_head(values, self.groups)
        if not self.divides:
            return _in_memory(values, into)
        return _in_memory(values, into, values.new_ones(()).expand(*values.shape[:-1], 1))

    def hide(self, rows: Tensor, n: int) -> Tensor:
        """Rows with zeros at masked keys, even where they are NaN."""
        return rows if self._real is None else rows.masked_fill(~self._real[n], 0)

    def first_state(self) -> Tensor:
        """The state before the first token, for every query head; zeros if none was given."""
        given = self.given
        if given.state is not None:
            return for_each_query_head(given.state.to(self.dtype), self.groups)
        batch, heads, _, width = given.q.shape
        states = given.constants.query_basis.shape[-1]
        columns = given.v.shape[-1] + int(self.divides)  # PyTorch 2.11 adds no bool to a symbol
        shape = (batch, heads, states, width, columns)
        return torch.zeros(shape, dtype=self.dtype, device=given.q.device)

    def _mapped(self, rows: Tensor, into: Tensor | None) -> Tensor:
        return self._map.forward(rows) if into is None else self._map.into(rows, out=into)


class _Backward:
    """The rows that the sweeps of a backward pass read, and where their results go."""

    def __init__(
        self,
        given: Given,
        results: Results,
        grads: Grads,
        asked: Asked,
        rows: _Rows,
        spans: Plan,
    ) -> None:
        self.given, self.asked, self.of = given, asked, rows
        # The error of a rounded output must be in both halves of a decay's gradient, or in none,
        # and one in both directions does not tell the share of later keys.
        is_whole = given.options.causal and results.out.dtype == rows.dtype
        self.dots = asked.decay and not is_whole
        self.slopes = FEATURE_MAPS[given.options.feature_map].backward
        self._out = cut(results.out, spans.queries)
        self._grad = None if grads.out is None else cut(grads.out, spans.queries)
        self._total = self._grad_total = None
        if rows.divides:
            self._total = cut(results.total[..., None], spans.queries)
        if rows.divides and grads.total is not None:  # a graph has zeros for what is empty
            self._grad_total = cut(grads.total[..., None], spans.queries)
        self._by_query: list[Tensor | None] = [None] * len(self._out)

    def rows(self, n: int, into: Tensor | None) -> Tensor:
        """[g δ], or g times the scale."""
        options, out = self.given.options, self._out[n]
        first = self.asked.decay and self._by_query[n] is None
        if self._grad is None:
            grad = torch.zeros_like(out, dtype=self.of.dtype)
        else:
            grad = self._grad[n].to(self.of.dtype)
        if self._total is None:
            if first:
                self._by_query[n] = (grad * out).sum(-1, keepdim=True)
            return _in_memory(grad if options.scale == 1 else grad * options.scale, into)
        total = self._total[n]
        divisor = DENOMINATORS[options.rule](total, options.eps)
        grad = grad / divisor
        shrinks = (grad * out).sum(-1, keepdim=True)
        delta = -shrinks * FOLLOWS[options.rule](total, options.eps).to(shrinks.dtype)
        if self._grad_total is not None:
            delta = delta + self._grad_total[n]
        if first:
            self._by_query[n] = shrinks * divisor + delta * total
        return _in_memory(grad, into, delta)

    def by_query(self) -> Tensor:
        """φ(q)·dφ(q) of every query, `[B, H, T, 1]`, once the sweeps have loaded their rows."""
        spans = [made.flatten(2, 3) for made in self._by_query if made is not None]
        batch, heads, length, _ = self.given.q.shape
        none = self.given.q.new_empty(batch, heads, 0, 1, dtype=self.of.dtype)
        return torch.cat([none, *spans], 2)[:, :, :length]

    def finish_q(self, n: int, grad: Tensor, signed: Tensor) -> tuple[Tensor, ...]:
        dq = self.slopes(grad, self.of.queries(n))
        if not self.dots:
            return (dq,)
        return dq, (signed * self.of.q(n, None)).sum(-1, keepdim=True)

    def finish_k(self, n: int, grad: Tensor, signed: Tensor) -> tuple[Tensor, ...]:
        dk = self.of.hide(self.slopes(summed_over_groups(grad, self.of.groups), self.of.keys(n)), n)
        if not self.asked.decay:
            return (dk,)
        return dk, (signed * self.of.k(n, None)).sum(-1, keepdim=True)

    def finish_v(self, n: int, grad: Tensor, signed: Tensor) -> tuple[Tensor, ...]:
        of_values = grad[..., : self.given.v.shape[-1]]
        return (self.of.hide(summed_over_groups(of_values, self.of.groups), n),)

    def room_for_queries(self) -> tuple[Tensor, ...]:
        """Memory for dq, and for φ(q)·dφ(q) where the output does not tell it."""
        q = self.given.q
        if not self.dots:
            return (torch.empty_like(q),)
        return torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=self.of.dtype)

    def room_for_keys(self) -> tuple[Tensor, ...]:
        """Memory for dk, and for φ(k)·dφ(k) where a decay asks for it."""
        k = self.given.k
        if not self.asked.decay:
            return (torch.empty_like(k),)
        shape = (*self.given.q.shape[:2], k.shape[2], 1)
        return torch.empty_like(k), k.new_empty(shape, dtype=self.of.dtype)


def _in_memory(rows: Tensor, into: Tensor | None, column: Tensor | None = None) -> Tensor:
    """Rows, and a column after them, in the memory that there is for them."""
    if column is None:
        return rows if into is None else into.copy_(rows)
    if into is None:
        return torch.cat([rows, column], -1)
    into[..., :-1] = rows
    into[..., -1:] = column
    return into
