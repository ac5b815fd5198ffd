"""The paper's table of speed says what its rows say, for each machine, and why places are empty."""

from dataclasses import replace

import pytest
from row_cases import RUN, SPEED_ROWS, timed

from cosformer.report.tables import TABLES


def grids(table):
    """Title -> first cell -> the other cells."""
    found, title = {}, ""
    for line in table.splitlines():
        if line.startswith("| "):
            first, *rest = (each.strip() for each in line.strip("|").split("|"))
            found.setdefault(title, {})[first] = rest
        elif line:
            title = line
    return found


def test_training_inference_and_memory_stand_by_length_beside_the_papers():
    found = grids(TABLES["classifier"](SPEED_ROWS))
    training = found["Training, steps a second:"]
    assert training["mechanism"] == ["64 × 1,024 tokens", "16 × 4,096 tokens", "4 × 16,384 tokens"]
    assert training["cosformer"] == ["100", "100", "100"]
    assert training["*Qin et al. 2022*"] == ["*6.5*", "*1.5*", "*–*"]  # the last is of bigbird
    assert training["bigbird"] == ["9", "–", "–"]
    assert found["Inference, steps a second:"]["softmax"] == ["500", "–", "–"]
    assert found["Memory of a training step:"]["softmax"] == ["1,024 MiB", "–", "–"]


def test_the_claim_is_judged_by_training_at_every_length():
    table = TABLES["classifier"](SPEED_ROWS)
    assert "cosformer is faster than softmax from about 2,000 tokens on and takes 1/8" in table
    assert "grows as length^1.00 (softmax: length^2.00), which supports it in part" in table
    assert "by tokens: 0.50 × at 1,024, 2.00 × at 4,096, 8.00 × at 16,384." in table
    assert "took 1.5 minutes of the device. Test GPU; 4 layers of 256, 4 heads" in table


def test_a_place_without_a_number_says_why_until_it_has_one():
    table = TABLES["classifier"](SPEED_ROWS)
    training = grids(table)["Training, steps a second:"]
    assert training["reformer"] == ["out of memory", "out of memory", "–"]
    assert "* reformer, training at 1,024, 4,096 tokens: out of memory: no room\n" in table
    assert "tried again since" not in table
    worse = timed("cosformer", 1_024, 1, what="failed", reason="refused: today")
    again = TABLES["classifier"]([*SPEED_ROWS, worse])
    assert grids(again)["Training, steps a second:"]["cosformer"] == ["refused", "100", "100"]


def test_machines_are_apart_and_toys_give_way():
    cpu = replace(RUN, hardware={"device": "cpu", "name": "Test processor"})
    slow = timed("cosformer", 1_024, 0.5, run=cpu)
    table = TABLES["classifier"]([slow, *SPEED_ROWS, timed("linear", 64, 7.0, size="small")])
    assert table.count("Training, steps a second:") == 2
    assert table.index("Test GPU") < table.index("Test processor")
    assert "linear" not in table.replace("linearly", "")
    toy = TABLES["classifier"]([timed("linear", 64, 7.0, size="small")])
    assert "A toy size, whose numbers mean nothing. The paper says" in toy
    with pytest.raises(ValueError, match="rows of the table speed, got"):
        TABLES["classifier"]([RUN.row("speed", 1, "")])
