"""`cosformer look`: rows of maps, reach and text, of models that were trained here."""

import pytest
import torch

from cosformer import records
from cosformer.bench import reach_rows
from cosformer.bench.looking import DIGITS
from cosformer.models import recommended
from cosformer.training import Budget, Evaluation, RunConfig, TaskConfig, train

RUN = records.Run.begin(seed=0)


def looked(weights):
    [row] = reach_rows(RUN, [weights[None]], ["x"] * len(weights), {"candidate": "a"})
    return row, row.config["heads"][0]


def test_reach_and_shares_are_those_of_the_weights():
    previous = torch.eye(8).roll(1, 0).tril()
    previous[0, 0] = 1
    row, head = looked(previous)
    assert row.value == head["reach"] == 7 / 8
    assert head["by_distance"] == [0.0, 1.0, 0.0, 0.0]  # at 0, 1, 2 to 3, 4 to 7 tokens
    even = torch.ones(8, 8).tril()
    _, head = looked(even / even.sum(1, keepdim=True))
    shares = [
        sum(1 / n for n in range(5, 9)) / 4,
        None,
        None,
        sum((n - 4) / n for n in range(5, 9)) / 4,
    ]
    assert head["by_distance"][::3] == pytest.approx(shares[::3], abs=1e-5)
    assert sum(head["by_distance"]) == pytest.approx(1, abs=1e-4)


def test_a_map_is_a_digit_for_each_weight_within_a_shade_of_it():
    torch.manual_seed(0)
    weights = torch.rand(70, 70).tril().softmax(1).tril()
    _, head = looked(weights)
    rows, columns = torch.tril_indices(64, 64)
    assert len(head["map"]) == len(rows)
    shades = torch.tensor([DIGITS.index(digit) for digit in head["map"]])
    found = (shades / 63).square() * head["scale"]
    wanted = weights[rows, columns]
    assert (found.sqrt() - wanted.sqrt()).abs().max() <= 0.5 / 63 * head["scale"] ** 0.5 + 1e-6
    assert not head["is_signed"]
    assert looked(-weights)[1]["is_signed"]


def trained(folder, name, mechanism="softmax", task="lm"):
    """A run of one step."""
    (folder / "text.txt").write_text("To be, or not to be: that is the question.\n" * 20)
    return train(
        RunConfig(
            TaskConfig(task, {"text": str(folder / "text.txt"), "length": 16}),
            folder / name,
            model={"layers": 2, "width": 8, "heads": 2, **recommended(task, mechanism)},
            budget=Budget(steps=1, batch=1),
            evaluation=Evaluation(batches=1),
            device="cpu",
        )
    )


def test_models_are_looked_at_side_by_side(tmp_path, shell):
    names = ("cosformer-gated", "softmax")
    for name in names:
        trained(tmp_path, name, name)
    flags = ("--window", 16, "--prompt", "To be", "--tokens", 4, "--out", tmp_path / "rows.jsonl")
    shown = shell.shows("look", *(tmp_path / name for name in names), *flags)
    assert "cosformer-gated: layer 1 looks back " in shown
    assert "softmax: after 'To be' and what follows it remembers " in shown
    rows = records.read(tmp_path / "rows.jsonl")
    assert len({row.date for row in rows}) == 1
    told = [(row.what, row.config["candidate"]) for row in rows]
    assert told == [(what, name) for name in names for what in ("reach", "reach", "written")]
    assert rows[0].config["pieces"] == rows[3].config["pieces"]
    assert (len(rows[0].config["heads"]), rows[1].config["layer"]) == (2, 2)
    flat, growing = (list(rows[n].config["stream_bytes"].values()) for n in (2, 5))
    assert len(set(flat)) == 1
    assert growing == sorted(set(growing))
    assert rows[2].config["text"] == "text.txt"  # no path of the user's


def test_what_cannot_be_looked_at_is_an_error_and_leaves_no_rows(tmp_path, shell):
    trained(tmp_path, "lm")
    trained(tmp_path, "mlm", task="mlm")
    out = ("--out", tmp_path / "rows.jsonl")
    assert "run must be of a language model" in shell.refuses("look", tmp_path / "mlm", *out)
    long = ("look", tmp_path / "lm", "--window", 17, *out)
    assert "window must be at most the 16 tokens" in shell.refuses(*long)
    assert "window must be at least 4" in shell.refuses("look", tmp_path / "lm", "--window", 3)
    assert not (tmp_path / "rows.jsonl").exists()
