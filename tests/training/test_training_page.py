"""docs/training.md: its code runs, its settings are settings."""

import re
import tomllib
from pathlib import Path

from cosformer.cli import VERBS, split_verb
from cosformer.config import merge
from cosformer.recipes import RECIPES, Setting, recipe

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def blocks(language):
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL))


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(blocks("python"), "training.md", "exec"), names)
    assert (tmp_path / "runs" / "copying" / "best.safetensors").is_file()


def test_the_settings_are_settings():
    config = merge(recipe("lm", Setting()), tomllib.loads(blocks("toml")))
    assert config.budget.accumulate == 4
    assert config.task.options["tokens"] == "bpe"


def test_the_commands_are_verbs_and_tasks():
    for line in filter(None, blocks("sh").splitlines()):
        verb, rest = split_verb(line.split("#")[0].split()[1:])
        assert verb in VERBS
        assert verb != "train" or rest[0] in RECIPES
