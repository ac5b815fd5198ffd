"""ListOps: the generator against the rules and facts of Long-Range Arena, drawn independently."""

import random

import numpy as np
import pytest

from cosformer.tasks import listops
from cosformer.tasks.listops import TOKENS, ListOpsRule


def tree(rng, depth=1):
    """The rule as it is written down: one node after the other."""
    if depth < 10 and rng.random() <= 0.25:
        return rng.randrange(4), [tree(rng, depth + 1) for _ in range(rng.randint(2, 10))]
    return rng.randrange(10)


def size(of):
    return 1 if isinstance(of, int) else 2 + sum(size(each) for each in of[1])


@pytest.fixture(scope="module")
def samples():
    return listops.draw(np.random.default_rng(0), 3000)


def test_labels_are_the_values_of_the_expressions(samples):
    for n in range(500):
        assert listops.evaluate(samples[n]) == samples.labels[n]


CASES = {"[MIN 3 1 2 ]": 1, "[MAX 3 [MIN 9 8 ] 2 ]": 8, "[MED 1 2 ]": 1, "[MED 9 1 5 ]": 5}
CASES |= {"[MED 1 4 9 8 ]": 6, "[SM 9 9 5 ]": 3, "7": 7}


@pytest.mark.parametrize("expression", [*CASES, "[MIN 3 1", "3 ]", "[MAX ]", "1 2", ""])
def test_an_expression_is_evaluated_by_the_definitions_or_refused(expression):
    tokens = np.array([TOKENS.index(word) for word in expression.split()], int)
    if expression in CASES:
        assert listops.evaluate(tokens) == CASES[expression]
    else:
        with pytest.raises(ValueError, match="tokens must be"):
            listops.evaluate(tokens)


def test_lengths_lie_between_the_limits_and_no_sample_comes_twice(samples):
    assert 500 < samples.lengths.min() <= samples.lengths.max() < 2000
    assert len({samples[n].tobytes() for n in range(len(samples))}) == len(samples)


def test_acceptance_and_lengths_are_those_of_the_rule_written_naively(samples):
    rng = random.Random(0)
    sizes = [size(tree(rng)) for _ in range(3000)]
    naive = np.array([n for n in sizes if 500 < n < 2000])
    ours = listops.acceptance(np.random.default_rng(1), 30_000)
    error = (ours * (1 - ours) / len(sizes)) ** 0.5
    assert abs(ours - len(naive) / len(sizes)) < 4 * error
    deviation = naive.std() / len(naive) ** 0.5
    assert abs(samples.lengths.mean() - naive.mean()) < 4 * deviation


def test_the_floors_are_those_of_the_published_task(samples):
    majority = np.bincount(samples.labels).max() / len(samples)
    assert majority == pytest.approx(0.17, abs=0.015)
    roots = samples.flat[samples.starts[:-1]]
    right = sum(np.bincount(samples.labels[roots == root]).max() for root in range(4))
    assert right / len(samples) == pytest.approx(0.36, abs=0.025)
    assert np.bincount(roots, minlength=4) / len(samples) == pytest.approx([0.25] * 4, abs=0.03)


WRONG = [{"operator_rate": 2}, {"max_arguments": 1}, {"above": 5, "below": 6}]


@pytest.mark.parametrize("given", WRONG)
def test_rules_that_cannot_be_followed_are_refused(given):
    with pytest.raises(ValueError, match="must"):
        ListOpsRule(**given)
