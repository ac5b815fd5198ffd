"""`cosformer train` with what cannot be: nothing is left that the corrected command would meet."""

import sys
from pathlib import Path

import pytest

from cosformer import cli

TINY = [
    "--steps", "2", "--batch", "4", "--preset", "tiny", "--device", "cpu", "--out", "r",
    "--set", "model.layers=1", "--set=model.width=16",
]  # fmt: skip
LM = ["train", "lm", "--data", "my.txt", *TINY]
COPYING = ["train", "copying", *TINY]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a text."""
    (tmp_path / "my.txt").write_text("ten green bottles hanging on the wall,\n" * 100)
    monkeypatch.chdir(tmp_path)
    return tmp_path


IMPOSSIBLE: list[tuple[list[str], str]] = [
    ([*LM, "--mechanism", "linformer"], "linformer cannot attend causally"),
    ([*LM, "--set", "model.options.foo=3"], "got foo"),
    (
        [*LM, "--set", "model.options.horizon=3"],
        "model.options must allow the 64 tokens of training",
    ),
    (
        [*LM, "--mechanism", "sparse-strided", "--set", "model.options.stride=-1"],
        "stride must be a whole number from 1 on, got -1",
    ),
    ([*LM, "--set", "tensorboard=true"], "pip install 'cosformer[tensorboard]'"),
    (
        [*LM, "--set", "evaluation.every=0"],
        "train: evaluation.every must be a whole number from 1 on, got 0",
    ),
    ([*LM, "--length", "0"], "length must be a whole number from 1 on, got 0"),
    ([*LM, "--data", "nowhere.txt"], "text must be one of python, manual"),
    (
        [*COPYING, "--mechanism", "reformer", "--set", f"model.options.seed={2**70}"],
        f"seed must be below {2**63}, got {2**70}",
    ),
    (
        [*COPYING, "--pretrain", "masked", "--mechanism", "linformer"],
        "linformer cannot attend causally",
    ),
]


@pytest.mark.parametrize(("command", "message"), IMPOSSIBLE, ids=[m for _, m in IMPOSSIBLE])
def test_what_cannot_be_trained_leaves_nothing(
    command: list[str],
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert cli.main(command) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""  # not that the same command continues it
    assert [path.name for path in here.iterdir()] == ["my.txt"]


def test_the_corrected_command_runs_in_the_same_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LM, "--mechanism", "linformer"]) == 2
    assert cli.main([*LM, "--mechanism", "softmax"]) == 0
    assert capsys.readouterr().out.startswith("run: r (the same command continues it)\n")


@pytest.mark.parametrize("text", ["body", '["body"]'])
def test_a_column_is_named_with_or_without_a_list(here: Path, text: str) -> None:
    rows = [f"{n % 2}\t{'ab'[n % 2] * 5}" for n in range(40)]
    (here / "own.tsv").write_text("\n".join(["label\tbody", *rows]) + "\n")
    command = ["train", "classify", "--data", "own.tsv", "--length", "8", *TINY]
    assert cli.main([*command, "--set", f"task.options.text={text}"]) == 0
