"""The whole table as one graph of torch.compile, as far as its traits say."""

import pytest
import torch
from mechanism_cases import LENGTH, make, names_where, tokens
from torch.testing import assert_close


def compiled_whole(call):
    torch.compiler.reset()  # or `call` would be compiled anew too often
    return torch.compile(call, fullgraph=True, backend="eager")


@pytest.mark.parametrize("name", names_where(state=("constant",)))
def test_members_of_the_family_compile_without_a_break(name):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)

    def call(q, k, v):
        return mechanism(q, k, v, causal=True, controls=controls)[0]

    assert_close(compiled_whole(call)(q, k, v), call(q, k, v))


@pytest.mark.parametrize("name", names_where(state=("window", "cache", "none")))
def test_the_others_compile_without_a_break_as_far_as_the_host_reads_no_mask(name):
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, 20)
    mask = torch.arange(20) >= torch.tensor([[0], [3]])
    if not mechanism.traits.reads_mask:
        masked = compiled_whole(lambda q, k, v: mechanism(q, k, v, key_mask=mask)[0])
        assert_close(masked(q, k, v), mechanism(q, k, v, key_mask=mask)[0])
        return
    plain = compiled_whole(lambda q, k, v: mechanism(q, k, v)[0])
    assert_close(plain(q, k, v), mechanism(q, k, v)[0])
    masked = compiled_whole(lambda q, k, v: mechanism(q, k, v, key_mask=mask)[0])
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="data-dependent"):
        masked(q, k, v)


@pytest.mark.parametrize("name", ["bigbird", "reformer"])
def test_a_graph_draws_what_belongs_to_its_length_and_seed(name):
    mechanism = make(name)
    compiled = compiled_whole(lambda q, k, v: mechanism(q, k, v)[0])
    for length in (LENGTH, 50):  # the second one is symbolic
        q, k, v, _ = tokens(mechanism, length)
        found = compiled(q, k, v)
        assert_close(found, mechanism(q, k, v)[0])
    mechanism.redraw(torch.Generator().manual_seed(1))
    assert_close(compiled(q, k, v), mechanism(q, k, v)[0])
    assert not torch.allclose(compiled(q, k, v), found)
