"""Steps of whole models as CUDA graphs: the numbers of the full pass, whoever joins or leaves."""

import pytest
import torch
from model_cases import STREAMS, draw, made, make

import cosformer.models.slots
from cosformer.mechanisms import map_streams
from cosformer.models import Generator, ModelConfig, Sampling, generate
from cosformer.models.sampling import Plan
from cosformer.models.slots import Slots
from cosformer.ops import normed_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = Sampling(max_new_tokens=24, temperature=0)
WARM = Sampling(max_new_tokens=20, temperature=1.3, top_k=7, seed=3)
WIDE = {"layers": 3, "width": 256, "heads": 4, "vocabulary": 300, "max_length": 64, "tied": False}
KINDS = {
    "cosformer": {"mechanism": "cosformer"},
    "gated": {
        "mechanism": "cosformer-gated", "norm": True, "gate": "sigmoid", "positions": "auto",
    },
    "multiscale": {"mechanism": "cosformer-multiscale", "key_heads": 2, "glu": True, "gate": True},
    "hybrid": {"mechanism": "cosformer-gated softmax cosformer-gated", "positions": "auto"},
    "softmax": {"mechanism": "softmax", "positions": "rotary", "key_heads": 2},
    "convolved": {"mechanism": "cosformer-gated softmax local", "conv": 4, "positions": "auto"},
}  # fmt: skip


def build(name):
    return made(ModelConfig(**WIDE, **KINDS[name]))


def room(model, length):
    return length if model.backbone.keeps_tokens else None


@torch.no_grad()
def logits_of_steps(model, tokens, monkeypatch, *, prompt=3):
    """Logits of replayed steps over given tokens `[B, T]`, after prompts that are read."""
    batch, length = tokens.shape
    seen = torch.zeros(batch, model.config.vocabulary, device="cuda", dtype=model.head.weight.dtype)

    def watched(x, added, norm, head):
        x, out = normed_linear(x, added, norm, head)
        seen.copy_(out)
        return x, out

    monkeypatch.setattr(cosformer.models.slots, "normed_linear", watched)
    slots, found = Slots(model, batch, room(model, length)), []
    _, state = model.backbone.stream(tokens[:, :prompt])
    for row in range(batch):
        slots.put_from(row, state, row, prompt)
        slots.begin(row, 0, GREEDY)
    for n in range(prompt, length):
        slots.held.token.copy_(tokens[:, n])
        slots.step(batch, Plan.of([GREEDY]))
        found.append(seen.clone())
    assert len(slots._graphs) == 1  # a test without a graph would have shown nothing
    return torch.stack(found, 1)


def error(found, right):
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    [(name, batch, torch.bfloat16) for name in KINDS for batch in (1, 9)]
    + [("multiscale", 3, torch.float32), ("convolved", 3, torch.float32)],
)
@torch.no_grad()
def test_a_replayed_step_is_the_full_pass(name, batch, dtype, monkeypatch):
    """Its error is at most twice that of the full pass in the same precision."""
    model = build(name)
    tokens = draw(batch, 40)
    model = model.to("cuda", dtype)
    exact = model.double()  # of the rounded weights
    right = exact(tokens.cuda())[:, 3:]
    model = model.to(dtype)
    whole = error(model(tokens.cuda())[:, 3:], right)
    found = error(logits_of_steps(model, tokens.cuda(), monkeypatch), right)
    assert found <= 2 * whole + 1e-6, (found, whole)


@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_a_replayed_step_of_every_mechanism_is_the_full_pass(name, monkeypatch):
    model, tokens = make(name).cuda(), draw(2, 20).cuda()
    right = model(tokens)[:, 3:]
    assert error(logits_of_steps(model, tokens, monkeypatch), right) < 1e-6
    model = model.float()
    assert error(logits_of_steps(model, tokens, monkeypatch), right) < 1e-3


@torch.no_grad()
def held_after(model, steps, *, length, batch):
    """All that streams hold after so many steps."""
    slots = Slots(model, batch, room(model, length))
    slots.held.token.copy_(torch.arange(1, batch + 1))
    for _ in range(steps):
        slots.step(batch, Plan.of([GREEDY]))
    return slots.held


def assert_same(one, other):
    pairs = []
    map_streams(lambda *x: pairs.append(x) or x[0], one, other)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize(("name", "batch"), [(name, 1) for name in KINDS] + [("convolved", 3)])
def test_graphs_and_early_launches_change_no_bit(name, batch, monkeypatch):
    """Nothing is read before it is written, and nothing is written over before it is read."""
    model, found = build(name).to("cuda", torch.bfloat16), []
    can = torch.cuda.get_device_capability() >= (9, 0)
    for records, early in [(True, False), (False, False)] + [(True, True), (False, True)] * can:
        monkeypatch.setattr(Slots, "records", records)
        monkeypatch.setattr("cosformer.ops.triton.rows._can_start_early", lambda _, e=early: e)
        found.append(held_after(model, 60, length=64, batch=batch))
    for other in found[1:]:
        assert_same(found[0], other)


@pytest.mark.parametrize("name", [name for name in STREAMS if "synth" in name] + ["softmax"])
def test_rows_that_run_along_stay_within_the_tables_of_positions(name):
    """Those of mechanisms, and that of the embedding: the device would assert it."""
    model = make(name, max_length=12).cuda()
    held = held_after(model, 20, length=40, batch=3)
    torch.cuda.synchronize()
    assert int(held.position.max()) < 12


@pytest.mark.parametrize("name", ["gated", "hybrid", "convolved"])
def test_a_stream_from_a_cpu_goes_on(name):
    model, prompt = build(name), draw(1, 9)[0].tolist()
    right = generate(model, [prompt], GREEDY)[0]
    stream = Generator(model, 1, length=room(model, 48)).read(prompt)
    generator = Generator(model.cuda(), 2, length=room(model, 48))
    generator.submit(stream, GREEDY)
    assert [token for _, token in generator] == right


def test_few_graphs_are_kept_and_those_that_went_are_recorded_again(monkeypatch):
    monkeypatch.setattr(cosformer.models.slots, "GRAPHS", 2)
    model, prompts = build("gated").cuda(), [[1, 2, 3], [4]]
    ways = [GREEDY, WARM, Sampling(max_new_tokens=20, top_p=0.9), GREEDY]
    generator = Generator(model, slots=2)
    for way in ways:
        requests = [generator.submit(prompt, way) for prompt in prompts]
        found = {request: [] for request in requests}
        for request, token in generator:
            found[request].append(token)
        assert list(found.values()) == [generate(model, [prompt], way)[0] for prompt in prompts]
        assert len(generator._streams._graphs) <= 2


@pytest.mark.parametrize("name", KINDS)
def test_requests_get_what_each_gets_alone_whenever_they_come(name):
    model = build(name).cuda()  # float64: no rounding decides between two tokens
    prompts = [draw(n, 1, seed=n)[:, 0].tolist() for n in (3, 9, 1, 9, 5, 2, 17)]
    ways = [GREEDY, WARM, GREEDY, WARM, GREEDY, WARM, GREEDY]
    generator = Generator(model, slots=4, piece=4, ahead=3, length=room(model, 48))
    found = {n: [] for n in range(7)}
    for n in range(3):
        generator.submit(prompts[n], ways[n])
    for count, (request, token) in enumerate(generator):
        found[request].append(token)
        if count % 9 == 0 and 3 + count // 9 < 7:
            generator.submit(prompts[3 + count // 9], ways[3 + count // 9])
    alone = [generate(model, [prompt], way)[0] for prompt, way in zip(prompts, ways, strict=True)]
    assert list(found.values()) == alone


@pytest.mark.parametrize("name", ["gated", "hybrid"])
def test_a_stream_is_saved_cloned_and_goes_on(name):
    model = build(name).float().cuda()
    prompt = draw(1, 9)[0].tolist()
    whole = generate(model, [prompt], WARM)[0]
    generator = Generator(model, slots=4, ahead=2, length=room(model, 48))
    request = generator.submit(prompt, WARM)
    next(generator)
    stream = generator.save(request)
    for _ in range(3):
        generator.submit(stream, Sampling(max_new_tokens=20 - stream.drawn, temperature=1.3,
                                          top_k=7, seed=3))  # fmt: skip
    found = {}
    for name, token in generator:
        found.setdefault(name, []).append(token)
    assert [found[name] for name in (1, 2, 3)] == [whole[stream.drawn :]] * 3


def test_asking_for_rounds_waits_for_nothing():
    model = build("gated").to("cuda", torch.bfloat16)
    generator = Generator(model, slots=4)
    for n in range(3):
        generator.submit([1, 2, n], Sampling(max_new_tokens=400, temperature=0))
    next(generator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            assert generator._launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(list(generator)) == 3 * 400 - 1


@pytest.mark.parametrize("sampling", [GREEDY, WARM, Sampling(top_p=0.9), Sampling(data_tokens=20)])
def test_a_gpu_chooses_what_a_cpu_does(sampling):
    model, prompts = build("gated"), [[1, 2, 3], [4]]
    right = generate(model, prompts, sampling)
    assert generate(model.cuda(), prompts, sampling) == right


def test_a_diverged_model_is_named():
    model = build("gated").to("cuda", torch.bfloat16)
    with torch.no_grad():
        model.backbone.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits must be finite"):
        generate(model, [[1, 2]], GREEDY)
