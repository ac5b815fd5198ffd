"""Patterns through FlexAttention: its blocks hold all pairs, its parts join, gradients too.

On a CPU PyTorch computes every score and has no gradients; `emulated` reads the lists of blocks as
the kernel does.
"""

from types import SimpleNamespace

import pytest
import torch
from mechanism_cases import cases_where, draw, make, results, tokens
from torch.testing import assert_close

from cosformer.mechanisms.patterns import flex
from cosformer.memo import Memo

OPTIONS = {
    "local": {"window": 90},
    "longformer": {"window": 60, "global_tokens": 3},
    "sparse": {"stride": 40, "summary": 12},
    "sparse-strided": {"stride": 30},
    "bigbird": {"block": 16, "random_blocks": 2},
}
"""Sizes that make blocks of 128 matter at some hundred tokens."""
CASES = [case for case in cases_where() if case[0] in OPTIONS]
every_case = pytest.mark.parametrize(("name", "causal"), CASES)
uncompiled = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def create(name, impl, **options):
    sizes = {"heads": 4, "key_heads": 2, "width": 8}
    return make(name, **{**sizes, **OPTIONS[name], **options}, impl=impl)


def seen_by_kernel(blocks, batch, heads):
    """Which pairs the kernel computes, `[B, H, T, S]`."""
    queries, keys = blocks.seq_lengths
    grid = [torch.arange(n) for n in (batch, heads, queries, keys)]
    b, h, i, j = torch.meshgrid(*grid, indexing="ij")

    def listed(counts, indices):
        table = torch.zeros(indices.shape[2:], dtype=torch.bool)
        for row, (count, columns) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
            table[row, columns[:count].long()] = True
        size = flex.BLOCK
        return table.repeat_interleave(size, 0).repeat_interleave(size, 1)[:queries, :keys]

    return blocks.mask_mod(b, h, i, j) & listed(blocks.kv_num_blocks, blocks.kv_indices)


def emulated(q, k, v, blocks, with_log):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = seen_by_kernel(blocks, *q.shape[:2])
    score = q @ k.mT / q.shape[-1] ** 0.5
    score = score.masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    top = score.detach().amax(-1, keepdim=True).masked_fill(~some, 0)
    weights = (score - top).exp()
    total = weights.sum(-1, keepdim=True)
    log_total = torch.where(some, top + torch.where(some, total, 1).log(), -torch.inf)
    return weights @ v / torch.where(some, total, 1), log_total[..., 0] if with_log else None


def emulate(monkeypatch):
    """The kernel as above, which has gradients on a CPU."""
    monkeypatch.setattr(flex, "attend_blocks", emulated)
    monkeypatch.setattr(flex, "require_flex", lambda *_: None)


@every_case
@pytest.mark.parametrize(("masked", "length"), [(False, 17), (True, 200), (False, 391)])
def test_parts_have_the_output_and_gradients_of_the_reference(
    name, causal, masked, length, monkeypatch
):
    emulate(monkeypatch)
    monkeypatch.setattr(flex, "_laid", Memo())
    inputs = tokens(create(name, "flex"), length)[:3]
    mask = draw(2, length, seed=3) > -0.7 if masked else None
    if masked:
        mask[1] = False  # not a key
    both = (create(name, impl) for impl in ("flex", "reference"))
    assert_close(*(results(each, inputs, causal=causal, key_mask=mask) for each in both))


@pytest.mark.parametrize("name", ["local", "sparse-strided"])
@pytest.mark.parametrize(
    ("queries", "keys", "start"), [(20, 370, None), (370, 200, 7), (130, 300, 400)]
)
def test_parts_serve_queries_at_any_position(name, queries, keys, start, monkeypatch):
    emulate(monkeypatch)
    inputs = tokens(create(name, "flex"), queries, keys=keys)[:3]
    for causal in (False, True):
        both = (create(name, impl) for impl in ("flex", "reference"))
        assert_close(*(results(each, inputs, causal=causal, start=start) for each in both))


@uncompiled
@every_case
def test_flex_attention_computes_the_same(name, causal):
    mechanism, other = create(name, "flex", width=16), create(name, "blocked", width=16)
    q, k, v, _ = tokens(mechanism, 300)
    mask = None if causal else draw(2, 300, seed=3) > -0.7
    out, _ = mechanism(q, k, v, causal=causal, key_mask=mask)
    assert_close(out, other(q, k, v, causal=causal, key_mask=mask)[0])


@pytest.mark.slow
@every_case
@torch.no_grad()
def test_a_graph_has_the_mask_of_every_part(name, causal):
    mechanism = create(name, "flex")
    q, k, v, _ = tokens(mechanism, 300)
    torch.compiler.reset()
    compiled = torch.compile(mechanism, fullgraph=True, backend="eager")
    right, _ = create(name, "blocked")(q, k, v, causal=causal)
    assert_close(compiled(q, k, v, causal=causal)[0], right)


def on_gpu(width):
    return SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 2, 100, width))


@pytest.mark.parametrize("name", OPTIONS)
def test_narrow_rows_and_transforms_of_torch_func_go_without_flex_attention(name):
    mechanism, q, narrow = make(name), *(on_gpu(width) for width in (16, 15))
    chosen = [mechanism.choose(*given) for given in ((q, q), (narrow, q), (q, narrow))]
    torch.func.vmap(lambda x: (chosen.append(mechanism.choose(q, q)), x)[1])(torch.zeros(2))
    assert chosen == ["flex", "blocked", "blocked", "blocked"]


def test_flex_attention_has_no_gradients_off_cuda():
    mechanism = make("local", impl="flex")
    q, k, v, _ = tokens(mechanism, 200)
    with pytest.raises(ValueError, match="impl must be 'blocked' or 'reference' on cpu"):
        mechanism(q.requires_grad_(), k, v, causal=True)


@uncompiled
def test_long_tables_are_not_kept(monkeypatch):
    monkeypatch.setattr(flex, "LONGEST", 20)
    monkeypatch.setattr(flex._laid, "kept", {})
    mechanism = make("local", impl="flex")
    for length in (100, 1000):
        mechanism(*tokens(mechanism, length)[:3])
        assert len(flex._laid.kept) == 1


def laid(mechanism, length, causal):
    q, _, _, _ = tokens(mechanism, length, batch=1)
    sizes = flex.Sizes(length, length, causal, 0)
    parts = mechanism.parts(sizes, q.device)
    return [flex.lay(part, sizes, q.device).blocks for part in parts]


@pytest.mark.parametrize("causal", [False, True])
def test_few_blocks_are_read_without_a_pair(causal):
    (local,) = laid(create("local", "flex", window=256), 1500, causal)
    assert local.to_dense().sum() <= (2 if causal else 3) * 12
    own, summaries = laid(create("sparse", "flex", stride=128, summary=32), 4096, causal)
    assert own.to_dense().sum() == 32
    assert summaries.to_dense().sum() <= 32 * 8 * (0.6 if causal else 1)  # a quarter of n²
    band, classes = laid(create("sparse-strided", "flex", stride=64), 4096, causal)
    assert band.to_dense().sum() <= (2 if causal else 3) * 32
    assert classes.to_dense().sum() == 32  # two classes of 64 tokens are a block


def test_blocks_of_global_tokens_are_apart_from_their_neighbours():
    near, ends = laid(create("bigbird", "flex", block=64), 64 * 200, False)
    assert near.to_dense().sum(-2).max() < 30
    assert ends.to_dense().shape[-1] == 1  # the first and the last 64 tokens, side by side
    _, first = laid(create("longformer", "flex"), 64 * 200, False)
    assert first.to_dense().shape[-1] == 1


@uncompiled
def test_parts_are_kept_whatever_the_mask(monkeypatch):
    kept = Memo()
    monkeypatch.setattr(flex, "_laid", kept)
    mechanism, other = create("local", "flex"), create("local", "blocked")
    q, k, v, _ = tokens(mechanism, 300)
    with torch.inference_mode():
        mechanism(q, k, v)
    for n in range(3):
        mask = draw(2, 300, seed=n) > -0.7 if n else None
        assert_close(mechanism(q, k, v, key_mask=mask)[0], other(q, k, v, key_mask=mask)[0])
        assert len(kept.kept) == 1
    mechanism(q, k, v, causal=True)
    mechanism(*(x[:, :, 1:] for x in (q, k, v)))
    assert len(kept.kept) == 3
    for name, options in (("local", {"window": 600}), ("bigbird", {"seed": 3})):
        mechanism, other = (create(name, impl, **options) for impl in ("flex", "blocked"))
        for _ in range(2):
            assert_close(mechanism(q, k, v)[0], other(q, k, v)[0])
    assert len(kept.kept) == 5


@uncompiled
def test_a_kept_pattern_reads_no_list_again(monkeypatch):
    """Else a copy to the device waits for it, and no CUDA graph can be recorded."""
    mechanism = create("bigbird", "flex")
    q, k, v, _ = tokens(mechanism, 300)
    out, _ = mechanism(q, k, v)
    monkeypatch.setattr(type(mechanism), "drawn", None)
    monkeypatch.setattr(type(mechanism), "parts", None)
    assert_close(mechanism(q, k, v)[0], out)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_second_derivative_is_refused(name, monkeypatch):
    """Wherever the kernel's gradient would be taken for a constant, in silence."""
    emulate(monkeypatch)
    monkeypatch.setattr(flex, "_laid", Memo())
    mechanism = create(name, "flex")
    q, k, v, _ = tokens(mechanism, 140)
    q.requires_grad_()
    out, _ = mechanism(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert grad.any()
    others = "'blocked' or 'reference'"
    with pytest.raises(RuntimeError, match=f"impl must be {others} for a second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("length", "width", "dtype", "expected"),
    [
        (256, 64, torch.bfloat16, {"IS_DIVISIBLE", "fwd_BLOCK_N", "bwd_BLOCK_M1"}),
        (200, 64, torch.float16, {"fwd_BLOCK_N", "bwd_BLOCK_M1"}),
        (256, 64, torch.float32, {"IS_DIVISIBLE"}),
        (200, 128, torch.bfloat16, set()),
    ],
)
def test_kernels_are_told_what_they_would_not_ask(length, width, dtype, expected):
    q = torch.zeros(1, 1, length, width, dtype=dtype)
    told = flex._how(q, q)
    assert told["FORCE_USE_FLEX_ATTENTION"]
    assert expected == set(told) & {"IS_DIVISIBLE", "fwd_BLOCK_N", "bwd_BLOCK_M1"}
    for name, size in told.items():
        assert not name.startswith(("fwd_BLOCK", "bwd_BLOCK")) or flex.BLOCK % size == 0
