"""Generation: the stream is the full pass, prompts do not see each other, memory is flat."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from model_cases import HYBRIDS, STREAMS, VOCABULARY, draw, make, pad
from streaming import in_pieces
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import cosformer.models.slots
from cosformer.models import (
    Backbone,
    Generator,
    ModelConfig,
    Sampling,
    create_model,
    generate,
    generate_tokens,
)
from cosformer.models.sampling import choose
from cosformer.models.slots import Step
from cosformer.tasks import Bytes

GREEDY = Sampling(max_new_tokens=12, temperature=0)
SHORT = Sampling(max_new_tokens=7, temperature=0)
PROMPTS = [draw(n, 1, seed=n)[:, 0].tolist() for n in (3, 9, 1, 9)]
KINDS = ["cosformer", "cosformer-gated", "linear", "gated-delta", "spe", "softmax", "local"]
"""Mechanisms whose streams differ: sums, controls and a norm, absolute positions, all, a window."""


def by_full_passes(model, prompt, count, *source):
    """Greedy decoding as one would write it without a state."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        logits = model(*source, tokens)[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens[0, len(prompt) :].tolist()


SCHEMES = [
    # a tied one that has learnt nothing repeats
    *((name, {"tied": False}) for name in (*KINDS, *HYBRIDS)),
    *(("cosformer", {"positions": scheme, "key_heads": 1}) for scheme in ("none", "sinusoidal")),
    *((name, {"positions": "rotary", "glu": True}) for name in ("cosformer", "softmax")),
]


@pytest.mark.parametrize(("name", "options"), SCHEMES)
def test_prompts_together_get_what_each_gets_by_full_passes(name, options):
    model = make(name, **options)
    together = generate(model, PROMPTS, SHORT)
    assert together == [by_full_passes(model, prompt, 7) for prompt in PROMPTS]
    assert len({token for tokens in together for token in tokens}) > 1


@pytest.mark.parametrize("name", [*STREAMS, "gated", "gates"])
def test_under_autocast_each_token_is_about_the_likeliest(name):
    model = make(name, tied=False).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        texts = generate(model, PROMPTS[:2], SHORT)
    for prompt, text in zip(PROMPTS, texts, strict=False):
        logits = model(torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1].detach()
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert_close(chosen, logits.amax(-1), atol=0.03 * float(logits.std()), rtol=0.02)


@pytest.mark.parametrize("name", ["cosformer", "spe"])
def test_prompts_together_are_sampled_as_each_alone(name):
    model, options = make(name), {"max_new_tokens": 8, "temperature": 1.5, "top_p": 0.9}
    together = generate(model, PROMPTS, Sampling(**options, top_k=15, seed=3))
    for n, prompt in enumerate(PROMPTS):
        own = Sampling(**options, top_k=15, seed=3 + n)
        assert generate(model, [prompt], own) == [together[n]]


@pytest.mark.parametrize("name", ["cosformer", "cosformer-gated", "softmax", "spe"])
def test_an_encoder_decoder_generates_what_full_passes_do(name):
    model = make(name, kind="encoder-decoder")
    sources = [draw(n, 1, seed=n)[:, 0].tolist() for n in (4, 11, 2)]
    prompts = PROMPTS[1:]  # two of one length, which go together
    found = generate(model, prompts, Sampling(max_new_tokens=5, temperature=0), sources=sources)
    for prompt, source, tokens in zip(prompts, sources, found, strict=True):
        assert tokens == by_full_passes(model, prompt, 5, torch.tensor([source]))


ENDLESS = {
    "multiscale": ("cosformer-multiscale", {"horizon": 20, "decay": 0.4}),
    "learned": ("cosformer-multiscale", {"learned": True}),
    "gated": ("cosformer-gated", {"horizon": 20}),
    "cosformer": ("cosformer", {"horizon": 20, "decay": [0.2, 0.4]}),
}


@pytest.mark.parametrize(("name", "options"), ENDLESS.values(), ids=ENDLESS)
def test_a_model_whose_decays_vanish_and_that_learns_no_positions_writes_without_end(name, options):
    torch.manual_seed(0)
    config = ModelConfig(
        mechanism=name, options=options, positions="none", max_length=8, width=16, tied=False
    )
    model = create_model(config).double().eval()
    assert model.backbone.limit is None
    found = generate(model, [[1, 2, 3]], Sampling(max_new_tokens=60, temperature=0))
    assert found == [by_full_passes(model, [1, 2, 3], 60)]


@pytest.mark.parametrize("name", [*STREAMS, *HYBRIDS])
@torch.no_grad()
def test_pieces_and_steps_of_a_stream_are_the_full_pass(name):
    model, tokens = make(name), draw(2, 20)
    out, state = in_pieces(model, tokens, [7, 1, 1, 10, 1], model.empty_state(2))
    # signed sums of about 0 stand below the fraction bar of some
    loose = {"rtol": 1e-4, "atol": 1e-4} if name in ("identity", "leaky-relu") else {}
    assert_close(out, model(tokens), **loose)
    assert state.length == 20
    assert state.position.tolist() == [20, 20]


@torch.no_grad()
def test_an_encoder_decoder_streams():
    model, tokens = make(kind="encoder-decoder"), draw(2, 12, seed=2)
    source, mask = pad(draw(2, 9), "left")
    state = model.empty_state(source, mask)
    out, _ = in_pieces(model, tokens, [5, 1, 1, 5], state)
    assert_close(out, model(source, tokens, mask))
    with pytest.raises(TypeError, match="state must be a ModelState, got NoneType"):
        model.stream(tokens, None)


@pytest.mark.parametrize("name", ["cosformer", "gated-delta", "softmax", "local"])
@torch.no_grad()
def test_a_stream_goes_on_from_prompts_padded_on_the_left(name):
    model, tokens, last = make(name), draw(2, 11), draw(2, 1, seed=2)
    padded, mask = pad(tokens, "left")
    first, state = model.stream(padded, key_mask=mask)
    again, _ = model.stream(last, state)  # the state stays as it is, and is used up by a step
    second, _ = model.step(last, state)
    right = model(torch.cat([tokens, last], 1))
    assert_close(torch.cat([first[:, 5:], second], 1), right)
    assert_close(again, second)


@pytest.mark.parametrize("name", ["cosformer-gated", "gated-delta", "softmax", "local"])
@torch.no_grad()
def test_padding_may_stand_among_the_first_tokens_of_a_stream(name):
    model, tokens, last = make(name, conv=3), draw(2, 6), draw(2, 1, seed=2)
    mask = torch.tensor([[1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1]]).bool()
    hidden = []
    vectors, state = model.backbone.stream(tokens, key_mask=mask, hidden=hidden)
    assert state.position.tolist() == [4, 4]
    after, _ = model.step(last, state)
    whole = model.backbone(tokens, mask)
    assert_close(vectors[mask], whole[mask])
    assert_close(model.backbone.norm(hidden[-1])[mask], whole[mask])
    for row in range(2):
        alone = torch.cat([tokens[row][mask[row]], last[row]])[None]
        assert_close(after[row], model(alone)[0, -1:])


def test_padding_behind_real_tokens_of_a_stream_is_refused():
    model, tokens = make(), draw(2, 4)
    mask = torch.tensor([[True] * 4, [False, True, True, False]])
    message = r"with a real token behind it, got other padding in row 1"
    with pytest.raises(ValueError, match=message):
        model.stream(tokens, key_mask=mask)
    late = torch.tensor([[False, False, True, True], [False] * 4])
    _, state = model.stream(tokens, key_mask=late)  # a long prompt may be read in pieces
    assert state.position.tolist() == [2, 0]
    with pytest.raises(ValueError, match="row 0"):
        model.stream(tokens, state, key_mask=late)
    out, state = model.stream(
        tokens, state, key_mask=late.flip(0) | torch.tensor([[True], [False]])
    )
    assert_close(out[1:, 2:], model(tokens[1:, 2:]))


def test_prompts_may_be_arrays_and_tensors_as_a_vocabulary_gives_them():
    model, text, few = make(vocabulary=256), "To be", Sampling(max_new_tokens=4, temperature=0)
    expected = generate(model, [text.encode(), text.encode()], few)
    tokens = Bytes().encode(text)
    assert generate(model, [tokens, torch.tensor(tokens)], few) == expected
    assert generate(model, torch.tensor(tokens).expand(2, -1), few) == expected
    assert list(generate_tokens(model, tokens, few)) == expected[0]
    generator = Generator(model, slots=2)
    for given in (tokens, generator.read(tokens)):
        generator.submit(given, few)
        assert [token for _, token in generator] == expected[0]
    with pytest.raises(TypeError, match=r"prompts\[0\] must be a sequence of ints, got 0\.5"):
        generate(model, [torch.tensor([0.5])], few)
    with pytest.raises(TypeError, match=r"prompts\[0\] must be a sequence of ints, got int"):
        generate(model, torch.tensor([1, 2]), few)


@pytest.mark.parametrize("arguments", [{"mechanism": "spe"}, {"positions": "rotary"}])
def test_padding_is_refused_where_it_would_shift_positions(arguments):
    model, mask = make(**arguments), torch.tensor([[False, True]])
    with pytest.raises(ValueError, match=r"key_mask must be all True in a stream with mechanism="):
        model.stream(draw(1, 2), key_mask=mask)
    both = make(kind="encoder-decoder")
    with pytest.raises(ValueError, match=r"all True in a stream with .* and a context: padding"):
        both.backbone.stream(draw(1, 2), both.empty_state(draw(1, 3)), key_mask=mask)


@pytest.fixture
def calls(monkeypatch):
    """The calls that read tokens: what they do, the shape, and the numbers that are then held."""
    found = []

    def stream(self, tokens, *given, _method=Backbone.stream, **options):
        found.append(("stream", list(tokens.shape), 0))
        return _method(self, tokens, *given, **options)

    def step(self, plan, _method=Step.__call__):
        _method(self, plan)
        held = [leaf.numel() for leaf in tree_leaves(self.held) if isinstance(leaf, torch.Tensor)]
        found.append(("step", list(self.held.token.shape), sum(held)))

    monkeypatch.setattr(Backbone, "stream", stream)
    monkeypatch.setattr(Step, "__call__", step)
    return found


@pytest.mark.parametrize("name", ["cosformer", "softmax"])
def test_a_prompt_is_read_once_and_then_one_token_at_a_time(name, calls):
    generate(make(name), PROMPTS, GREEDY)
    assert [call[:2] for call in calls] == [("stream", [4, 8]), *[("step", [4])] * 12]
    assert len({held for _, _, held in calls[1:]}) == 1  # memory does not grow


def test_prompts_of_an_absolute_mechanism_go_by_their_lengths(calls):
    generate(make("spe"), PROMPTS, Sampling(max_new_tokens=1))
    assert [shape for name, shape, _ in calls if name == "stream"] == [[1, 2], [2, 8]]


def test_generation_ends_when_every_row_has_ended(calls):
    stop = tuple(range(VOCABULARY))
    found = generate(make(), PROMPTS, Sampling(max_new_tokens=30, stop=stop))
    assert [len(tokens) for tokens in found] == [1, 1, 1, 1]
    assert [name for name, _, _ in calls] == ["stream", "step"]


@torch.no_grad()
def test_a_step_changes_sums_in_place_and_a_stream_copies_them():
    model = make()
    _, state = model.stream(draw(2, 5))
    sums = state.layers[0].mechanism.key_value
    before = sums.clone()
    model.stream(draw(2, 1), state)
    assert torch.equal(sums, before)
    _, after = model.step(draw(2, 1), state)
    assert after.layers[0].mechanism.key_value is sums
    assert not torch.equal(sums, before)


@pytest.mark.parametrize(("layers", "most"), [(1, 20), (2, 32)])
def test_a_generated_token_goes_through_few_files(layers, most):
    """Changes of file from one call of this package to the next, while a token is made."""
    tokens = generate_tokens(make(layers=layers).float(), [1, 2, 3], GREEDY)
    next(tokens), next(tokens)
    root, road = str(Path(cosformer.__file__).parent), []

    def called(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            road.append(frame.f_code.co_filename)

    sys.setprofile(called)
    try:
        next(tokens)
    finally:
        sys.setprofile(None)
    assert sum(a != b for a, b in itertools.pairwise(road)) <= most
    assert len(set(road)) <= 10


def test_logits_are_made_of_the_last_token_alone(monkeypatch):
    seen = []

    def look(logits, *given):
        seen.append(list(logits.shape))
        return choose(logits, *given)

    monkeypatch.setattr(cosformer.models.slots, "choose", look)
    generate(make(), PROMPTS, Sampling(max_new_tokens=2))
    assert seen == [[4, VOCABULARY]] * 2


def test_it_ends_with_a_stop_token_row_by_row():
    model, options = make(), {"max_new_tokens": 12, "temperature": 5.0}
    free = generate(model, PROMPTS, Sampling(**options))
    stop = (free[0][4], free[1][2])

    def cut(tokens):
        ends = [n for n, token in enumerate(tokens) if token in stop]
        return tokens[: ends[0] + 1] if ends else tokens

    found = generate(model, PROMPTS, Sampling(**options, stop=stop))
    assert found == [cut(tokens) for tokens in free]
    after = free[0][len(found[0]) :]
    assert any(token not in stop for token in after)  # what came next would be seen
    assert len({len(tokens) for tokens in found}) > 1


def test_tokens_come_one_by_one_without_gradients_and_leave_the_mode_alone():
    model = make()
    tokens = generate_tokens(model, PROMPTS[0], GREEDY)
    assert list(itertools.islice(tokens, 3)) == generate(model, PROMPTS[:1], GREEDY)[0][:3]
    assert torch.is_grad_enabled()  # while the generator waits
    both = make(kind="encoder-decoder")
    streamed = list(generate_tokens(both, PROMPTS[0], GREEDY, source=[1, 2, 3]))
    assert streamed == generate(both, PROMPTS[:1], GREEDY, sources=[[1, 2, 3]])[0]


def test_the_whole_limit_can_be_used_and_no_prompts_give_no_tokens():
    found = generate(make(), PROMPTS, Sampling(max_new_tokens=40))
    assert [len(tokens) for tokens in found] == [40] * 4
    assert generate(make(), [], Sampling(max_new_tokens=99)) == []


def test_bad_steps_are_named():
    with pytest.raises(ValueError, match=r"reformer cannot stream. It can do: .* the nearest"):
        make("reformer").empty_state(2)
    model = make()
    for tokens, message in (
        (draw(2, 2), r"tokens must be \[batch, 1\] in step, got \[2, 2\]: use stream"),
        (draw(3, 1), "state must be of 3 streams, the batch of tokens, got 2"),
        (torch.zeros(2, 1), r"tokens must be int64 \[batch, length\], .* got .*float"),
    ):
        with pytest.raises(ValueError, match=message):
            model.step(tokens, model.empty_state(2))
    with pytest.raises(TypeError, match="state must be a ModelState, got NoneType"):
        model.step(draw(2, 1), None)


BAD = [
    ({"prompts": [[1], []]}, r"prompts\[1\] must have at least one token, got none"),
    ({"prompts": [[1, 99]]}, r"prompts\[0\] must hold tokens from 0 to 22, got 99"),
    ({"prompts": [[1], "text"]}, r"prompts\[1\] must be a sequence of ints, got str"),
    ({"prompts": [[1], [2, 1.5]]}, r"prompts\[1\] must be a sequence of ints, got 1\.5"),
    ({"prompts": [[b"abc"]]}, r"prompts\[0\] must be a sequence of ints, got b'abc'"),
    ({"prompts": [[True]]}, r"prompts\[0\] must be a sequence of ints, got True"),
    ({"prompts": 5}, "prompts must be a sequence of sequences, got int"),
    ({"sampling": None}, "sampling must be a Sampling, got NoneType"),
    ({"sources": [[1]] * 4}, "sources must be None without an encoder-decoder"),
    ({"sampling": Sampling(stop=(23,))}, r"stop must hold tokens from 0 to 22, got \(23,\)"),
    (
        {"sampling": Sampling(max_new_tokens=41)},
        "max_new_tokens must be at most 40 after a prompt of 9 .* limit of 48 .* got 41: a model",
    ),
    ({"prompts": [[1], [1] * 49]}, r"prompt must be at most 48 tokens, .* limit .*, got 49: a mod"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        generate(make(), **{"prompts": PROMPTS, **arguments})


def test_bad_models_and_prompts_are_named_at_once():
    both, text = make(kind="encoder-decoder"), make(kind="classifier")
    for model, sources, error, message in (
        (make().train(), None, ValueError, "model must be in evaluation mode"),
        (text, None, TypeError, r"must be a LanguageModel or .*, got Classifier"),
        (both, None, ValueError, "sources must be given to an encoder-decoder"),
        (both, [[1]], ValueError, "sources must be one per prompt, 4, got 1"),
    ):
        with pytest.raises(error, match=message):
            generate(model, PROMPTS, sources=sources)
    with pytest.raises(TypeError, match=r"prompts\[0\] must be a sequence of ints, got b'abc'"):
        generate_tokens(make(), [b"abc"])  # before the first token is asked for


@torch.no_grad()
def test_a_step_refuses_the_state_of_another_model():
    token = torch.zeros(1, 1, dtype=torch.int64)
    model = create_model(ModelConfig(layers=2)).eval()
    for other, message in (
        (ModelConfig(layers=1), "state must be of 2 layers, got 1"),
        (ModelConfig(layers=2, mechanism="softmax"), "state must be a State"),
        (ModelConfig(layers=2, max_length=77), "horizon must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model.step(token, create_model(other).eval().stream(token)[1])
