"""A generator: streams join, leave, are saved and go on, and none is changed by the others."""

import pytest
import torch
from model_cases import STREAMS, VOCABULARY, draw, make
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.mechanisms import Mechanism, Traits, map_streams
from cosformer.models import Generator, Sampling, generate
from cosformer.models.sampling import Plan
from cosformer.models.slots import Slots, _changed
from cosformer.ops.triton import INTERPRETED

if INTERPRETED:
    from triton.runtime.interpreter import GridExecutor

GREEDY = Sampling(max_new_tokens=12, temperature=0)
WARM = Sampling(max_new_tokens=9, temperature=1.3, top_p=0.95, seed=4)
PROMPTS = [draw(n, 1, seed=n)[:, 0].tolist() for n in (3, 9, 1, 9, 5, 2)]
HYBRID = {"mechanism": "cosformer-gated softmax", "positions": "auto"}
KINDS = {
    "cosformer": {},
    "cosformer-gated": {"norm": True, "gate": "sigmoid", "positions": "auto"},
    "cosformer-multiscale": {"glu": True, "key_heads": 1, "positions": "none"},
    "softmax": {"positions": "rotary"},
    "hybrid": HYBRID,
    "convolved": {"mechanism": "softmax cosformer-gated", "conv": 3, "positions": "auto"},
    "local": {},
    "delta": {"conv": 3},
    "spe": {},
}


def build(name):
    given = {"mechanism": name, "tied": False, **KINDS[name]}
    return make(**given)


def collected(generator):
    found = {}
    for request, token in generator:
        found.setdefault(request, []).append(token)
    return found


@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_slots_of_every_mechanism_give_what_a_full_pass_does(name):
    """Streams at different positions, put into rows in another order, and moved in between."""
    model, tokens = make(name), draw(2, 14)
    slots, lengths = Slots(model, 4, 20), (9, 4)
    for row, length in enumerate(lengths):
        _, state = model.stream(tokens[row : row + 1, :length])
        slots.put_from(3 - row, state, 0, length)
        slots.begin(3 - row, int(tokens[row, length]), GREEDY)
    slots.move(3, 0)
    slots.move(2, 1)
    for _ in range(3):
        slots.step(2, Plan.of([GREEDY]))
        for row in range(2):
            at = int(slots.held.position[row])
            right = model(tokens[row : row + 1, :at])[0, -1]
            assert int(slots.held.chosen[row]) == int(right.argmax())
            slots.held.token[row] = tokens[row, at]  # as if it had been chosen
    taken = slots.take(0)
    logits, _ = model.stream(tokens[:1, 12:], taken.state)
    assert_close(logits, model(tokens[:1])[:, 12:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ahead", [1, 5])
@pytest.mark.parametrize("name", KINDS)
def test_requests_get_what_each_gets_alone_whenever_they_come(name, ahead):
    """Also where rounds of tokens are asked for before the last are looked at, as on a GPU."""
    model = build(name)
    length = {"length": 40} if model.backbone.keeps_tokens else {}
    generator, found = Generator(model, slots=3, piece=2, ahead=ahead, **length), {}
    generator._depth = int(ahead > 1)
    stop = tuple(range(0, VOCABULARY, 3))
    ways = [GREEDY, WARM, GREEDY, Sampling(max_new_tokens=30, top_k=5, stop=stop), WARM, GREEDY]
    waiting = list(zip(PROMPTS, ways, strict=True))
    for prompt, sampling in waiting[:2]:
        generator.submit(prompt, sampling)
    for n, (request, token) in enumerate(generator):
        found.setdefault(request, []).append(token)
        if n % 3 == 0 and len(found) < 6 and n // 3 < 4:  # others join while some run
            generator.submit(*waiting[2 + n // 3])
    alone = [generate(model, [prompt], sampling)[0] for prompt, sampling in waiting]
    assert [found[request] for request in range(6)] == alone
    assert generator.active == set()


@pytest.mark.parametrize("name", KINDS)
def test_a_stream_is_saved_and_goes_on_elsewhere(name, tmp_path):
    model = build(name)
    length = {"length": 40} if model.backbone.keeps_tokens else {}
    whole = generate(model, [PROMPTS[1]], WARM)[0]
    first = Generator(model, slots=2, **length)
    first.submit(PROMPTS[0], GREEDY)
    request = first.submit(PROMPTS[1], WARM)
    tokens = [next(first) for _ in range(7)]
    stream = first.save(request)
    given = stream.drawn
    torch.save(stream, tmp_path / "stream.pt")
    again = torch.load(tmp_path / "stream.pt", weights_only=False)
    rest = Sampling(max_new_tokens=9 - given, temperature=1.3, top_p=0.95, seed=4)
    assert 0 < given < 9
    assert collected_alone(model, again, rest, length) == whole[given:]
    assert [token for name, token in tokens if name == request] == whole[: len(tokens) // 2][:given]
    assert collected(first)[request][-1] == whole[-1]  # the saved one was left alone


def collected_alone(model, stream, sampling, length):
    generator = Generator(model, slots=1, **length)
    generator.submit(stream, sampling)
    return [token for _, token in generator]


@pytest.mark.parametrize("name", ["cosformer", "hybrid"])
def test_many_samples_of_one_prompt_read_it_once(name, monkeypatch):
    model = build(name)
    generator = Generator(model, slots=4)
    stream = generator.read(PROMPTS[1])
    monkeypatch.setattr(type(model.backbone), "stream", None)  # nothing is read again
    warm = {"max_new_tokens": 6, "temperature": 1.5}
    for seed in range(6):
        generator.submit(stream, Sampling(**warm, seed=seed))
    found = collected(generator)
    monkeypatch.undo()
    ways = [Sampling(**warm, seed=seed) for seed in range(6)]
    alone = [generate(model, [PROMPTS[1]], way)[0] for way in ways]
    assert list(found.values()) == alone
    assert len(set(map(tuple, alone))) > 1


def test_a_long_prompt_does_not_stall_running_streams():
    """One piece of the prompt, then a token of the others, in turn."""
    model, order = make(max_length=200), []
    generator = Generator(model, slots=2, piece=10)
    short = generator.submit([1, 2], Sampling(max_new_tokens=30, temperature=0))
    next(generator)
    stream = model.backbone.stream

    def read(tokens, *given, **options):
        order.append(list(tokens.shape))
        return stream(tokens, *given, **options)

    model.backbone.stream = read
    long = generator.submit(draw(1, 101)[0].tolist(), Sampling(max_new_tokens=2, temperature=0))
    for request, _ in generator:
        order.append(request)
    first = order.index(long)
    assert order[:first] == [[1, 10], short] * 9 + [[1, 10]] + [short]
    assert order.count(short) == 29


MODULES = (
    "cosformer.ops.rows",
    "cosformer.ops.token",
    "cosformer.ops.triton.likeliest",
    "cosformer.mechanisms.dense.softmax_token",
    "cosformer.nn.prepared",
)


class Operators(TorchDispatchMode):
    """The names of operators of torch that a GPU would start a kernel for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, given=(), options=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return function(*given, **(options or {}))


VIEWS = {"view", "slice", "select", "t", "detach", "new_empty", "empty", "unsqueeze", "expand"}
VIEWS |= {"alias", "transpose", "_unsafe_view"}


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("cosformer", 1), ("cosformer-gated", 1), ("softmax", 1), ("hybrid", 1), ("convolved", 1),
        ("hybrid", 6),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_step_by_kernels_is_that_by_torch_and_starts_few(name, batch, monkeypatch):
    """The kernels of a GPU, interpreted: five for each layer of sums, and two after the last."""
    model = build(name).float()
    layers = [block.attention.mechanism.traits.state for block in model.backbone.blocks]
    tokens, found = draw(batch, 3), []
    for kernels in (False, True):
        for module in MODULES if kernels else ():
            monkeypatch.setattr(f"{module}.on_gpu", lambda x: True)
        slots = Slots(model, batch, 16 if model.backbone.keeps_tokens else None)
        for n in range(3):
            slots.held.token.copy_(tokens[:, n])
            slots.step(batch, Plan.of([GREEDY]))
        found.append(slots)
    states = []
    map_streams(lambda *x: states.append(x) or x[0], *(each.held.layers for each in found))
    for mine, theirs in states:
        if mine.is_floating_point():  # who counts positions depends on the road
            assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0].held.chosen, found[1].held.chosen)
    launches = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *a, **b: launches.append(self.fn))
    with Operators() as operators:
        slots.step(batch, Plan.of([GREEDY]))
    embedding = 1 + (model.backbone.positions is not None) * 2
    more = 2 if model.config.conv == 0 else 2 + len(layers)  # each convolution has one
    if batch == 1:
        assert len(launches) == sum(5 if state == "constant" else 7 for state in layers) + more
        assert len(operators.names) == embedding
    else:  # products by libraries, of which there are four, and gelu
        assert len(launches) == sum(3 if state == "constant" else 5 for state in layers) + more
        assert len(operators.names) == embedding + 5 * len(layers) + 1


@pytest.mark.parametrize("name", ["cosformer", "spe"])
def test_prompts_that_are_read_together_have_few_tokens(name, monkeypatch):
    """Whether padding makes them equally long, or they are."""
    monkeypatch.setattr("cosformer.models.generator.TOGETHER", 40)
    model, shapes = make(name), []
    stream = model.backbone.stream
    model.backbone.stream = lambda x, *a, **b: shapes.append(x.shape) or stream(x, *a, **b)
    generate(model, [[n] * 12 for n in range(7)], GREEDY)
    assert shapes == [(3, 11), (3, 11), (1, 11)]


def test_few_graphs_are_made_and_kept(monkeypatch):
    plans = {Plan.of([Sampling(top_k=k)]) for k in range(2, 102)}
    assert len(plans) == 7
    monkeypatch.setattr("cosformer.models.slots.GRAPHS", 3)
    monkeypatch.setattr(Slots, "_record", lambda self, *given: given)
    slots, plan = Slots(make(), 8), Plan()
    for count in (1, 2, 4, 1, 8):
        assert slots._graph(count, plan) == (count, plan)
    assert slots.recorded(plan) == [4, 1, 8]  # what was used longest ago is gone


def test_memory_is_declared_and_a_full_cache_is_named():
    gated, hybrid = build("cosformer-gated"), build("hybrid")
    once, twice = (Generator(gated, slots=slots).memory for slots in (2, 4))
    assert {name: 2 * size for name, size in once.items()} == twice
    short, long = (Generator(hybrid, slots=3, length=length).memory for length in (10, 20))
    assert short["cosformer-gated"] == long["cosformer-gated"]
    assert long["softmax"] == 2 * short["softmax"] == 3 * 20 * 2 * 16 * 8
    full = Generator(hybrid, slots=3, length=10)
    message = "length must be at least 11 for max_new_tokens=9 after a prompt of 3 tokens, got 10"
    with pytest.raises(ValueError, match=message):
        full.submit([1, 2, 3], Sampling(max_new_tokens=9))
    full.submit([1, 2], Sampling(max_new_tokens=9, temperature=0))
    assert len(collected(full)[0]) == 9
    with pytest.raises(ValueError, match="length must be None where no layer keeps all tokens"):
        Generator(gated, length=10)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_to_the_limit_of_its_model_whatever_the_room(name):
    """And rows that run along stay within the tables of positions."""
    model, longest = make(name, max_length=12), Sampling(max_new_tokens=10, temperature=0)
    tokens = [1, 2, 3]
    for _ in range(10):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, [tokens[:3]], longest) == [tokens[3:]]
    room = {"length": 13} if model.backbone.keeps_tokens else {}
    generator = Generator(model, slots=2, ahead=16, **room)
    generator.submit(tokens[:3], longest)
    generator.submit(tokens[:11], Sampling(max_new_tokens=2, temperature=0))
    assert collected(generator) == {0: tokens[3:], 1: tokens[11:]}


def test_an_idle_row_that_runs_along_does_no_harm():
    model = build("hybrid")
    slots = Slots(model, 2, 6)
    for _ in range(9):  # past its room
        slots.step(2, Plan.of([GREEDY]))
    assert slots.held.position.tolist() == [5, 5]
    finite = []
    map_streams(lambda x: finite.append(bool(x.isfinite().all())) or x, slots.held)
    assert all(finite)


@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_a_step_is_undone_by_what_it_has_changed(name):
    """As before a graph is recorded: caches need no copy, the next step writes over them."""
    model = make(name)
    found = []
    for undoes in (False, True):
        slots = Slots(model, 2, 20)
        slots.held.token.copy_(torch.tensor([3, 4]))
        for n in range(9):
            if undoes and n == 7:
                kept = _changed(slots.held)
                before = [tensor.clone() for tensor in kept]
                slots.held.token.add_(5).remainder_(VOCABULARY)
                slots.step(2, Plan.of([GREEDY]))
                for tensor, value in zip(kept, before, strict=True):
                    tensor.copy_(value)
            slots.step(2, Plan.of([GREEDY]))
        found.append(slots.held)
    pairs = []
    map_streams(lambda *x: pairs.append(x) or x[0], *found)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("eps", [None, 0.1])
@torch.no_grad()
def test_a_step_norms_heads_by_the_eps_of_the_layer(eps):
    model, tokens = make(norm=True).float(), draw(1, 4)
    for block in model.backbone.blocks:
        block.attention.norm.eps = eps
        block.attention.in_proj_weight *= 1e-4  # so small that 1e-7 is much
        block.attention.in_proj_bias *= 1e-4
    slots = Slots(model, 1)
    for n in range(4):
        slots.held.token.copy_(tokens[:, n])
        slots.step(1, Plan.of([GREEDY]))
    right = model.stream(tokens)[1]
    mine, theirs = (x.layers[1].mechanism.key_value for x in (slots.held, right))
    assert_close(mine, theirs, rtol=1e-4, atol=0)


def test_modules_that_were_exchanged_or_hooked_are_called():
    """As adapters do: a step must not read weights past them."""
    model, prompt = build("cosformer-gated"), [1, 2, 3]
    plain = generate(model, [prompt], GREEDY)
    block = model.backbone.blocks[0]
    for module in (block.attention.out_proj, block.feed_forward.up, block.feed_forward, model.head):
        hook = module.register_forward_hook(lambda module, given, out: -out)
        hooked = generate(model, [prompt], GREEDY)
        assert hooked != plain
        hook.remove()
    assert generate(model, [prompt], GREEDY) == plain


def test_a_cancelled_request_gives_no_more_and_others_go_on():
    model = make()
    generator = Generator(model, slots=2)
    requests = [generator.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
    next(generator)
    generator.cancel(requests[0])
    generator.cancel(requests[2])  # which still waits
    found = collected(generator)
    assert list(found) == [requests[1]]
    assert found[requests[1]] == generate(model, [PROMPTS[1]], GREEDY)[0]


def test_a_diverged_model_is_named():
    model = make()
    with torch.no_grad():
        model.backbone.embedding.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits must be finite, got NaN or inf: the model has"):
        generate(model, [[1, 2]], GREEDY)


@pytest.mark.parametrize("name", ["cosformer", "softmax", "sparse"])
def test_a_diverged_stream_takes_nothing_from_others_or_from_the_next_in_its_row(name):
    model = make(name, tied=False) if name == "sparse" else build(name)
    bad, ways = VOCABULARY - 1, {"temperature": 0, "data_tokens": VOCABULARY - 1}
    alone = [generate(model, [p], Sampling(max_new_tokens=9, **ways))[0] for p in ([1, 2], [3, 4])]
    with torch.no_grad():
        model.backbone.embedding.weight[bad] = torch.nan
    generator = Generator(model, slots=2)
    generator.submit([1] * 9 + [bad] * 9, Sampling(max_new_tokens=5, **ways))
    other = generator.submit([1, 2], Sampling(max_new_tokens=9, **ways))
    with pytest.raises(ValueError, match="logits must be finite"):
        next(generator)
    after = generator.submit([3, 4], Sampling(max_new_tokens=9, **ways))
    assert collected(generator) == {other: alone[0], after: alone[1]}
    assert generator.active == set()


def test_prompts_that_cannot_be_read_end_and_later_ones_do_not_wait_for_them():
    model, way = build("cosformer-gated"), Sampling(max_new_tokens=9, temperature=0, data_tokens=22)
    right = generate(model, [[1, 2]], way)[0]
    with torch.no_grad():
        model.backbone.embedding.weight[22] = torch.nan
    generator = Generator(model, slots=2)
    generator.submit([22, 22, 1], way)
    with pytest.raises(ValueError, match="log_decay must be at most 0, got nan"):
        next(generator)
    assert generator.active == set()
    later = generator.submit([1, 2], way)
    assert collected(generator) == {later: right}


def test_a_mechanism_that_sees_some_of_its_cache_must_say_which():
    class Windowed(Mechanism):
        traits = Traits(causal="exact", state="window")

        def keep(self, position):
            return min(position, 4)

    k = torch.zeros(1, 2, 0, 8)
    with pytest.raises(ValueError, match="Windowed cannot generate: it must have seen_held, or"):
        Windowed(2, 8).held_state(k, k, 10, torch.zeros(1, dtype=torch.int64))


BAD = [
    ({"model": 3}, "model must be a LanguageModel, got int"),
    ({"slots": 0}, "slots must be a whole number from 1 on, got 0"),
    ({"piece": 0}, "piece must be a whole number from 1 on, got 0"),
    ({"ahead": 0}, "ahead must be a whole number from 1 on, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Generator(**{"model": make(), **arguments})


def test_bad_requests_are_named():
    model = make()
    generator = Generator(model, slots=1)
    for prompt, sampling, message in (
        ([VOCABULARY], GREEDY, "prompt must hold tokens from 0 to 22, got 23"),
        ([1], None, "sampling must be a Sampling, got NoneType"),
        ([1] * 40, GREEDY, "max_new_tokens must be at most 9 after a prompt of 40"),
        (Generator(make(vocabulary=99), 1).read([98]), GREEDY, "tokens from 0 to 22, got 98"),
        (Generator(make(layers=1), 1).read([1]), GREEDY, "one stream of 2 layers, got 1 of 1"),
        (Generator(make(heads=1), 1).read([1]), GREEDY, r"prompt must .* layer 0 differs: .* = \["),
        (Generator(make("softmax"), 1).read([1]), GREEDY, "state must be a State, got a? ?Cache"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            generator.submit(prompt, sampling)
    with pytest.raises(ValueError, match=r"left to make, got 7, which is unknown, .* ahead=1"):
        generator.save(7)
    model.train()
    for call in (lambda: Generator(model), lambda: generator.submit([1], GREEDY)):
        with pytest.raises(ValueError, match="model must be in evaluation mode"):
            call()


def test_a_prompt_is_what_it_was_when_it_was_submitted():
    model, prompt = build("cosformer"), list(PROMPTS[1])
    (right,) = generate(model, [prompt], GREEDY)
    generator = Generator(model, slots=1, piece=1)
    generator.submit(prompt, GREEDY)
    prompt[:] = [1, 1]
    assert [token for _, token in generator] == right
    with pytest.raises(TypeError, match="prompt must be tokens, got a Stream"):
        generator.read(generator.read(PROMPTS[0]))


@pytest.mark.parametrize("name", ["cosformer-multiscale", "hybrid"])
def test_weights_may_change_between_streams(name):
    model = build(name)
    optimiser = torch.optim.SGD(model.parameters(), lr=9.0)
    turned = {name: x.flip(0) for name, x in model.state_dict().items()}
    generator = Generator(model, slots=2)
    changes = (optimiser.step, lambda: model.load_state_dict(turned), model.float)
    for change in changes:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        change()
        generator.submit(PROMPTS[0], GREEDY)
        assert [[token for _, token in generator]] == generate(model, PROMPTS[:1], GREEDY)


def test_a_sampled_stream_does_not_depend_on_how_others_choose():
    model, plain = build("cosformer"), Sampling(max_new_tokens=9, seed=9)
    (alone,) = generate(model, [PROMPTS[0]], plain)
    for other in (WARM, Sampling(max_new_tokens=9, top_k=3), GREEDY):
        generator = Generator(model, slots=2)
        generator.submit(PROMPTS[0], plain)
        generator.submit(PROMPTS[1], other)
        assert [token for request, token in generator if request == 0] == alone
