"""Files of the user's own that register mechanisms, so that the package need not be edited."""

import importlib.util
import sys
import traceback
from pathlib import Path

PREFIX = "cosformer_plugin_"


def load_plugin(path: Path) -> None:
    """Run a Python file, once in a process; an error that names it if it cannot be run."""
    whole = path.resolve()
    name = PREFIX + whole.stem
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(whole):
        return
    if not whole.is_file() or whole.suffix != ".py":
        found = "is no Python file (.py)" if whole.exists() else "does not exist"
        raise ValueError(f"plugin must be a Python file, got {path}, which {found}")
    spec = importlib.util.spec_from_file_location(name, whole)
    assert spec is not None  # by the suffix
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):  # an interrupt is nobody's mistake
            raise
        raise ValueError(
            f"plugin must run without an error, got {path}{_line(error, whole)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _line(error: Exception, path: Path) -> str:
    """Where in the file the error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    return f", line {lines[-1]}" if lines else ""
