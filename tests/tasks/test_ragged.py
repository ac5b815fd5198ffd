"""Sequences of different lengths side by side: what is taken of them, and what that costs."""

import tracemalloc

import numpy as np

from cosformer.tasks.ragged import Ragged


def test_sequences_are_taken_in_the_order_of_their_numbers():
    found = Ragged.of([[1, 2], [3], [4, 5, 6]], [7, 8, 9]).take(np.array([2, 0, 2]))
    assert [found[n].tolist() for n in range(3)] == [[4, 5, 6], [1, 2], [4, 5, 6]]
    assert (found.labels.tolist(), found.flat.dtype) == ([9, 7, 9], np.uint8)
    none = Ragged.of([[1]], [0]).take(np.array([], np.int64))
    assert (len(none), none.flat.dtype, none.starts.tolist()) == (0, np.uint8, [0])


def test_taking_sequences_needs_no_number_for_each_token():
    rows = Ragged.of_rows(np.zeros((500, 2_000), np.uint8), np.zeros(500, np.int64))
    tracemalloc.start()
    rows.take(np.arange(500))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * rows.flat.nbytes  # with 8 bytes a token it was 32 times
