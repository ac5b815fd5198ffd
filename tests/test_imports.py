"""Who may import whom: the arrows between the parts, and how little `import cosformer` loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPS = {"ops"}
MECHANISMS = OPS | {"mechanisms"}
NN = MECHANISMS | {"nn"}
MODELS = NN | {"models"}
JOBS = MODELS | {"tasks", "records", "config"}
ALL = JOBS | {"training", "bench", "report", "hf", "recipes", "demo", "catalogue", "cli"}
ALL |= {"data", "commands", "host_memory"}

ARROWS: dict[str, set[str]] = {
    "check": set(),
    "host_memory": set(),
    "records": {"host_memory"},
    "config": set(),
    "ops": OPS,
    "mechanisms": MECHANISMS,
    "nn": NN,
    "models": MODELS,
    "tasks": {"tasks", "config"},
    "training": JOBS | {"training"},
    "bench": JOBS | {"bench", "training", "host_memory"},
    "report": {"report", "records"},
    "hf": {"hf", "models", "nn", "ops"},
    "demo": JOBS | {"demo", "bench", "report", "training"},
    "recipes": ALL - {"cli", "demo", "catalogue", "commands"},
    "commands": ALL - {"cli"},
    "catalogue": {"mechanisms", "report"},
    "data": {"data", "tasks"},
    "cli": ALL,
    "completion": {"cli"},
    "__main__": {"cli"},
    "__init__": NN,
}
"""Part -> the parts it may import. A new part gets a line here."""

THIRD_PARTY: dict[str, set[str]] = {
    "ops": {"torch", "triton"},
    "mechanisms": {"torch"},
    "nn": {"torch"},
    "models": {"torch"},
    "tasks": {"torch", "numpy"},
    "data": {"numpy"},
    "report": {"matplotlib"},
}
"""Packages from outside that a part may import; parts not named here are free to, but not early."""
ON_FIRST_USE = "_kernels"
"""How files end that only functions and each other import: what they import comes late as well."""

AT_IMPORT = {"torch", "numpy"}
"""What may be imported by the top level of a module; all else waits for its first use."""


@dataclass(frozen=True)
class Import:
    where: str
    target: str
    """`torch.nn`, or for our own: the part, as `ops`."""
    ours: bool
    early: bool


def _files() -> list[Path]:
    return sorted([*ROOT.glob("cosformer/**/*.py"), *ROOT.glob("recipes/**/*.py")])


def _part(path: Path) -> str:
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return "recipes" if first == "recipes" else rest[0]


def _our_part(module: str, name: str | None) -> str | None:
    """The part that `import module` or `from module import name` reaches; None for the version."""
    if module.split(".")[0] == "recipes":
        return "recipes"
    below = module.split(".")[1:]
    if below:
        return below[0]
    if name == "__version__":
        return None
    is_part = name is not None and name in ARROWS
    return name if is_part else "ops"  # the public names of the package are those of ops


def _imports(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(function, ast.If) and "TYPE_CHECKING" in ast.unparse(function.test))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, name in names:
            if module.split(".")[0] in ("cosformer", "recipes"):
                part = _our_part(module, name)
                if part is not None:
                    yield Import(where, part, ours=True, early=node not in late)
            elif module.split(".")[0] not in sys.stdlib_module_names:
                yield Import(where, module, ours=False, early=node not in late)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    part = _part(path)
    assert part in ARROWS, f"{part} is a new part: say in ARROWS what it may import"
    for found in _imports(path):
        package = found.target.split(".")[0]
        if found.ours:
            assert found.target in ARROWS[part], f"{found.where}: {part} may not import {package}"
        else:
            allowed = THIRD_PARTY.get(part, {package})
            assert package in allowed, f"{found.where}: {part} may not import {package}"
            late = part == "recipes" or path.stem.endswith(ON_FIRST_USE)
            early = found.early and package not in AT_IMPORT and not late
            assert not early, f"{found.where}: {package} must be imported on first use"


def test_the_arrows_have_no_cycle() -> None:
    remaining = {part: targets - {part} for part, targets in ARROWS.items()}
    while free := [part for part, targets in remaining.items() if not targets & remaining.keys()]:
        for part in free:
            del remaining[part]
    assert not remaining


CASES = {
    "from cosformer import attention": ["ops"],
    "from cosformer import records, __version__": ["records"],
    "import cosformer.nn.drop_in": ["nn"],
    "from cosformer.models import create_model": ["models"],
    "from cosformer.report.tables import TABLES": ["report"],
    "import torch.nn, json": ["torch.nn"],
    "def f():\n    import tyro": ["tyro"],
}


@pytest.mark.parametrize("source", CASES)
def test_imports_are_read_as_python_means_them(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(source)
    found = list(_imports(tmp_path / "module.py"))
    assert [each.target for each in found] == CASES[source]
    assert [each.early for each in found] == [not source.startswith("def")]


def test_importing_the_package_loads_torch_and_little_else() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import cosformer\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    added = done.stdout.split()
    ours = [name for name in added if name.split(".")[0] == "cosformer"]
    others = [name for name in added if name not in ours]
    roots = {name.split(".")[0] for name in others}
    assert roots <= sys.stdlib_module_names | {"torch"}
    assert len(others) <= 40, others
    assert {name.split(".")[1] for name in ours if "." in name} <= NN


OTHERS = [path for path in _files() if not path.stem.endswith(ON_FIRST_USE)]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_for_first_use_are_imported_by_functions_or_each_other(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").endswith(ON_FIRST_USE), path
