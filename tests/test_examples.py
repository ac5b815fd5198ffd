"""The scripts of examples/: short, and each does what its last line says."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
QUICK = {
    "convert_torch.py": (["--steps", "2"], "trained further: loss "),
    "hugging_face.py": (["--steps", "2", "--tokens", "4", "--save", "m"], "saved to m and loaded"),
    "many_streams.py": (["--users", "9", "--ticks", "4"], "as much after 8 tokens of all others"),
    "own_model.py": (["--steps", "2", "--width", "8"], "step 2: loss "),
    "train_and_generate.py": (
        ["my.txt", "--preset", "tiny", "--steps", "2", "--length", "16", "--prompt", "to be"],
        "to be",
    ),
}
"""Script -> arguments for a test, and what its output has."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_short_and_runs(name, tmp_path, monkeypatch, capsys):
    assert len((FOLDER / name).read_text().splitlines()) < 60
    (tmp_path / "my.txt").write_text("to be or not to be\n" * 50)
    monkeypatch.chdir(tmp_path)
    arguments, shown = QUICK[name]
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(arguments) == 0
    assert shown in capsys.readouterr().out


def test_every_example_is_named_by_the_page_that_begins():
    page = (FOLDER.parent / "docs" / "start.md").read_text()
    assert [name for name in SCRIPTS if f"../examples/{name}" not in page] == []
