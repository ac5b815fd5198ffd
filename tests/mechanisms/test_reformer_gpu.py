"""Reformer on a GPU: sorted tokens through FlexAttention."""

import pytest
import torch
from mechanism_cases import check_graph, draw, make, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def create(**options):
    return make("reformer", **{"heads": 4, "width": 64, "bucket": 64, "rounds": 4, **options})


def on_gpu(*tensors, dtype=BF16):
    return [x.to("cuda", dtype) for x in tensors]


def gradients(attend, *inputs):
    """After the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    weight = draw(*out.shape, seed=8).to(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bucket", [64, 20])
def test_no_worse_than_the_matrix_in_bfloat16(causal, bucket, monkeypatch):
    mechanism = create(bucket=bucket)
    for length in (200, 1000, 4097):
        q, k, v = on_gpu(*tokens(mechanism, length)[:3])
        order = mechanism.order(q)

        def by_matrix(q, k, v):
            return mechanism.dense_whole(q, k, causal) @ v

        with monkeypatch.context() as same_buckets:
            same_buckets.setattr(mechanism, "order", lambda q, order=order: order)
            exact = gradients(by_matrix, *(x.double() for x in (q, k, v)))
            usual = gradients(by_matrix, q, k, v)
        assert mechanism.choose(q, v) == "flex"
        found = gradients(lambda *x: mechanism(*x, causal=causal)[0], q, k, v)
        for one, other, right in zip(found, usual, exact, strict=True):
            allowed = 2 * (other - right).norm() + torch.finfo(BF16).eps * right.norm()
            assert (one - right).norm() <= allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_chunks_and_blocks_agree(dtype):
    bounds = {torch.float16: 5e-3, torch.float32: 1e-5}
    options = {"heads": 4, "key_heads": 2}
    inputs = on_gpu(*tokens(create(**options), 1000)[:3], dtype=dtype)
    mask = (torch.arange(1000) < torch.tensor([[1000], [700]])).cuda()

    def by(impl):
        mechanism = create(**options, impl=impl)
        return gradients(lambda *x: mechanism(*x, key_mask=mask)[0], *inputs)

    found, right = by("flex"), by("chunked")
    for one, other in zip(found, right, strict=True):
        assert (one - other).norm() <= bounds[dtype] * other.norm()


def test_a_cuda_graph_repeats_a_call():
    mechanism = create()
    inputs, others = (on_gpu(*tokens(mechanism, 1000, seed=seed)[:3]) for seed in (0, 5))
    check_graph(mechanism, inputs, others)


def test_a_long_sequence_takes_no_quadratic_memory():
    mechanism = create(rounds=8)
    inputs = on_gpu(*tokens(mechanism, 32768, batch=1)[:3])
    gradients(lambda *x: mechanism(*x)[0], *inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(lambda *x: mechanism(*x)[0], *inputs)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 40 * sum(x.numel() * x.element_size() for x in inputs)  # all scores: 170 times


def test_a_second_derivative_is_refused():
    q, k, v = on_gpu(*tokens(create(), 300)[:3])
    out, _ = create()(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="impl must be 'chunked' for a second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
