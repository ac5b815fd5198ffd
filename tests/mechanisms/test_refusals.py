"""Bad requests name the mechanism, what it can do, and the nearest that can."""

import dataclasses

import pytest
import torch
from mechanism_cases import LENGTH, NAMES, make, names_where, tokens

from cosformer.mechanisms import MECHANISMS, Traits, create
from cosformer.mechanisms.base import nearest


def test_an_unknown_name_prints_the_known_ones():
    with pytest.raises(ValueError, match=r"mechanism must be one of .*softmax.*, got 'sofmax'"):
        create("sofmax", 2, 8)
    meant_by = {"lnformer": "linformer", "delta_gated": "gated-delta", "sparse-fixed": "sparse"}
    meant_by["gateddelta"] = "gated-delta"
    for name, meant in meant_by.items():
        with pytest.raises(ValueError, match=rf"got '{name}'; did you mean '{meant}'\?"):
            create(name, 2, 6)
    with pytest.raises(ValueError, match=r"mechanism must be one of .*softmax.*, got \['x'\]"):
        create(["x"], 2, 8)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_prints_the_known_ones(name):
    with pytest.raises(ValueError, match=rf"options of {name} are key_heads.*, got colour"):
        create(name, 2, 8, colour=1)


def refusal(name, task):
    """`NAME cannot TASK. It can do: …; the nearest that can is 'OTHER'`, OTHER from the table."""
    others = "|".join(MECHANISMS)
    made = ", made with [a-z]+=…" if task == "stream" else ""
    nearest = rf"the nearest that can is '({others})'({made})?"
    return rf"^{name} cannot {task}.*\. It can do: .*; {nearest}$"


CANNOT = [
    *((name, LENGTH, True, "attend causally") for name in names_where(causal=("no",))),
    *((name, LENGTH, False, "attend without causal=True") for name in names_where(full=(False,))),
    *((name, 8, None, "attend from 37 queries to 8 keys") for name in names_where(cross=(False,))),
]


@pytest.mark.parametrize(("name", "keys", "causal", "task"), CANNOT)
def test_what_the_traits_do_not_have_is_refused(name, keys, causal, task):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism, keys=keys)
    causal = not mechanism.traits.full if causal is None else causal
    with pytest.raises(ValueError, match=refusal(name, task)):
        mechanism(q, k, v, causal=causal, controls=controls)


def test_traits_that_exclude_each_other():
    with pytest.raises(ValueError, match="without a causal form must be full and have no state"):
        Traits(causal="no", state="cache")


def test_masks_are_refused_by_those_without():
    mechanism = make("linear")
    mechanism.traits = dataclasses.replace(mechanism.traits, mask=False)
    q, k, v, _ = tokens(mechanism)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    with pytest.raises(ValueError, match=refusal("linear", "obey a key_mask")):
        mechanism(q, k, v, key_mask=mask)


@pytest.mark.parametrize("name", names_where(state=("none",)))
def test_streams_are_refused_by_those_without(name):
    mechanism = make(name)
    _, k, v, _ = tokens(mechanism)
    with pytest.raises(ValueError, match=refusal(name, "stream")):
        mechanism.empty_state(k, v)
    with pytest.raises(ValueError, match=refusal(name, "stream")):
        mechanism.state_size(8)


@pytest.mark.parametrize("name", [n for n in NAMES if make(n).traits.max_length is not None])
def test_a_length_past_the_maximum_is_refused(name):
    mechanism = make(name)
    limit = mechanism.traits.max_length
    q, k, v, controls = tokens(mechanism, limit + 1)
    causal = not mechanism.traits.full
    with pytest.raises(ValueError, match=refusal(name, f"attend over {limit + 1} tokens")):
        mechanism(q, k, v, causal=causal, controls=controls)
    q, k, v, controls = tokens(mechanism, limit)
    assert mechanism(q, k, v, causal=causal, controls=controls)[0].isfinite().all()


NEAREST = [
    ("linformer", {"causal": ("exact",)}, "cosformer"),  # nothing is lost, and it is linear as well
    ("bigbird", {"causal": ("exact",)}, "local"),  # a pattern of blocks as well
    ("retention", {"full": (True,)}, "transnormer"),  # on the same engine, no denominator either
    ("reformer", {"state": ("constant",)}, "cosformer"),
    ("rfa-gated", {"full": (True,)}, "rfa"),  # the same features without a gate
]


@pytest.mark.parametrize(("name", "able", "right"), NEAREST)
def test_the_nearest_loses_least(name, able, right):
    def can(traits):
        return all(getattr(traits, key) in values for key, values in able.items())

    assert nearest(make(name), can) == right


@pytest.mark.parametrize("name", names_where(random=(True,)))
def test_only_a_generator_draws(name):
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, got int"):
        make(name).redraw(3)


@pytest.mark.parametrize("name", names_where(random=(False,)))
def test_nothing_is_redrawn_where_nothing_is_random(name):
    with pytest.raises(ValueError, match=f"{name} cannot redraw"):
        make(name).redraw()


@pytest.mark.parametrize("name", NAMES)
def test_controls_are_those_of_the_traits(name):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    causal = not mechanism.traits.full
    with pytest.raises(ValueError, match=r"controls must be .*got.*colour"):
        mechanism(q, k, v, causal=causal, controls={**controls, "colour": k[..., 0]})
    if controls:
        with pytest.raises(ValueError, match=r"controls must be .*, got none"):
            mechanism(q, k, v, causal=causal)
    for change, message in (
        (lambda x: x.long(), "must be real numbers, got torch.int64"),
        (lambda x: x.to(torch.complex64), "must be real numbers, got torch.complex64"),
        (lambda x: x.to("meta"), "must be on the device of k, cpu, got meta"),
        (lambda x: x[:, :, 1:], r"must be \[batch, key heads, length\]"),
    )[: 4 * bool(controls)]:
        wrong = {key: change(x) for key, x in controls.items()}
        with pytest.raises(ValueError, match=message):
            mechanism(q, k, v, causal=causal, controls=wrong)


def test_arguments_that_exclude_each_other():
    mechanism = make("softmax")
    q, k, v, _ = tokens(mechanism)
    state = mechanism.empty_state(k, v)
    on = {"causal": True, "state": state}
    for given, options, message in (
        ((q, k, v), {"state": state}, "causal must be True with a state"),
        ((q, k, v), {**on, "start": 3}, "start must be None with a state"),
        ((q, k, v), {"causal": True, "start": 2.5}, r"start must be an int, got float"),
        ((q, k, v), {"causal": True, "start": -(2**70)}, "start must have at most 53 bits .* 71"),
        ((q[:, :, 1:], k, v), on, "as many queries as keys, got 36 and 37"),
        ((q[..., :4], k[..., :4], v), {}, "q must have 2 heads of width 6"),
        ((q[:1], k[:1], v[:1]), on, "state must hold keys"),
        ((q, k, v[..., :4]), on, "state must hold values .* of width 4, got"),
        ((q, k, v), {"controls": None}, "controls must be a mapping, got NoneType"),
        ((q, k, v), {"causal": True, "state": 3}, "state must be a Cache, got int"),
    ):
        wrong_type = any(word in message for word in ("mapping", "Cache", "an int"))
        with pytest.raises(TypeError if wrong_type else ValueError, match=message):
            mechanism(*given, **options)


def test_a_horizon_is_a_length_like_any_other():
    mechanism = make("cosformer", horizon=40)
    q, k, v, _ = tokens(mechanism)
    far = refusal("cosformer", "attend over 41 tokens")
    with pytest.raises(ValueError, match=far):
        mechanism(q, k, v, start=4)
    with pytest.raises(ValueError, match=far):
        mechanism(q, k, v, causal=True, start=-4)
    first = [torch.cat([x, x[:, :, :3]], 2) for x in (q, k, v)]
    _, state = mechanism(*first, causal=True, state=mechanism.empty_state(k, v))
    for count in (4, 1):
        last = [x[:, :, :count] for x in (q, k, v)]
        past = f"stands at position 40, {count} more would pass its horizon 40: raise horizon"
        with pytest.raises(ValueError, match=past), torch.no_grad():
            mechanism(*last, causal=True, state=state)


def test_who_could_stream_is_told_with_what_it_needs():
    mechanism = make("linformer")
    _, k, v, _ = tokens(mechanism)
    with pytest.raises(ValueError, match=r"'cosformer', made with horizon=…$"):
        mechanism.empty_state(k, v)


def streamed(name, length=10, batch=2, **options):
    """A state after some tokens."""
    mechanism = make(name, **options)
    q, k, v, controls = tokens(mechanism, length, batch=batch)
    return mechanism(q, k, v, causal=True, controls=controls, state=mechanism.empty_state(k, v))[1]


def go_on(name, state, count=3):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism, count)
    return mechanism(q, k, v, causal=True, state=state, controls=controls)


@pytest.mark.parametrize("count", [3, 1])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("linear", "relu"),
        ("relu", "leaky-relu"),
        ("identity", "linear"),
        ("retention", "gated-linear"),
        ("delta", "gated-delta"),
        ("softmax", "one-vs-each"),
        ("transnormer-local", "local"),
        ("synthesizer", "softmax"),
    ],
)
def test_the_state_of_another_mechanism_is_refused(name, other, count):
    with torch.no_grad(), pytest.raises(ValueError, match=r"state must be one of \w+, got one of"):
        go_on(name, streamed(other), count)


@pytest.mark.parametrize("count", [3, 1])
@pytest.mark.parametrize("name", ["cosformer", "linear", "performer", "rope-linear", "delta"])
def test_the_state_of_another_batch_or_of_nothing_is_refused(name, count):
    with torch.no_grad():
        with pytest.raises(ValueError, match="state must hold"):
            go_on(name, streamed(name, batch=1), count)
        with pytest.raises(TypeError, match=r"state must be a .*, got int"):
            go_on(name, 3, count)
        with pytest.raises(TypeError, match=r"state must be a .*, got Cache"):
            go_on(name, streamed("softmax"), count)


@pytest.mark.parametrize("count", [3, 1])
def test_the_state_of_another_horizon_or_window_is_refused(count):
    others = [({"horizon": 32}, "32.0, got 64"), ({"weight": "raised_cosine"}, "'raised_cosine'")]
    for options, theirs in others:
        with torch.no_grad(), pytest.raises(ValueError, match=rf"must be the state's {theirs}"):
            go_on("cosformer", streamed("cosformer", **options), count)
    with torch.no_grad(), pytest.raises(ValueError, match=r"must hold 4 of 10 tokens .*, got 2"):
        go_on("local", streamed("local", window=4), count)


@pytest.mark.parametrize("name", ["local", "sparse-strided"])
def test_a_pattern_has_positions_of_32_bits(name):
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, 20, keys=30)
    for far, further in ((2**31 - 20, 1), (30 - 2**31, -1)):
        for causal in (False, True):
            out, _ = mechanism(q, k, v, start=far, causal=causal)
            right = mechanism.weights(q, k, start=far, causal=causal) @ v
            torch.testing.assert_close(out, right)
            with pytest.raises(
                ValueError, match=r"start must lie in 30 - 2³¹ \.\.\. 2³¹ - 20, got"
            ):
                mechanism(q, k, v, start=far + further, causal=causal)
