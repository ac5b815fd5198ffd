"""Who may import whom: rooms, their doors, the arrows between them; how little an import loads.

A room is a folder of `cosformer`. Its `__init__` is its door: a file of another room imports from
the door, or from the files of the folders that it lies in itself. The single files on top (`check`,
`runtime`, `memo`, …) are rooms of one file.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cosformer

ROOT = Path(__file__).parents[1]
BASE = {"check", "runtime", "memo"}
OPS = BASE | {"ops", "ops/problem"}
MECHANISMS = OPS | {"ops/features", "mechanisms"}
NN = MECHANISMS | {"nn"}
MODELS = NN | {"models"}
RUNS = MODELS | {"tasks", "training", "records", "config"}
ALL = RUNS | {"bench", "report", "recipes", "data", "host_memory", "ops/chunked"}

ARROWS: dict[str, set[str]] = {
    "runtime": set(),
    "check": {"runtime"},
    "memo": {"runtime"},
    "ops/problem": BASE,
    "ops/chunked": BASE | {"ops/problem"},
    "ops/triton": OPS,
    "ops/triton/kernels": set(),
    "ops/hopper": BASE | {"ops/problem"},
    "ops/autograd": BASE | {"ops/problem", "ops/chunked", "ops/triton", "ops/hopper"},
    "ops/features": BASE,
    "ops": OPS | {"ops/autograd", "ops/triton", "ops/hopper"},
    "mechanisms": MECHANISMS | {"mechanisms/linear", "mechanisms/patterns", "mechanisms/dense"},
    "mechanisms/linear": MECHANISMS | {"ops/triton/kernels"},
    "mechanisms/patterns": MECHANISMS,
    "mechanisms/dense": MECHANISMS,
    "nn": NN,
    "models": MODELS,
    "distributed": MODELS | {"distributed"},
    "host_memory": set(),
    "records": {"host_memory", "check"},
    "config": {"check"},
    "tasks": {"tasks", "config", "check"},
    "training": RUNS | {"distributed", "training/checkpoints"},
    "training/checkpoints": {"training", "tasks", "training/checkpoints"},
    "bench": RUNS | {"bench", "conversion", "hf", "host_memory", "ops/chunked"},
    "report": {"report", "records", "check"},
    "hf": {"hf", "models", "nn", "mechanisms", "ops", "check"},
    "conversion": {"conversion", "hf", "models", "training", "tasks", "config", "check"},
    "demo": RUNS | {"demo", "bench", "report"},
    "recipes": ALL,
    "data": {"data", "tasks", "check"},
    "commands": ALL | {"commands", "conversion", "hf"},
    "catalogue": {"mechanisms", "report", "check"},
    "cli": ALL | {"demo", "catalogue", "commands", "completion"},
    "completion": {"cli"},
    "__main__": {"cli"},
    "__init__": NN,
}
"""Room -> the rooms whose doors it may knock at. A new room gets a line here."""

THIRD_PARTY: dict[str, set[str]] = {
    "ops": {"torch", "triton"},
    "mechanisms": {"torch", "triton"},
    "nn": {"torch"},
    "models": {"torch"},
    "distributed": {"torch"},
    "tasks": {"torch", "numpy", "tokenizers"},
    "data": {"numpy"},
    "report": {"matplotlib"},
    "hf": {"torch", "transformers", "tokenizers"},
}
"""Packages from outside that a part may import; parts not named here are free to, but not early."""
AT_IMPORT = {"torch", "numpy"}
"""What may be imported by the top level of a module; all else waits for its first use."""
WHOLE = {"hf": {"transformers"}}
"""Room -> what its top level may import too, because the room itself waits for its first use."""


@dataclass(frozen=True)
class Import:
    where: str
    module: str  # written in full: `torch.nn`, `cosformer.ops.state`
    name: str | None  # what is imported from it; None for `import module`
    early: bool

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def _files() -> list[Path]:
    return sorted(ROOT.glob("cosformer/**/*.py"))


def _is_kernels(path: Path) -> bool:
    """Whether functions and other kernels alone import the file, because it loads Triton."""
    return path.stem.endswith("_kernels") or path.parent.name == "kernels"


def _room(path: Path) -> str:
    below = path.relative_to(ROOT / "cosformer")
    return str(below.parent) if len(below.parts) > 1 else below.stem


def _file_of(module: str) -> Path | None:
    """The file of a module of ours; that of a package is its door."""
    path = ROOT.joinpath(*module.split("."))
    found = [path.with_suffix(".py"), path / "__init__.py"]
    return next((each for each in found if each.exists()), None)


@functools.cache
def _imports(path: Path) -> tuple[Import, ...]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(function, ast.If) and "TYPE_CHECKING" in ast.unparse(function.test))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        found += [Import(where, module, name, node not in late) for module, name in names]
    return tuple(found)


def _target(found: Import, room: Path | None = None) -> Path:
    """The file that an import of ours reaches, from a file in the folder `room`.

    Of `from package import name` it is the door, if the door has that name, or else the module;
    inside the package itself it is the module.
    """
    path = _file_of(found.module)
    assert path is not None, f"{found.where}: there is no {found.module}"
    inner = None if found.name is None else _file_of(f"{found.module}.{found.name}")
    if inner is not None and path.parent == room:
        return inner
    if inner is None or found.name in {each.name for each in _imports(path)}:
        return path
    return inner


def _ours(path: Path) -> Iterator[tuple[Import, Path]]:
    for found in _imports(path):
        if found.package == "cosformer" and found.name != "__version__":
            yield found, _target(found, path.parent)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows_and_knock_at_doors(path: Path) -> None:
    room = _room(path)
    assert room in ARROWS, f"{room} is a new room: say in ARROWS what it may import"
    for found, target in _ours(path):
        other = _room(target)
        if path.parent.is_relative_to(target.parent) and target.name != "__init__.py":
            continue  # a file of its own room, or of a folder around it
        if target.parent == path.parent and path.name == "__init__.py":
            continue
        above = target.parent.is_relative_to(path.parent)  # a folder below, which this one opens
        assert above or other in ARROWS[room], f"{found.where}: {room} may not import {other}"
        single = target.parent == ROOT / "cosformer"
        assert single or target.name == "__init__.py" or _is_kernels(target), (
            f"{found.where}: {target.relative_to(ROOT)} is behind the door of {other}"
        )
    for found in _imports(path):
        if found.package == "cosformer" or found.package in sys.stdlib_module_names:
            continue
        allowed = THIRD_PARTY.get(room.split("/")[0], {found.package})
        assert found.package in allowed, f"{found.where}: {room} may not import {found.package}"
        at_import = AT_IMPORT | WHOLE.get(room, set())
        early = found.early and found.package not in at_import and not _is_kernels(path)
        assert not early, f"{found.where}: {found.package} must be imported on first use"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_uses_a_private_name_of_another_file(path: Path) -> None:
    modules = set()
    for found, _ in _ours(path):
        name = found.name or found.module
        assert not name.startswith("_"), f"{found.where}: {name} is private"
        if found.name is not None and _file_of(f"{found.module}.{found.name}"):
            modules.add(found.name)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            assert not (private and node.value.id in modules), f"{path}:{node.lineno} {node.attr}"


def test_no_file_imports_itself_in_a_circle() -> None:
    """Imports inside functions count: a circle that is closed late is a circle."""
    remaining = {path: {target for _, target in _ours(path)} - {path} for path in _files()}
    while free := [path for path, targets in remaining.items() if not targets & remaining.keys()]:
        for path in free:
            del remaining[path]
    start = next(iter(remaining), None)
    circle: list[Path] = []
    while start is not None and start not in circle:
        circle.append(start)
        start = next(iter(sorted(remaining[start] & remaining.keys())))
    assert not circle, " -> ".join(str(path.relative_to(ROOT)) for path in circle)


OTHERS = [path for path in _files() if not _is_kernels(path)]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_are_imported_by_functions_or_each_other(path: Path) -> None:
    for found, target in _ours(path):
        kernels = _is_kernels(target) and target.name != "__init__.py"
        assert not (found.early and kernels), found.where


CASES = {
    "from cosformer.ops import attention": "cosformer/ops/__init__.py",  # the function
    "from cosformer.ops import dispatch": "cosformer/ops/dispatch.py",
    "import cosformer.nn": "cosformer/nn/__init__.py",
    "from cosformer.check import check_bool": "cosformer/check.py",
}


@pytest.mark.parametrize("source", CASES)
def test_imports_are_read_as_python_means_them(source: str) -> None:
    _, module, *rest = source.split()
    found = Import("a test", module, rest[-1] if rest else None, early=True)
    assert _target(found) == ROOT / CASES[source]


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
    parts = {name.split(".")[1] for name in ours if "." in name}
    assert parts <= {room.split("/")[0] for room in NN}


def test_dir_lists_public_names_once_whatever_was_imported() -> None:
    assert cosformer.attention  # a name that is imported on its first use
    assert dir(cosformer) == sorted({"__version__", *cosformer.__all__, *cosformer.ROOMS})
