"""The site of docs/: everything public is in its reference, and it opens without a network."""

import dataclasses
import doctest
import importlib
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from cosformer import cli

ROOT = Path(__file__).parents[2]
PARTS = ["ops", "nn", "mechanisms", "models", "distributed", "hf", "conversion", "tasks"]
ROOMS = ["cosformer", *(f"cosformer.{part}" for part in (*PARTS, "training"))]
"""The packages whose `__all__` the reference shows, each on the page of its last name."""


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_page_of_the_reference(room):
    page = ROOT / "docs" / "api" / f"{room.rpartition('.')[2]}.md"
    assert f"::: {room}" in page.read_text().splitlines()
    assert importlib.import_module(room).__all__


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings(action="default"):  # others' packages warn
        pytest.importorskip("mkdocstrings")
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    for room in ROOMS:
        page = (site / "api" / f"{room.rpartition('.')[2]}.html").read_text()
        for name in importlib.import_module(room).__all__:
            assert f'id="{room}.{name}"' in page, f"{room}.{name}"


@pytest.mark.slow
def test_every_verb_and_flag_is_in_the_reference(site):
    page = (site / "api" / "commands.html").read_text()
    for verb, (module, _) in cli.VERBS.items():
        section = page.partition(f'<h2 id="{verb.replace(" ", "-")}">')[2].partition("<h2 ")[0]
        assert section, verb
        for field in dataclasses.fields(importlib.import_module(module).Options):
            assert f"<code>--{field.name.replace('_', '-')}</code>" in section, field.name


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site):
    """By a browser itself; links wait for the reader."""
    address = r"=[\"']?((?:https?:)?//[^\"' >]*)"
    opened = rf"<(?:(?:script|img|iframe)\b[^>]*\bsrc|link\b[^>]*\bhref){address}"
    for ending, pattern in (("html", opened), ("css", r"url\([\"']?(\w+:?//[^)]*)\)")):
        text = " ".join(path.read_text() for path in site.rglob(f"*.{ending}"))
        assert re.findall(pattern, text) == []


@pytest.mark.parametrize("room", ROOMS[:-1])
def test_the_examples_in_docstrings_run(room):
    module = importlib.import_module(room)
    public = {name: getattr(module, name) for name in module.__all__}
    torch.manual_seed(0)
    runner = doctest.DocTestRunner()
    for name, documented in public.items():
        if getattr(documented, "__module__", "").startswith("cosformer"):
            names = {**vars(sys.modules[documented.__module__]), **public, "torch": torch}
            for test in doctest.DocTestFinder().find(documented, name, globs=names):
                runner.run(test)
    found = runner.summarize(verbose=False)
    without = room in ("cosformer.tasks", "cosformer.distributed")
    assert (found.failed, found.attempted > 0) == (0, not without)
