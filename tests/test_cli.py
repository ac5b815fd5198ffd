"""The command line: verbs from a table, one-line errors and exit code 2, extras named."""

import importlib
import os
import shlex
import signal
import subprocess
import sys
import unittest.mock
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import cosformer
from cosformer import cli

ROOT = Path(cosformer.__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """What the toy verb does."""

    size: int = 3
    """How large."""

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


@pytest.fixture
def toy(monkeypatch):
    """A verb `toy run` whose exit code is its size."""
    module = SimpleNamespace(Options=Options, run=lambda options: options.size)
    monkeypatch.setitem(sys.modules, "toy_verb", module)
    monkeypatch.setitem(cli.VERBS, "toy run", ("toy_verb", "a toy"))
    return module


def test_version_and_help_with_one_line_for_every_verb_of_all_or_of_a_group(shell):
    assert shell.shows("--version") == f"cosformer {cosformer.__version__}\n"
    lines = shell.shows("--help").splitlines()
    for verb, (_, summary) in cli.VERBS.items():
        assert any(verb in line and summary in line for line in lines)
    assert shell("-h") == shell("--help")
    assert shell() == (2, "", shell.shows("--help"))
    printed = shell.shows("bench", "--help")
    assert ("bench ops" in printed, "demo" in printed) == (True, False)


UNKNOWN = {
    "benhc ops": "unknown verb 'benhc': did you mean cosformer bench ops? Known: demo, bench ops, ",
    "bench opps": "unknown verb 'bench opps': did you mean cosformer bench ops?",
    "trian lm --steps 3": "unknown verb 'trian': did you mean cosformer train?",
    "trainlm": "unknown verb 'trainlm': did you mean cosformer train lm?",
    "train-lm": "unknown verb 'train-lm': did you mean cosformer train lm?",
    "train=lm": "unknown verb 'train=lm': did you mean cosformer train lm?",
    "train--data=my.txt": "did you mean cosformer train --data=my.txt?",
    "demoo": "unknown verb 'demoo': did you mean cosformer demo?",
    "xyz": "unknown verb 'xyz'. Known: demo, ",
}


@pytest.mark.parametrize("typed", UNKNOWN)
def test_an_unknown_verb_prints_what_was_meant_and_the_known_ones(typed, shell):
    line = shell.refuses(*typed.split())
    assert UNKNOWN[typed] in line
    assert line.endswith(f" Known: {', '.join(cli.VERBS)}\n")


USAGES = {"train": "train TASK", "evaluate": "evaluate RUN", "generate": "generate RUN"}
USAGES |= {"runs": "runs [FOLDER]", "data make": "data make [NAMES ...]", "data list": "data list"}
GROUPS = ("train", "evaluate", "generate", "data")
"""Verbs whose help has examples."""


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_documents_its_options_and_its_examples_can_be_typed(verb, monkeypatch, shell):
    code, out, err = shell(*verb.split(), "--help")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first.startswith(f"usage: cosformer {USAGES.get(verb, verb)}")
    examples = [shlex.split(line)[1:] for line in lines if line.startswith(f"cosformer {verb} ")]
    assert examples or verb.split()[0] not in GROUPS
    monkeypatch.setattr(importlib.import_module(cli.VERBS[verb][0]), "run", lambda options: 0)
    for example in examples:
        shell.shows(*example)


@dataclass(frozen=True)
class Wide(Options):
    """What else it does."""

    kinds: tuple[str, ...] | None = None
    """Kinds of which a long sentence says in the source on two lines what is meant by them; it is
    one paragraph in the help."""


def test_the_help_of_an_option_is_one_paragraph_beside_how_it_is_typed(toy, monkeypatch, shell):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(toy, "Options", Wide)
    assert shell.shows("toy", "run", "--help") == (
        "usage: cosformer toy run [options]\n\n"
        "What else it does.\n\n"
        "options:\n"
        "  -h, --help            show this and exit\n"
        "  --size INT            How large. (default: 3)\n"
        "  --kinds TEXT ...      Kinds of which a long sentence says in the source on two\n"
        "                        lines what is meant by them; it is one paragraph in the\n"
        "                        help.\n"
    )


@pytest.mark.usefixtures("toy")
def test_options_reach_the_verb_and_its_exit_code_is_ours(shell):
    assert shell("toy", "run")[0] == 3
    assert shell("toy", "run", "--size", "5")[0] == 5


BAD_OPTIONS = {
    "--size 0": "size must be at least 1, got 0; see --help",
    "--size many": "--size must be a whole number, got 'many'; see --help",
    "--size=many": "--size must be a whole number, got 'many'; see --help",
    "--sise 3": "did you mean --size?",
    "--colour red": "--colour",
    "extra": "extra",
}


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("typed", BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_code_2(typed, shell):
    line = shell.refuses("toy", "run", *typed.split())
    assert line.startswith("cosformer: toy run: ")
    assert BAD_OPTIONS[typed] in line


WRONG_WORDS = {
    "train": "TASK must come first, as in `cosformer train TASK`, got nothing; see --help",
    "evaluate --split test r": "`cosformer evaluate RUN`, got '--split test r'; see --help",
    "generate r Once upon": "unknown word 'Once'; see --help",
    "train lm --mechansim softmax": "unknown option '--mechansim'; did you mean --mechanism?",
    "train lm --data": "--data must be text, got no value; see --help",
    "train lm --set --data my.txt": "--set must have a value, got --data",
    "train lm --pretrain mask": "--pretrain must be one of masked, causal, got 'mask'; see --help",
    "evaluate r --split=some": "--split must be one of train, valid, test, got 'some'; see --help",
    "export r --to onnx m": "--to must be one of hf, safetensors and a path, got 'onnx m'",
    "convert m": "--data, --out must be given; see --help",
}


@pytest.mark.parametrize("typed", WRONG_WORDS)
def test_words_that_no_option_takes_are_refused_by_our_own_rules(typed, shell):
    assert WRONG_WORDS[typed] in shell.refuses(*typed.split())


def test_the_home_folder_of_a_path_behind_an_equals_sign_is_meant(tmp_path, monkeypatch, shell):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"got {tmp_path}/none" in shell.refuses("runs", "--folder=~/none")


WRONG_PATHS = {
    ("evaluate", ""): "--run must be a path, got ''",
    ("look", "r", ""): "--run must be a path, got ''",
    ("study", "lm", "--data", ""): "--data must be a path, got ''",
    ("reproduce", "probes", "--rows", ""): "--rows must be a path, got ''",
    ("reproduce", "probes", "--rows", "/"): "rows must be a file, got /, which is a folder",
    ("reproduce", "lm", "--out", "a"): "out must be a folder, got a, which is a file",
    ("study", "probes", "--out", "a/b"): "out must lie in a folder, got a/b, but a is a file",
    ("bench", "data", "--out", "a/b/c"): "out must lie in a folder, got a/b/c, but a is a file",
    ("demo", "--out", "a"): "out must be a folder, got a, which is a file",
    ("report", "--page", "a/x.html"): "page must lie in a folder, got a/x.html, but a is a file",
    ("report", "--figures", "a"): "figures must be a folder, got a, which is a file",
    ("runs", "a"): "folder must be a folder, got a, which is a file",
    ("runs", "b"): "folder must be a folder, got b, which does not exist",
    ("report", "--results", "b"): "results must be a folder, got b, which does not exist",
    ("data", "check", "--data", "b"): "data must be a folder, got b, which does not exist",
    ("predict", "r", "--data", "c", "--out", "./c"): "out must be another file than data, got c",
    ("runs", "--plot", "."): "plot must be a file, got ., which is a folder",
    ("mechanisms", "--write", "."): "write must be a file, got ., which is a folder",
    ("predict", "r", "--out", "a/b"): "out must lie in a folder, got a/b, but a is a file",
    ("export", "r", "--to", "hf", "a"): "to must be a folder, got a, which is a file",
    ("export", "r", "--to", "safetensors", "."): "to must be a file, got ., which is a folder",
    ("data", "get", "enwik8", "--data", "a"): "data must be a folder, got a, which is a file",
    ("data", "make", "--data", "a/b"): "data must lie in a folder, got a/b, but a is a file",
}


@pytest.mark.parametrize("typed", WRONG_PATHS, ids=" ".join)
def test_a_path_that_cannot_be_meant_or_written_is_refused_by_name(
    typed, tmp_path, monkeypatch, shell
):
    (tmp_path / "a").touch()
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    assert WRONG_PATHS[typed] in shell.refuses(*typed)


BOXES = [
    "╭─ Value error ──╮\n│ size must be │\n│ at least 1 │\n│ ──── │\n│ For help │\n╰────╯\n",
    " Value error   \n ---------- \n  size must be \n  at least 1 \n  -----\n  For help \n",
    "\x1b[31m╭─\x1b[0m Error ╮\n\x1b[31m│\x1b[0m size \x1b[1mmust be\x1b[0m at least 1 │\n│ ─── │",
]


@pytest.mark.parametrize("box", BOXES, ids=["unicode", "ascii", "colour"])
def test_the_frame_around_a_complaint_is_taken_off(box):
    assert cli._first_sentence(box) == "size must be at least 1"


ERRORS = [
    (ValueError("rows must exist"), "toy run: rows must exist"),
    (FileNotFoundError(2, "No such file", "x.jsonl"), "x.jsonl"),
    (ModuleNotFoundError(name="matplotlib"), "pip install 'cosformer[plot]'"),
    (ModuleNotFoundError(name="tqdm"), "pip install 'cosformer[cli]'"),
]


@pytest.mark.parametrize(("error", "message"), ERRORS)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(toy, error, message, shell):
    toy.run = unittest.mock.Mock(side_effect=error)
    assert message in shell.refuses("toy", "run")


@pytest.mark.parametrize("error", [KeyError("bug"), ModuleNotFoundError(name="our_own")])
def test_an_error_of_ours_is_not_hidden(toy, error, shell):
    toy.run = unittest.mock.Mock(side_effect=error)
    with pytest.raises(type(error)):
        shell("toy", "run")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("heard")
def test_an_interrupt_ends_a_verb_quietly(toy, number, code, shell):
    toy.run = lambda options: signal.raise_signal(number)
    assert shell("toy", "run") == (code, "", "")


def python(*arguments, **how):
    """A Python of its own, with what it printed."""
    taken = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT} | how
    return subprocess.run([sys.executable, *arguments], **taken)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_imported_ends_the_process_and_prints_nothing(tmp_path, number):
    """Torch takes seconds to import, and swallows exceptions meanwhile."""
    (tmp_path / "torch.py").write_text(f"import os\nos.kill(os.getpid(), {number:d})\n")
    code = "import signal; signal.signal(2, signal.default_int_handler); import sys\n"
    code += "sys.argv = ['cosformer', 'runs']; from cosformer.cli import main; sys.exit(main())"
    done = python("-c", code, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")


@pytest.mark.usefixtures("toy")
def test_without_tyro_the_extra_is_named(monkeypatch, shell):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert "the package tyro: pip install 'cosformer[cli]'" in shell.refuses("toy", "run")


def test_the_module_runs_from_a_shell_without_optional_packages():
    code = "import sys, runpy; sys.argv = ['cosformer', '--help']\n"
    code += "try: runpy.run_module('cosformer', run_name='__main__')\n"
    code += "except SystemExit as stop: assert stop.code == 0, stop.code\n"
    code += "assert not {'tyro', 'matplotlib', 'torch'} & sys.modules.keys()\n"
    done = python("-c", code)
    assert (done.returncode, "bench ops" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["data", "list"]])
def test_a_reader_that_has_gone_ends_a_verb_quietly(arguments):
    ours, theirs = os.pipe()
    os.close(ours)
    done = python("-m", "cosformer", *arguments, stdout=theirs)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")
