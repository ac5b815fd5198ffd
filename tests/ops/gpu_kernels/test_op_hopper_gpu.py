"""The kernels in CUDA C++ on a Hopper GPU: every role, width and way to cut a sequence."""

import pytest
import torch
from asked import check_choices
from formula import results
from gpu_marks import ON_HOPPER
from kernel_cases import CASES, DECAY, Case, check, ours
from kernel_cases import draw as draw_case

from cosformer import (
    State,
    attention,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
)
from cosformer.ops import again, hopper

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned")]
CAUSAL = {"causal": True}
UNDIVIDED = {"feature_map": "identity", "normaliser": "none"}
SERVED = [
    "causal", "bidirectional", "cross", "masked", "masked, both ways", "a horizon for each head",
    "plain relu", "linear transformer", "signed", "added", "retention", "gated",
    "gated, scaled", "scaled, both ways", "closed gates", "fading quotient", "gated quotient",
    "packed", "packed, both ways", "packed, decaying", "decaying", "decaying, both ways",
    "gated, both ways", "packed, gated, both ways", "gated, divided",
]  # fmt: skip
both_ways = pytest.mark.parametrize("causal", [True, False])


def by_hopper(case, length, **options):
    check(case, length, torch.bfloat16, impl="hopper", device="cuda", **options)


@pytest.mark.parametrize("name", SERVED)
def test_every_role_agrees_with_its_formula(name):
    for length in (1, 63, 1000):
        by_hopper(CASES[name], length)


@both_ways
@pytest.mark.parametrize(("width", "value_width"), [(8, 128), (72, 64), (128, 8), (128, 128)])
def test_every_width(width, value_width, causal):
    case = Case(options={"causal": causal}, width=width, value_width=value_width)
    by_hopper(case, 300, batch=2)


@both_ways
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_a_decay_beside_the_cosine_and_every_way_to_cut(width, gated, causal, segments):
    options = {"causal": causal, **({} if gated else DECAY)}
    wide = {"width": width, "value_width": width}
    by_hopper(Case(options=options, gated=gated, masked=True, **wide), 700)


@both_ways
@pytest.mark.parametrize("per_token", [False, True])
def test_mild_and_strong_decays_in_one_call(per_token, causal, segments):
    inputs, gammas = draw(2, 4, 700, 64), torch.tensor([1e-30, 0.3, 0.45, 0.999])
    gates = gammas.log()[:, None].repeat(2, 1, 700)
    gates[:, 3, 200:230] = -40.0  # one chunk of a mild head
    decay = {"log_decay": gates.cuda()} if per_token else {"decay": gammas.tolist()}

    def call(*x, impl):
        return attention(*x, causal=causal, horizon=1000, **decay, impl=impl)

    exact = results(lambda *x: call(*x, impl="chunked"), [x.double() for x in inputs])
    close(results(lambda *x: call(*x, impl="hopper"), list(inputs)), exact)


@both_ways
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_share_keys(kv_heads, gated, causal, segments):
    wide = {"heads": 4, "kv_heads": kv_heads, "width": 64, "value_width": 128}
    by_hopper(Case(options={"causal": causal}, gated=gated, **wide), 700, batch=2)


@both_ways
def test_many_packed_sequences_of_all_lengths(causal):
    lengths = torch.randint(0, 200, (300,), generator=torch.Generator().manual_seed(0))
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).cuda()
    inputs = list(draw(1, 2, int(ends[-1]), 64))
    gates = -torch.rand(1, 2, int(ends[-1]), device="cuda")
    gates[:, :, 5000:5600] = -40.0  # a few sequences fade too strongly for factors of rows

    def call(*x, impl):
        given = {"cu_seqlens": ends, "causal": causal, "log_decay": gates.to(x[0].dtype)}
        return attention(*x, **given, impl=impl)

    exact = results(lambda *x: call(*x, impl="chunked"), [x.double() for x in inputs])
    close(results(lambda *x: call(*x, impl="hopper"), inputs), exact)


@both_ways
@pytest.mark.parametrize("masked", [False, True])
def test_every_way_to_cut(causal, masked, segments):
    case = Case(options={"causal": causal}, width=64, value_width=64, masked=masked)
    for length in (700, 4097):
        by_hopper(case, length)


@both_ways
@pytest.mark.parametrize(("width", "theta", "scale"), [(64, 1e-3, 1.0), (128, 0.0, 0.3)])
def test_no_denominator(width, theta, scale, causal, segments):
    options = {"causal": causal, "theta": theta, "scale": scale, **UNDIVIDED}
    by_hopper(Case(linear_attention, options, width=width, value_width=width), 700)


@pytest.mark.parametrize(("width", "value_width"), [(64, 128), (72, 8), (128, 64), (128, 128)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gates_at_every_width(width, value_width, scale):
    """Without a scale they are divided."""
    options = {"feature_map": "1+elu"} if scale is None else {**UNDIVIDED, "scale": scale}
    wide = {"width": width, "value_width": value_width, "gated": True}
    case = Case(linear_attention, {**CAUSAL, **options}, **wide)
    by_hopper(case, 300, batch=2)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("heads", "length"), [(2, 100), (2, 5000), (300, 130)])
def test_gates_of_any_dtype_and_strides(heads, length, dtype, causal):
    inputs = draw(1, heads, length, 64)
    gates = -0.5 * torch.rand(1, length, heads, device="cuda").to(dtype).transpose(1, 2)
    gates[:, :, 7::50], gates[:, :, 8::500] = -110, -torch.inf

    def ours(*x):
        return attention(*x[:3], log_decay=x[3], causal=causal, horizon=9000, impl="hopper")

    def exact(*x):
        return attention(*x[:3], log_decay=x[3], causal=causal, horizon=9000, impl="chunked")

    right = results(exact, [x.double() for x in (*inputs, gates)])
    close(results(ours, [*inputs, gates]), right)


@both_ways
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_packed_tokens_stand_where_torch_says(wide, causal):
    lengths = torch.tensor([0, 3, 0, 700, 64, 1, 0])
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to("cuda", wide)
    for horizon in (None, 800.0, torch.tensor([700.0, 2000.0], device="cuda")):
        inputs, about = draw(1, 2, 768, 64), {"causal": causal, "horizon": horizon}
        found = attention(*inputs, cu_seqlens=ends, **about, impl="hopper")
        right = attention(*(x.double() for x in inputs), cu_seqlens=ends, **about, impl="chunked")
        close([found], [right])


@pytest.mark.parametrize("feature_map", hopper.MAPS)
def test_every_feature_map_under_gates_and_a_mask(feature_map, segments):
    options = {**CAUSAL, **UNDIVIDED, "feature_map": feature_map, "scale": 0.3}
    case = Case(linear_attention, options, width=64, value_width=64, gated=True, masked=True)
    by_hopper(case, 700)


@pytest.mark.parametrize("rule", ["clamp", "add", "signed"])
def test_a_fading_quotient_and_every_way_to_cut(rule, segments):
    options = {**CAUSAL, "feature_map": "1+elu", "rule": rule}
    case = Case(linear_attention, options, width=128, value_width=64, gated=True, masked=True)
    by_hopper(case, 700)


@pytest.mark.parametrize("width", [64, 128])
def test_gates_that_let_nothing_through(width, segments):
    wide = {"width": width, "value_width": width}
    case = Case(linear_attention, {**CAUSAL, **UNDIVIDED}, gated=True, closed=True, **wide)
    for length in (128, 700):
        by_hopper(case, length)


@pytest.mark.parametrize("name", ["causal", "bidirectional", "masked", "gated"])
def test_whoever_else_asks_for_a_gradient_it_has_the_same_bits(name, segments):
    inputs, options = draw_case(CASES[name], 300, device="cuda")
    rows = [x.bfloat16() for x in inputs[:3]]
    check_choices(ours(CASES[name], options, "hopper"), [*rows, *(x.float() for x in inputs[3:])])


def draw(*shape):
    return torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16).unbind()


def test_masked_keys_may_be_anything_under_a_gate():
    q, k, v = draw(1, 2, 300, 64)
    gates = -torch.rand(1, 2, 300, device="cuda")
    mask = torch.rand(1, 300, device="cuda") < 0.7
    hidden = ~mask[:, None, :, None]
    options = {**CAUSAL, **UNDIVIDED, "feature_map": "relu", "key_mask": mask, "impl": "hopper"}

    def call(*x):
        return linear_attention(*x[:3], **options, log_decay=x[3])

    poisoned = [q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), gates]
    zeroed = [q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0), gates]
    for a, b in zip(results(call, poisoned), results(call, zeroed), strict=True):
        assert torch.equal(a, b)


def close(found, right):
    for a, b in zip(found, right, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 0.02


@pytest.mark.parametrize("split", [64, 500])
def test_a_gated_stream_in_two_pieces(split, segments):
    first = torch.randn(2, 3, 1, 64, 64, device="cuda")
    leaves = [*draw(2, 3, 1000, 64), -0.02 * torch.rand(2, 3, 1000, device="cuda"), first]

    def stream(q, k, v, gates, first, cuts, impl):
        total = torch.zeros(2, 3, dtype=torch.float64, device="cuda")
        sums = (first, first[..., 0][..., :0], torch.tensor(0).cuda())
        state, outs = State(*sums, None, log_decay=total), []
        for rows in cuts:
            part = (x[:, :, rows] for x in (q, k, v))
            about = {"log_decay": gates[:, :, rows], "scale": 0.3, "state": state, "impl": impl}
            out, state = linear_attention_with_state(*part, **about, **UNDIVIDED)
            outs.append(out)
        return torch.cat([*outs, state.key_value[:, :, 0].to(outs[0])], 2)

    def whole(*x):
        return stream(*(y.float() for y in x), cuts=[slice(None)], impl="chunked")

    cuts = [slice(0, split), slice(split, None)]
    close(results(lambda *x: stream(*x, cuts=cuts, impl="hopper"), leaves), results(whole, leaves))


@pytest.mark.parametrize("split", [64, 500])
def test_a_stream_in_two_pieces(split, segments):
    q, k, v = draw(2, 3, 1000, 64)

    def pieces(*x):
        first, state = attention_with_state(
            *(y[:, :, :split] for y in x), horizon=2000, impl="hopper"
        )
        second, _ = attention_with_state(*(y[:, :, split:] for y in x), state=state, impl="hopper")
        return torch.cat([first, second], 2)

    def whole(*x):
        return attention(*(y.float() for y in x), causal=True, horizon=2000, impl="chunked")

    leaves = [q.abs(), k.abs(), v]
    close(results(pieces, leaves), results(whole, leaves))


def attend(*x):
    return attention(*x, causal=True, impl="hopper")


def test_strides_of_a_joint_projection_and_the_gradient_of_a_sum():
    joint = torch.randn(2, 500, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    inputs = [x.transpose(1, 2) for x in joint.unbind(2)]
    copied = results(attend, [x.contiguous() for x in inputs])
    assert all(map(torch.equal, results(attend, inputs), copied))
    leaves = [x.requires_grad_() for x in draw(1, 2, 300, 64)]
    out = attend(*leaves)
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert all(map(torch.equal, expanded, torch.autograd.grad(out, leaves, torch.ones_like(out))))


def test_more_blocks_than_a_grid_axis_holds():
    inputs = draw(5000, 16, 8, 64)
    exact = attention(*(x.float() for x in inputs), causal=True, impl="chunked")
    assert (attend(*inputs).float() - exact).norm() / exact.norm() < 0.01


def test_auto_takes_them_and_a_graph_replays_what_was_captured():
    inputs = draw(1, 4, 1000, 64)
    expected = attend(*inputs)
    assert torch.equal(attention(*inputs, causal=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*inputs, causal=True)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("impl", ["auto", "hopper"])
def test_inductor_compiles_without_a_break(impl):
    inputs = list(draw(1, 2, 300, 64))
    compiled = torch.compile(lambda *x: attention(*x, causal=True, impl=impl), fullgraph=True)
    for a, b in zip(results(attend, inputs), results(compiled, inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)


REPEATED = {
    "causal": {"causal": True},
    "both ways": {},
    "a decay": {"causal": True, "decay": (0.9, 0.99, 0.5, 0.3)},
    "a decay, both ways": {"decay": 0.9},
    "gates": {"causal": True, "gated": True},
    "gates, both ways": {"gated": True},
    "grouped": {"causal": True, "key_heads": 2},
}


@pytest.mark.parametrize("length", [100, 3000])  # of which the second is cut
@pytest.mark.parametrize("name", REPEATED)
def test_a_call_from_a_tape_gives_the_bits_of_an_ordinary_one(monkeypatch, name, length):
    options = dict(REPEATED[name])
    gated, key_heads = options.pop("gated", False), options.pop("key_heads", 4)

    def both(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        given = {"device": "cuda", "generator": generator}
        shapes = [(2, heads, length, 64) for heads in (4, key_heads, key_heads, 4)]
        *inputs, grad = (torch.randn(shape, **given).bfloat16() for shape in shapes)
        leaves = [x.requires_grad_() for x in inputs]
        if gated:
            options["log_decay"] = (-torch.rand(2, 4, length, **given)).requires_grad_()
            leaves.append(options["log_decay"])
        out = attention(*inputs, **options)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    monkeypatch.setattr(again, "_calls", {})
    found = [both(seed) for seed in range(4)]
    (call,) = again._calls.values()
    assert call._tapes["forward"] is not None
    assert len([x for x in call._tapes.values() if x]) == (1 if name == "grouped" else 2)
    for seed in range(4):
        again._calls.clear()
        assert all(map(torch.equal, found[seed], both(seed)))
