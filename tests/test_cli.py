"""The command line: verbs from a table, one-line errors and exit code 2, extras named."""

import importlib
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import cosformer
from cosformer import cli


@dataclass(frozen=True)
class Options:
    """What the toy verb does."""

    size: int = 3
    """How large."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verb `toy run` whose exit code is its size."""
    module = SimpleNamespace(Options=Options, run=lambda options: options.size)
    monkeypatch.setitem(sys.modules, "toy_verb", module)
    monkeypatch.setitem(cli.VERBS, "toy run", ("toy_verb", "a toy"))
    return module


def _one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cosformer {cosformer.__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_verb_with_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb, (_, summary) in cli.VERBS.items():
        assert any(verb in line and summary in line for line in lines)


def test_no_verb_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "bench ops" in capsys.readouterr().err


def test_help_on_a_group_lists_its_verbs_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "bench ops" in printed
    assert "demo" not in printed


def test_an_unknown_verb_prints_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["benhc", "ops"]) == 2
    known = ", ".join(cli.VERBS)
    assert f"unknown verb 'benhc ops'; known: {known}\n" in _one_line(capsys)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_documents_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb.split(), "--help"]) == 0
    captured = capsys.readouterr()
    assert f"usage: cosformer {verb}" in captured.out
    assert captured.err == ""


USAGES = {
    "train": "train TASK",
    "evaluate": "evaluate RUN",
    "generate": "generate RUN",
    "runs": "runs [FOLDER]",
    "data make": "data make [NAMES ...]",
    "data list": "data list",
}


@pytest.mark.parametrize("verb", USAGES)
def test_the_usage_shows_what_needs_no_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb.split(), "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"usage: cosformer {USAGES[verb]} [options]"


GROUPS = ("train", "evaluate", "generate", "data")
WITH_EXAMPLES = [verb for verb in cli.VERBS if verb.split()[0] in GROUPS]


@pytest.mark.parametrize("verb", WITH_EXAMPLES)
def test_the_help_has_examples_that_can_be_typed(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*verb.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [shlex.split(line)[1:] for line in lines if line.startswith(f"cosformer {verb} ")]
    assert examples
    module = importlib.import_module(cli.VERBS[verb][0])
    monkeypatch.setattr(module, "run", lambda options: 0)
    for example in examples:
        assert cli.main(example) == 0


@pytest.mark.usefixtures("toy")
def test_options_reach_the_verb_and_its_exit_code_is_ours() -> None:
    assert cli.main(["toy", "run"]) == 3
    assert cli.main(["toy", "run", "--size", "5"]) == 5


BAD_OPTIONS = [
    (["--size", "0"], "size must be at least 1, got 0; see --help"),
    (["--size", "many"], "--size"),
    (["--colour", "red"], "--colour"),
    (["extra"], "extra"),
]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["toy", "run", *arguments]) == 2
    line = _one_line(capsys)
    assert line.startswith("cosformer: toy run: ")
    assert message in line


BOXES = [
    "╭─ Value error ──╮\n│ size must be │\n│ at least 1 │\n│ ──── │\n│ For help │\n╰────╯\n",
    " Value error   \n ---------- \n  size must be \n  at least 1 \n  -----\n  For help \n",
    "\x1b[31m╭─\x1b[0m Error ╮\n\x1b[31m│\x1b[0m size \x1b[1mmust be\x1b[0m at least 1 │\n│ ─── │",
]


@pytest.mark.parametrize("box", BOXES, ids=["unicode", "ascii", "colour"])
def test_the_frame_around_a_complaint_is_taken_off(box: str) -> None:
    assert cli._first_sentence(box) == "size must be at least 1"


ERRORS = [
    (ValueError("rows must exist"), "toy run: rows must exist"),
    (FileNotFoundError(2, "No such file", "x.jsonl"), "x.jsonl"),
    (ModuleNotFoundError(name="matplotlib"), "pip install 'cosformer[plot]'"),
    (ModuleNotFoundError(name="tqdm"), "pip install 'cosformer[cli]'"),
]


@pytest.mark.parametrize(("error", "message"), ERRORS)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    toy: SimpleNamespace, error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: Options) -> int:
        raise error

    toy.run = fail
    assert cli.main(["toy", "run"]) == 2
    assert message in _one_line(capsys)


@pytest.mark.parametrize("error", [KeyError("bug"), ModuleNotFoundError(name="our_own")])
def test_an_error_of_ours_is_not_hidden(toy: SimpleNamespace, error: Exception) -> None:
    def fail(options: Options) -> int:
        raise error

    toy.run = fail
    with pytest.raises(type(error)):
        cli.main(["toy", "run"])


@pytest.mark.usefixtures("toy")
def test_without_tyro_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["toy", "run"]) == 2
    assert "needs the package tyro: pip install 'cosformer[cli]'" in _one_line(capsys)


def test_the_module_runs_from_a_shell_without_optional_packages() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['cosformer', '--help']\n"
        "try: runpy.run_module('cosformer', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "loaded = {'tyro', 'matplotlib'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    root = Path(cosformer.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bench ops" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["data", "list"]])
def test_a_reader_that_has_gone_ends_a_verb_quietly(arguments: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "cosformer", *arguments]
    root = Path(cosformer.__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")
