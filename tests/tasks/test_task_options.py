"""Arguments of tasks and of their batches: a bad one is named with its rule and its value."""

import pytest

from cosformer import tasks
from cosformer.tasks import probes

BAD = [
    ("glue", {}, r"task must be one of lm, mlm, .*sst2.*, got 'glue'"),
    ([], {}, r"task must be one of lm, mlm, .*, got \[\]"),
    ("mqar", {"size": 3}, r"option of mqar must be one of length.*, got 'size'"),
    ("mqar", {"length": 30, "pairs": 8}, "length must be even and 4 · pairs = 32"),
    ("mqar", {"pairs": 16, "vocabulary": 20}, "vocabulary must be 34 or more, got 20"),
    ("copying", {"length": 5}, "length must be 16 or more"),
    ("induction", {"test_length": 2}, "test_length must be 3 or more, got 2"),
    ("induction", {"vocabulary": 0}, "vocabulary must be a whole number from 1 on, got 0"),
    ("lm", {"text": "enwik8"}, "data must hold the file enwik8.xz"),
    ("lm", {"tokens": "letters"}, "tokens must be one of bytes, bpe, words, got 'letters'"),
    ("lm", {"vocabulary": 300}, "vocabulary must be given for tokens = 'bpe' alone, got 300"),
    ("lm", {"tokens": "bpe", "vocabulary": 200}, "vocabulary must lie in 257 to 65,536, got 200"),
    ("lm", {"length": 0}, "length must be a whole number from 1 on, got 0"),
    ("lm", {"length": 10**6}, "length must be below the text's"),
    ("classify", {"name": "glue"}, "name must be one of sst2, .*got 'glue'"),
    ("classify", {"name": "sst2", "label": "x"}, "text and label must not be given beside a name"),
    ("sst2", {"towers": 2}, "towers must be 1, or 2 for pairs of texts, got 2"),
    ("mnli", {"length": 2}, "length must be 3 or more for pairs, got 2"),
    ("classify", {"text": 5}, "text must be a list, got 5; or text must be text, got 5"),
    ("classify", {"text": ["a", "b", "c"]}, r"text must name one column or two, got \('a', 'b'"),
    ("pathfinder", {"rising": -1}, "rising must be at least 0, got -1"),
    ("pathfinder", {"sizes": (12, 1, 1), "rising": 1}, "sizes must begin with 13 or more to be"),
]


@pytest.mark.parametrize(("name", "given", "message"), BAD)
def test_a_bad_option_is_named_before_a_file_is_made(name, given, message, folder):
    before = sorted(folder.iterdir())
    usual = {} if name in ("mqar", "copying", "induction") else {"data": folder}
    usual |= {"text": str(folder / "own.txt")} if name == "lm" else {}
    with pytest.raises(ValueError, match=message):
        tasks.create(name, **(usual | given))
    assert sorted(folder.iterdir()) == before


BAD_BATCHES = [
    ({"split": "dev"}, ValueError, "split must be one of train, valid, test, got 'dev'"),
    ({"batch_size": 0}, ValueError, "batch_size must be a whole number from 1 on, got 0"),
    ({"step": -1}, ValueError, "step must be a whole number from 0 on, got -1"),
    ({"rank": 2}, ValueError, "rank must be below ranks = 2, got 2"),
    ({"seed": 1.5}, TypeError, r"seed must be a whole number from 0 on, got 1\.5"),
    ({"step": True}, TypeError, "step must be a whole number from 0 on, got True"),
    ({"batch_size": "2"}, TypeError, "batch_size must be a whole number from 1 on, got '2'"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD_BATCHES)
def test_a_bad_argument_of_a_batch_is_named(given, error, message):
    at = {"split": "train", "seed": 0, "rank": 0, "step": 0, "batch_size": 2, "ranks": 2}
    with pytest.raises(error, match=message):
        tasks.create("copying").batch(**(at | given))


def test_a_number_of_another_type_that_a_task_class_is_given_is_a_type_error():
    with pytest.raises(TypeError, match=r"length must be a whole number from 1 on, got 20\.5"):
        probes.Copying(length=20.5)
