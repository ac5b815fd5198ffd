"""The op over many ranks: exact, in messages of one size, with errors that say what is wrong."""

import math
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from op_checks import CHECKS, gates, tokens
from ranks import alternating, failures

import cosformer
from cosformer import distributed
from cosformer.distributed import exchange, passes
from cosformer.distributed.stretch import Reach, stretch_of


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_output_and_gradients_are_those_of_one_process(ranks):
    checks = dict(CHECKS)
    if ranks == 3:  # what an odd number of ranks may change, by every third check
        checks = {name: CHECKS[name] for name in [*CHECKS][::3] if "pairs" not in name}
    assert failures(alternating(checks, ranks), ranks) == {}


def test_a_collective_outlives_the_thread_that_ran_it(group, monkeypatch):
    """Which would need the interpreter to free its tensors, when that may have ended."""
    gather, works = exchange._all_gather, []

    def noted(*tensors, **options):
        work = gather(*tensors, **options)
        works.append(weakref.ref(work))
        return work

    monkeypatch.setattr(exchange, "_all_gather", noted)
    distributed.attention(*tokens(), causal=True)
    assert works[-1]() is not None


STATE = 8 * 2 * 2 * 2 * 4 * (3 + 1)  # float64, batch, heads, cosine and sine, width, values and 1
HEAD = 8 * (1 + 2)  # the length, and the decay of two heads
HEAD_PER_TOKEN = 8 * (1 + 2 * 2)  # … of two heads and two streams


@pytest.mark.parametrize(
    ("causal", "options", "message"),
    [
        (True, {}, HEAD + STATE),
        (True, {"decay": 0.9}, HEAD + STATE),
        (True, {"gated": True}, HEAD_PER_TOKEN + STATE),
        (False, {}, STATE + 8),  # a sum, and the length of each rank
        (False, {"decay": 0.9}, HEAD + 2 * STATE),
        (False, {"gated": True}, HEAD_PER_TOKEN + 2 * STATE),
    ],
)
@pytest.mark.parametrize("length", [8, 512])
def test_a_rank_sends_one_message_forward_and_one_back_of_a_size_without_the_length(
    group, sent, length, causal, options, message
):
    q, k, v = (x.requires_grad_() for x in tokens(length=length))
    given = {"log_decay": gates(k)} if "gated" in options else options
    out = distributed.attention(q, k, v, causal=causal, horizon=1000, **given)
    assert sent == [message]
    out.sum().backward()
    assert sent == [message] * 2


def test_a_decay_that_is_one_number_is_sent_whatever_its_stride(group, sent):
    """As that of one head and one sequence, which is the last column of its running sums."""
    log_pass = torch.zeros(1, 1, 7, dtype=torch.float64)[..., -1]
    message = exchange.Message(torch.ones(1, 1, 2, 3), None, log_pass)
    receive = exchange.send(message, stretch_of(7, None, None), Reach(0, 0))
    assert not receive().from_left.any()
    assert sent == [8 + 8 + 4 * 2 * 3]


LOCAL = {
    "its own keys": (passes, "_compute", {"decay": 0.9}),
    "sequences that lie on it as a whole": (
        passes._Between, "outputs", {"cu_seqlens": torch.tensor([0, 6, 13, 24]), "causal": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LOCAL)
def test_a_rank_computes_while_messages_travel_forward_and_back(group, note, what):
    where, name, options = LOCAL[what]
    note(where, name, "local", torch.float64)
    note(exchange, "_all_gather", "sent")
    note(exchange._Told, "wait", "waited")
    out = distributed.attention(*(x.requires_grad_() for x in tokens(batch=1)), **options)
    out.sum().backward()
    assert note.seen == ["sent", "local", "waited"] * 2


@pytest.mark.parametrize("bounds", [[0, 24], [0, 5, 9, 17, 24]])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_queries_may_be_made_meanwhile(group, bounds, causal, decay):
    q, k, v = tokens(batch=1)
    given = {"causal": causal, "decay": decay, "cu_seqlens": torch.tensor(bounds)}
    out = distributed.attention(torch.empty_like(q), k, v, **given, meanwhile=lambda: q)
    torch.testing.assert_close(out, distributed.attention(q, k, v, **given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_states_are_float32_where_tokens_are_not(group, sent, dtype, causal, decay):
    q, k, v = (x.to(dtype) for x in tokens())
    out = distributed.attention(q, k, v, causal=causal, decay=decay)
    assert sent[0] >= STATE // 2
    assert out.dtype == dtype
    whole = cosformer.attention(q, k, v, causal=causal, decay=decay)
    torch.testing.assert_close(out, whole)


def test_autocast_rounds_tokens_and_no_states(group):
    q, k, v = (x.float() for x in tokens())
    with torch.autocast("cpu", torch.bfloat16):
        out = distributed.attention(q, k, v, decay=0.9)
        whole = cosformer.attention(q, k, v, decay=0.9)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, whole)


WRONG = {
    "lengths must be one for each of 1 ranks, got 2: [12, 12]": {"lengths": [12, 12]},
    "lengths[0] must be the tokens of this rank, 24, got 12": {"lengths": [12]},
    "lengths[0] must be a whole number from 0 on, got -1": {"lengths": [-1]},
    "horizon must be at least the sequence length 24, got 20": {"horizon": 20},
    "decay must lie in (0, 1], got 1.5": {"decay": 1.5},
    "decay must be a number or one per head [2], got [3]": {"decay": [0.5, 0.5, 0.5]},
    "decay and log_decay must not both be given": {
        "decay": 0.5, "log_decay": torch.zeros(2, 2, 24),
    },
    "log_decay must be one per key head [batch, key heads, length] = [2, 2, 24], got [2, 24]": {
        "log_decay": torch.zeros(2, 24)
    },
    "log_decay must be at most 0, got 1": {"log_decay": torch.ones(2, 2, 24)},
    "key_mask must be [batch, keys] = [2, 24], got [2, 12]": {
        "key_mask": torch.ones(2, 12, dtype=torch.bool)
    },
    "cu_seqlens needs a batch of 1, got 2": {"cu_seqlens": torch.tensor([0, 24])},
    "weight must be one of cosine, raised_cosine, got 'sine'": {"weight": "sine"},
    "horizon must be finite with weight='raised_cosine', got inf": {
        "weight": "raised_cosine", "horizon": math.inf,
    },
    "impl must be one of auto, chunked, triton, got 'reference'": {"impl": "reference"},
    "eps must be above 0, got 0": {"eps": 0},
    "meanwhile must return queries such as q, torch.float64 [2, 2, 24, 4], got torch.float32 [3]": {
        "meanwhile": lambda: torch.zeros(3),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_argument_rule_and_value(group, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        distributed.attention(*tokens(), **WRONG[message])


def test_packed_sequences_must_fill_all_ranks(group):
    q, k, v = tokens(batch=1)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to the length 24, got"):
        distributed.attention(q, k, v, cu_seqlens=torch.tensor([0, 12]))


def test_query_heads_that_share_a_state_share_its_weights(group):
    q, k, v = tokens(heads=4, key_heads=2)
    for name, value in (("decay", [0.5] * 4), ("horizon", torch.full((4,), 30.0))):
        with pytest.raises(ValueError, match=rf"{name} must be one per key head \[2\]"):
            distributed.attention(q, k, v, **{name: value})


def test_a_rank_has_as_many_queries_as_keys(group):
    q, k, v = tokens()
    with pytest.raises(ValueError, match=r"as many queries as keys.*got 12 and 24"):
        distributed.attention(q[:, :, :12], k, v)


def test_types_are_checked(group):
    q, k, v = tokens()
    with pytest.raises(TypeError, match="lengths must be a sequence of ints, got int"):
        distributed.attention(q, k, v, lengths=24)
    with pytest.raises(TypeError, match="group must be a ProcessGroup of this rank, got str"):
        distributed.attention(q, k, v, group="all")
    with pytest.raises(TypeError, match="causal must be a bool, got int"):
        distributed.attention(q, k, v, causal=1)
    with pytest.raises(TypeError, match="meanwhile must return a tensor or None, got list"):
        distributed.attention(q, k, v, meanwhile=lambda: [q])


def test_what_is_no_function_is_refused_before_anything_is_sent(group, sent):
    for attend in (distributed.attention, distributed.linear_attention):
        with pytest.raises(TypeError, match="meanwhile must be a function, got int"):
            attend(*tokens(), meanwhile=5)
    assert sent == []


def test_without_a_group_the_error_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="init_process_group"):
        distributed.attention(*tokens())
