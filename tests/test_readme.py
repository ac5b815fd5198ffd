"""README.md: its code runs, its commands and links exist."""

import re
from pathlib import Path

import pytest
import torch

from cosformer.cli import VERBS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_code_runs_from_top_to_bottom() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"make ([a-z-]+)(?=\s+#|`)", text))
    assert {"demo", "test", "check", "bench", "report"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_verb_in_the_makefile_exists() -> None:
    for verb in re.findall(r"/cosformer ([a-z ]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE):
        assert verb in VERBS


def test_contributing_names_every_file_of_the_ops() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`(\w+\.py)`", text))
    files = {path.name for path in (ROOT / "cosformer" / "ops").glob("[a-z]*.py")}
    theirs = {name for name in files if name.replace("_kernels", "") in named}
    assert files <= named | theirs


PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "NOTES.md",
    *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
)


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert (folder / target).exists(), target
