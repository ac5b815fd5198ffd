"""README and docs: their code runs, their commands, flags, make targets and links exist."""

import importlib
import re
import shlex
import textwrap
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch

from cosformer import cli
from cosformer.completion import verb
from cosformer.config import merge
from cosformer.mechanisms import MECHANISMS
from cosformer.models import Use, recommended
from cosformer.recipes import RECIPES, Setting, recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "NOTES", "CHANGELOG")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TEXT = "The quick brown fox jumps over the lazy dog. " * 200
"""What `my.txt` has, which pages take for a reader's own text."""


def _name(page):
    return str(page.relative_to(ROOT))


def _blocks(page, language):
    found = re.findall(rf"(?ms)^ *```{language}\n(.*?)^ *```", page.read_text())
    return [re.sub(r"\\\n\s*", " ", textwrap.dedent(block)) for block in found]


def _commands(page):
    """The words of every line of the page's shell blocks."""
    for block in _blocks(page, "sh"):
        for line in block.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


WITH_CODE = [page for page in PAGES if _blocks(page, "python")]
WITH_COMMANDS = [page for page in PAGES if _blocks(page, "sh")]


@pytest.fixture(autouse=True)
def no_mechanism_stays():
    """CONTRIBUTING registers one."""
    before = dict(MECHANISMS)
    yield
    MECHANISMS.clear()
    MECHANISMS.update(before)


def test_the_readme_is_short_and_the_pages_that_teach_have_code():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
    names = {_name(page) for page in WITH_CODE}
    assert {"README.md", "CONTRIBUTING.md", "docs/op.md", "docs/streams.md"} <= names


@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_the_code_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    (tmp_path / "my.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": _name(page)}
    for block in _blocks(page, "python"):
        exec(compile(block, _name(page), "exec"), names)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=_name)
def test_every_verb_flag_and_make_target_exists(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *words in _commands(page):
        if program == "make":
            assert set(words) <= set(targets), words
        elif program == "cosformer" and words != ["--version"]:
            name, rest = cli.split_verb(words)
            assert name, f"{words} begins with no verb"
            assert name != "train" or rest[0] in RECIPES, rest
            flags = verb(importlib.import_module(cli.VERBS[name][0])).flags
            given = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert given <= flags.keys(), f"{name} has no {given - flags.keys()}"


def test_the_settings_of_the_page_on_training_are_settings():
    (block,) = _blocks(ROOT / "docs" / "training.md", "toml")
    config = merge(recipe("lm", Setting()), tomllib.loads(block))
    assert (config.budget.accumulate, config.task.options["tokens"]) == (4, "bpe")


@pytest.mark.parametrize("use", get_args(Use))
def test_the_page_on_models_names_what_is_recommended(use):
    fields = recommended(use)
    cells = [use, *fields.values()]
    spelt = [f"`{cell}`" for cell in cells[:-1]] + [str(fields["conv"])]
    assert f"| {' | '.join(spelt)} | " in (ROOT / "docs" / "models.md").read_text()


def test_every_verb_in_the_makefile_exists():
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"(?m)/cosformer ([a-z ]+)$", makefile)) <= cli.VERBS.keys()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_within_the_repository_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            path = page.parent / target if target else page
            assert path.exists(), target
            if anchor and "/api/" not in path.as_posix():  # those are made of docstrings
                titles = re.findall(r"(?m)^#+ (.*)$", path.read_text().lower())
                names = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
                assert anchor[1:] in names, anchor


def test_the_mechanism_of_contributing_is_trained_as_a_plugin(tmp_path, monkeypatch):
    (block,) = _blocks(ROOT / "CONTRIBUTING.md", "python")
    monkeypatch.chdir(tmp_path)
    Path("my_mechanism.py").write_text(block)
    (command,) = (words[1:] for words in _commands(ROOT / "CONTRIBUTING.md") if "train" in words)
    small = ["--preset=tiny", "--length=32", "--steps=2", "--batch=2", "--device=cpu", "--out=run"]
    assert cli.main([*command, *small]) == 0
    assert '"mechanism": "squared"' in Path("run/config.json").read_text()
