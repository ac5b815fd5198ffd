"""CosformerAttention as a module: signature, checkpoints, tracing, errors."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from torch import nn

from cosformer.nn import CosformerAttention


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10}, {"vdim": 6}])
def test_initial_weights_and_checkpoints_are_those_of_multihead_attention(options):
    torch.manual_seed(5)
    softmax = nn.MultiheadAttention(16, 4, **options)
    torch.manual_seed(5)
    linear = CosformerAttention(16, 4, **options)
    assert list(softmax.state_dict()) == list(linear.state_dict())
    for name, tensor in softmax.state_dict().items():
        assert torch.equal(tensor, linear.state_dict()[name]), name
    softmax.load_state_dict(linear.state_dict())
    linear.load_state_dict(softmax.state_dict())


def test_signatures_begin_as_those_of_multihead_attention():
    for method in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters
        ours = inspect.signature(getattr(CosformerAttention, method)).parameters
        positional = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
        assert [p.name for p in positional] == list(theirs)
        assert [p.default for p in positional] == [p.default for p in theirs.values()]


def test_casting_the_layer_keeps_its_horizons():
    layer = CosformerAttention(16, 2, batch_first=True, horizon=[4097.3, 8191.7]).to(torch.bfloat16)
    assert layer.horizon.tolist() == [4097.3, 8191.7]
    assert list(layer.state_dict()) == list(nn.MultiheadAttention(16, 2).state_dict())


def test_decays_are_in_no_checkpoint_and_no_cast_rounds_them():
    rates = torch.tensor([0.5, 0.9972378], dtype=torch.float64)
    layer = CosformerAttention(16, 2, batch_first=True, horizon=64, decay=rates)
    layer.bfloat16().float()
    rates.fill_(0.1)
    assert layer.decay == (0.5, 0.9972378)
    assert list(layer.state_dict()) == list(nn.MultiheadAttention(16, 2).state_dict())
    other = CosformerAttention(16, 2, batch_first=True, horizon=64, decay=[0.5, 0.9972378])
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 12, 16)
    for one in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(one(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("ones", [1, 1.0, [1.0] * 4, torch.ones(4)])
def test_a_decay_of_1_is_no_decay(ones):
    layer = CosformerAttention(16, 4, batch_first=True, decay=ones)
    assert layer.decay is None
    layer(torch.randn(2, 5, 16), *2 * [torch.randn(2, 9, 16)])  # cross attention


PADDING = torch.arange(12) >= torch.tensor([[12], [8]])
TRACED = {
    "plain, with weights": {"need_weights": True},
    "causal": {"is_causal": True},
    "decay": {"decay": "multiscale"},
    "causal by mask, padded": {
        "is_causal": True,
        "attn_mask": nn.Transformer.generate_square_subsequent_mask(12),
        "key_padding_mask": torch.zeros(2, 12).masked_fill(PADDING, -torch.inf),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("options", TRACED.values(), ids=TRACED.keys())
def test_compiles_without_a_graph_break_forward_and_backward(options):
    torch._dynamo.reset()
    sizes = {"batch_first": True, "horizon": 64, "num_kv_heads": 2}
    options = dict(options)
    layer = CosformerAttention(16, 4, 0.5, **sizes, decay=options.pop("decay", None)).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 12, 16)
    results = []
    for function in (compiled, layer):
        outputs = function(x, x, x, **{"need_weights": False, **options})
        loss = sum(out.square().sum() for out in outputs if out is not None)
        results.append((outputs, torch.autograd.grad(loss, list(layer.parameters()))))
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_exports_for_any_length():
    class Causal(CosformerAttention):
        def forward(self, x):
            return super().forward(x, x, x, need_weights=False, is_causal=True)[0]

    layer = Causal(16, 4, batch_first=True, horizon=64).eval()
    x, longer = torch.randn(2, 12, 16), torch.randn(2, 31, 16)
    dynamic = {"x": {1: torch.export.Dim("length", max=64)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=dynamic)
    torch.testing.assert_close(program.module()(longer), layer(longer))


BAD_OPTIONS = [
    ({"num_heads": 3}, ValueError, "embed_dim must be a multiple of num_heads=3, got 16"),
    ({"num_heads": 4.0}, TypeError, r"num_heads must be a whole number from 1 on, got 4\.0"),
    ({"embed_dim": None}, TypeError, "embed_dim must be a whole number from 1 on, got None"),
    ({"kdim": "8"}, TypeError, "kdim must be a whole number from 1 on, got '8'"),
    ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads=4, got 3"),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be a whole number from 1 on, got 0"),
    ({"add_bias_kv": True}, ValueError, "add_bias_kv must be False.*learned token"),
    ({"add_bias_kv": None}, TypeError, "add_bias_kv must be a bool, got NoneType"),
    ({"add_zero_attn": True}, ValueError, "add_zero_attn must be False.*learned token"),
    ({"add_zero_attn": 0}, TypeError, "add_zero_attn must be a bool, got int"),
    ({"bias": "no"}, TypeError, "bias must be a bool, got str"),
    ({"batch_first": 1}, TypeError, "batch_first must be a bool, got int"),
    ({"dropout": 1.5}, ValueError, r"dropout must lie in 0 \.\.\. 1, got 1\.5"),
    ({"dropout": "a"}, TypeError, "dropout must be a number, got str"),
    ({"horizon": [1.0, 2.0, 3.0]}, ValueError, "horizon must be a number or one per head"),
    ({"horizon": torch.ones(4) > 0}, ValueError, "horizon must be real, got torch.bool"),
    ({"horizon": "9"}, TypeError, "horizon must be a number or a tensor, got str"),
    ({"horizon": [1, "a", 3, 4]}, TypeError, r"horizon\[1\] must be a number, got str"),
    ({"decay": "fast"}, ValueError, "decay must be a number.* or one of .*multiscale, got 'fast'"),
    ({"decay": "multi-scale"}, ValueError, "did you mean 'multiscale'"),
    ({"decay": 1.5}, ValueError, r"decay must lie in \(0, 1\], got 1\.5"),
    ({"decay": [0.5, 0.0, 1, 1]}, ValueError, r"decay must lie in \(0, 1\], got 0"),
    ({"decay": math.nan}, ValueError, r"decay must lie in \(0, 1\], got nan"),
    ({"decay": [0.5] * 3}, ValueError, r"decay must be one .* per key head \[4\], got \[3\]"),
    (
        {"decay": [0.5] * 4, "num_kv_heads": 2},
        ValueError,
        r"decay must be one .* per key head \[2\], got \[4\]",
    ),
    ({"decay": torch.ones(4, 1)}, ValueError, r"decay must be one .*, got \[4, 1\]"),
    ({"decay": torch.ones(4) > 0}, ValueError, "decay must be real, got torch.bool"),
    ({"decay": torch.ones(4).requires_grad_()}, ValueError, "decay must not require a gradient"),
    ({"decay": True}, TypeError, "decay must be a number.*, got bool"),
    ({"decay": [0.5, "a", 1, 1]}, TypeError, r"decay\[1\] must be a number, got str"),
    ({"weight": "sine"}, ValueError, "weight must be one of .*sine"),
    ({"positions": "middle"}, ValueError, "positions must be one of .*middle"),
    ({"eps": 0.0}, ValueError, "eps must be above 0, got 0"),
    ({"impl": "magic"}, ValueError, "impl must be one of .*magic"),
    ({"dtype": torch.complex64}, ValueError, "dtype must be a real floating type, got .*complex64"),
    ({"dtype": "float32"}, TypeError, r"dtype must be a torch\.dtype, got str"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_construction_refuses(options, error, message):
    with pytest.raises(error, match=message):
        CosformerAttention(**{"embed_dim": 16, "num_heads": 4, **options})


X = torch.randn(2, 5, 16)
BAD_INPUTS = [
    ({}, {"query": X[..., :8]}, ValueError, "query must have shape .*16"),
    ({}, {"key": X[0], "value": X[0]}, ValueError, "key must have shape"),
    ({}, {"value": X[:, :4]}, ValueError, "key and value must agree"),
    ({}, {"query": X[:1]}, ValueError, "query and key must agree .*batch_first=True"),
    ({"batch_first": False}, {"query": X[:, :4]}, ValueError, "batch_first=False"),
    ({"kdim": 6}, {}, ValueError, "key must have shape .*6"),
    ({"horizon": 4}, {}, ValueError, "horizon must be at least .*5, got 4"),
    ({}, {"key": None}, TypeError, "key must be a tensor, got NoneType"),
    ({}, {"need_weights": "no"}, TypeError, "need_weights must be a bool, got str"),
    (
        {},
        {"average_attn_weights": None},
        TypeError,
        "average_attn_weights must be a bool, got None",
    ),
    ({}, {"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
]


@pytest.mark.parametrize(("options", "given", "error", "message"), BAD_INPUTS)
def test_forward_refuses(options, given, error, message):
    layer = CosformerAttention(16, 4, **{"batch_first": True, **options})
    with pytest.raises(error, match=message):
        layer(**{"query": X, "key": X, "value": X, **given})


@pytest.mark.parametrize("packed", [True, False])
def test_inputs_of_another_dtype_than_the_layer_are_named(packed):
    layer = CosformerAttention(16, 4, kdim=None if packed else 8, horizon=20)
    x = torch.randn(2, 5, 16)
    rest = (x, x) if packed else (x[..., :8], x)
    with pytest.raises(ValueError, match=r"query must have the dtype of .*32, got torch.float64"):
        layer(x.double(), *rest)
    with pytest.raises(ValueError, match=r"value must have the dtype of .*32, got torch.int64"):
        layer(x, rest[0], x.long())
    if packed:
        with pytest.raises(ValueError, match=r"x must have the dtype of .*32, got torch.bfloat16"):
            layer.stream(x.bfloat16())


def test_autocast_casts_all_but_float64():
    layer, x = CosformerAttention(16, 4), torch.randn(2, 5, 16)
    with torch.autocast("cpu"):
        for given in (x, x.bfloat16(), x.half()):
            assert layer(given, given, given)[0].dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"query must have the dtype of .*, got torch.float64"):
            layer(x.double(), x, x)
        layer.double()
        assert layer(*[x.double()] * 3)[0].dtype == torch.float64
        with pytest.raises(ValueError, match=r"query must .*float64, got torch.float32"):
            layer(x, x, x)
