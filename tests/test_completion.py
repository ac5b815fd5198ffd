"""`cosformer completion`: what a shell offers after a beginning of a command."""

import shutil
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import pytest

from cosformer import cli
from cosformer.completion import SCRIPTS, Verb, verb

KNOWN = {
    "run": Verb({"--help": None, "--out": ()}, ()),
    "bench ops": Verb({"--device": ("cpu", "cuda"), "--fast": None}, ()),
    "bench ops all": Verb({"--deep": None}, ()),
    "names": Verb({"--names": ("alpha", "beta")}, ("alpha", "beta")),
}
CASES = {
    "": "run bench names",
    "b": "bench",
    "bench ": "ops",
    "bench ops --": "--device --fast",
    "bench ops --device ": "cpu cuda",
    "bench ops --device cu": "cuda",
    "bench ops --device cpu --f": "--fast",
    "bench ops all --": "--deep",
    "names ": "alpha beta --names",
    "run --out ": "",  # a file
    "unknown ": "",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("line", CASES)
def test_bash_offers_what_may_come_next(line):
    words = line.split(" ")
    typed = " ".join(f"'{word}'" for word in ["cosformer", *words])
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _cosformer; echo ${{COMPREPLY[*]}}"
    printed = subprocess.check_output(["bash", "-c", f"{SCRIPTS['bash'](KNOWN)}\n{ask}"], text=True)
    assert printed.split() == CASES[line].split()


@dataclass(frozen=True)
class Options:
    """Of a toy verb."""

    kind: Literal["soft", "hard"] | None = None
    kinds: tuple[Literal["a", "b"], ...] = ()
    top_k: int = 1
    deep: bool = False
    names: tuple[str, ...] = ()


def test_flags_and_values_are_those_of_the_options():
    module = SimpleNamespace(Options=Options, POSITIONAL="names", WORDS={"names": {"x": 1}})
    flags = {"--help": None, "--kind": ("soft", "hard"), "--kinds": ("a", "b"), "--top-k": ()}
    flags |= {"--deep": None, "--no-deep": None, "--names": ("x",)}
    assert verb(module) == Verb(flags, ("x",))


@pytest.mark.parametrize("language", SCRIPTS)
def test_every_verb_and_flag_is_in_the_script_of_a_known_shell(language, shell):
    printed = shell.shows("completion", language)
    for name in cli.VERBS:
        assert f'"{name}' in printed
    assert "quadratic-up-to" in printed
    assert "--shell" in shell.refuses("completion", "tcsh")
