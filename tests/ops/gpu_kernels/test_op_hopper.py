"""What the host prepares and launches for `sweep.cu`, as a stub of the driver sees it."""

import re
import struct

import pytest
import stub_driver
import torch

from cosformer import State, linear_attention, linear_attention_with_state
from cosformer.ops.hopper import aligned
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.hopper.roles import PER_HEAD, PER_TOKEN
from cosformer.ops.hopper.source import source


def test_rows_are_copied_where_they_do_not_begin_at_16_bytes():
    flat = torch.randn(2 * 3 * 8 * 16 + 1).bfloat16()
    moved = flat[1:].view(2, 3, 8, 16)
    assert moved.is_contiguous()
    assert moved.data_ptr() % 16
    assert aligned(moved).data_ptr() % 16 == 0
    assert aligned(flat[:-1].view(2, 3, 8, 16)).data_ptr() == flat.data_ptr()


def test_steps_between_states_follow_from_their_shape():
    state = torch.zeros(1, 2, 2, 8, 9).transpose(0, 1)  # [2, 1, …]: the head's stride is anything
    assert state.is_contiguous()
    assert hopper_plan._steps(state) == (2 * 8 * 9, 0)
    assert hopper_plan._steps(torch.zeros(2, 3, 4, 2, 8, 9)) == (4 * 144, 144)
    assert hopper_plan._steps(torch.zeros(2, 3, 4, 2, 8, 9), pieces=2) == (4 * 144, 2 * 144)


def test_segments_fill_the_processors():
    assert hopper_plan.choose_segments(128, 4096, 132, extra=0.6) == 1
    assert hopper_plan.choose_segments(32, 16384, 132, extra=0.6) == 4
    assert hopper_plan.choose_segments(16, 65536, 132, extra=0.6) == 8
    assert hopper_plan.choose_segments(1, 100, 132) == 1
    for programs in (1, 7, 100, 131, 133, 500):
        for length in (1, 257, 4096, 10**6):
            segments = hopper_plan.choose_segments(programs, length, 132)
            assert 1 <= segments <= max(1, length // 256)


def test_states_are_summed_in_pieces_where_processors_would_be_idle():
    def choose(programs, length, segments, rows):
        return hopper_plan.choose_pieces(programs, length, 132, hopper_plan.Cut(segments, rows))

    assert choose(48, 3000, 2, 1536) == 2  # 48 programs sum the first segment alone
    assert choose(64, 4096, 2, 2048) == 2
    assert choose(32, 16384, 4, 4096) == 1  # 96 programs: more states would cost what is won
    assert choose(48, 2000, 2, 1024) == 2
    assert choose(48, 1300, 2, 896) == 1  # the last segment has no more rows than half of another


def test_pieces_end_where_segments_end():
    for length in (300, 1000, 3000, 4100):
        for segments in (2, 3, 4):
            rows = -(-length // (segments * 64)) * 64
            cut = hopper_plan.Cut(-(-length // rows), rows)
            for pieces in hopper_plan._whole_pieces(length, cut):
                ends = range(0, cut.segments * rows, rows // pieces)
                assert set(range(0, cut.segments * rows, rows)) <= set(ends)
                assert ends[-1] < length, "no piece is empty"


def test_kernel_parameters_have_the_size_of_their_struct():
    fields = re.search(r"struct Params \{(.*?)\};", re.sub(r"//.*", "", source()), re.DOTALL)[1]
    lines = [line.strip() for line in fields.split(";")]
    size = 0
    for line in filter(None, lines):
        wide = "*" in line or line.startswith("long long")
        counts = re.findall(r"\w+(?:\[(\d+)\])?\s*(?:,|$)", line)
        size += (8 if wide else 4) * sum(int(count or 1) for count in counts)
    assert 8 * fields.count("*") == 8 * hopper_plan.POINTERS
    padded = -(-size // 8) * 8  # as a compiler pads it
    assert padded == 8 * hopper_plan.POINTERS + hopper_plan.TAIL.size


def test_the_kernel_asks_for_every_option():
    code = re.sub(r"//.*", "", source())
    for name in hopper_plan.Sweep._fields:
        assert re.search(rf"\b{name}\b", code), name
    assert "#include" not in source()


UNDIVIDED = {"normaliser": "none", "impl": "hopper"}
DECAY_STRIDES = slice(17, 19)  # in the tail of a sweep's parameters
GAMMA = (0.9, 0.99)


def sweeps(launches, *, strong=False):
    """The options of sweeps, without the variant for strong decays unless it is asked for."""
    every = [options for name, options, *_ in launches if name == "sweep"]
    return [options for options in every if options.READ is False or strong == options.STRONG]


def numbers(launches, kernel, form):
    """What a kernel was told behind its pointers, launch by launch."""
    return [struct.unpack(form, tail) for name, *_, tail, _ in launches if name == kernel]


def both_passes(length=100, width=64, **options):
    q, k, v = stub_driver.leaves(length, width)
    linear_attention(q, k, v, causal=True, **UNDIVIDED, **options).sum().backward()


def test_every_sweep_of_a_decay_knows_of_it(launches):
    both_passes(gamma=GAMMA)
    assert [name for name, *_ in launches] == ["sweep"] * 4
    assert all(options.DECAY for options in sweeps(launches))


@pytest.mark.parametrize(
    ("decay", "known"),
    [
        ({"gamma": 0.5}, True),
        ({"gamma": GAMMA}, True),
        ({"gamma": (0.9, 0.4)}, False),
        ({"gamma": torch.tensor(GAMMA)}, False),
        ({"log_decay": torch.full((1, 2, 100), -0.1)}, False),
    ],
)
def test_strong_decays_are_swept_for_unless_numbers_exclude_them(launches, decay, known):
    both_passes(**decay)
    mild, strong = sweeps(launches), sweeps(launches, strong=True)
    assert len(mild) == 4
    assert strong == ([] if known else [options._replace(STRONG=True) for options in mild])


@pytest.mark.parametrize("length", [100, 6000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("normaliser", ["sum", "none"])
@pytest.mark.parametrize("decay", ["none", "of a head", "of a token", "learned"])
def test_what_a_call_will_launch_is_compiled_ahead(
    launches, monkeypatch, length, causal, normaliser, decay
):
    ahead = set()
    monkeypatch.setattr(hopper_plan, "_compiling", ahead.add)
    gates = torch.full((1, 2, length), -0.1, requires_grad=decay == "learned")
    options = {"none": {}, "of a head": {"gamma": GAMMA}}.get(decay, {"log_decay": gates})
    options |= {"causal": causal, "normaliser": normaliser, "impl": "hopper"}
    out = linear_attention(*stub_driver.leaves(length, 64), **options)
    assert {given for _, given, *_ in launches} <= ahead
    announced = set(ahead)
    out.sum().backward()
    assert {given for _, given, *_ in launches} == ahead == announced


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_dots_are_computed_for_gates_that_need_a_gradient(launches, graded, width):
    gates = torch.full((1, 2, 100), -0.1, requires_grad=graded)
    both_passes(width=width, log_decay=gates)
    forward, dq, dk, dv = sweeps(launches)
    assert dq.DOTS == dk.DOTS == graded
    assert not any(role.DOTS for role in (forward, dv))
    assert (gates.grad is not None) == graded


def test_a_cut_sequence_decays_from_segment_to_segment(launches):
    both_passes(6000, gamma=GAMMA)
    rows = hopper_plan.choose_segments(2, 6000, 132, extra=0.6)
    rows = -(-6000 // (rows * 64)) * 64
    whole = (64 * 64, 0, 6000, 2, 6000, rows, -(-6000 // rows), 1, True)
    assert numbers(launches, "edges", "3q7i") == [(*whole, False), (*whole, True)]
    edges = [(options, given) for name, options, *_, given in launches if name == "edges"]
    assert all(options.DECAY and given[3] for options, given in edges)


def test_a_stream_passes_its_state_on(launches):
    q, k, v = stub_driver.qkv()
    _, state = linear_attention_with_state(q, k, v, gamma=GAMMA, **UNDIVIDED)
    linear_attention_with_state(q, k, v, state=state, gamma=GAMMA, **UNDIVIDED)
    firsts_and_lasts = [given[10:12] for name, *_, given in launches if name == "sweep"]
    assert firsts_and_lasts == [(True, True)] * 2


def test_heads_and_sequences_that_share_a_decay_step_by_nothing(launches):
    q, k, v = (torch.randn(3, 2, 100, 64).bfloat16() for _ in range(3))
    each = torch.full((3, 2, 100), -0.1)
    about = {"causal": True, **UNDIVIDED}
    linear_attention(q, k, v, gamma=0.9, **about)
    linear_attention(q, k, v, gamma=GAMMA, **about)
    linear_attention(q, k, v, log_decay=each, **about)  # by two variants
    tails = numbers(launches, "sweep", hopper_plan.TAIL.format)
    assert [tail[DECAY_STRIDES] for tail in tails] == [(0, 0), (0, 100), *[(200, 100)] * 2]
    decays = [options.DECAY for name, options, *_ in launches if name == "sweep"]
    assert decays == [PER_HEAD, PER_HEAD, PER_TOKEN, PER_TOKEN]


def test_every_sweep_knows_the_scale(launches):
    gates = torch.full((1, 2, 6000), -0.1, requires_grad=True)
    for scale in (0.125, 3.0, 1.0):
        launches.clear()
        both_passes(6000, log_decay=gates, scale=scale)
        found = numbers(launches, "sweep", hopper_plan.TAIL.format)
        assert {tail[-1] for tail in found} == {scale}
        assert len(found) == 2 + 2 * 4  # sums of segments, and every sweep for either strength


def test_a_state_is_not_scaled_but_its_gradient_is(launches, monkeypatch):
    """Kernels add to the end's gradient what they scale later, so that it is taken out before."""
    given = []
    own = hopper_plan.Plan.sweep

    def sweep(self, role, *rows, **about):
        given.append((role, about["first"]))
        own(self, role, *rows, **about)

    monkeypatch.setattr(hopper_plan.Plan, "sweep", sweep)
    q, k, v = stub_driver.qkv()
    first = torch.zeros(1, 2, 1, 64, 64, requires_grad=True)
    state = State(first, torch.zeros(1, 2, 1, 0), torch.tensor(0), None, GAMMA)
    _, after = linear_attention_with_state(
        q, k, v, state=state, gamma=GAMMA, scale=0.125, **UNDIVIDED
    )
    monkeypatch.setattr(hopper_plan.Plan, "states", lambda self, segments=1: torch.ones_like(first))
    (grad,) = torch.autograd.grad(after.key_value.sum(), first)
    (ends,) = (x for role, x in given if role.REVERSE)
    assert (ends == 8).all()
    assert torch.equal(grad[0, 0, 0, -1], torch.full((64,), 0.125))
