"""The build of `host.cpp`, by which `replay.py` repeats calls without Python.

Only `cosformer build` makes one, in the cache; without it, or under COSFORMER_NATIVE=0, all calls
go through Python.
"""

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cosformer.ops.hopper import nvrtc

SOURCE = Path(__file__).with_name("host.cpp")
NAME = "cosformer_host"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")


@dataclass(frozen=True)
class Options:
    """Compile what calls the kernels on Hopper GPUs: a build for this torch and this Python."""

    compiler: str = "g++"
    """A C++ compiler whose libraries are those that torch was built with."""


def run(options: Options) -> int:
    print(build(options.compiler))
    return 0


def build(compiler: str = "g++") -> Path:
    """Compiles `host.cpp` into the cache, if it is not there; where it lies."""
    path = _path()
    if path.exists():
        return path
    if shutil.which(compiler) is None:
        raise ValueError(f"compiler must be a program on the PATH, got {compiler!r}")
    home = Path(torch.__file__).parent
    includes = (home / "include", home / "include/torch/csrc/api/include")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    command = [
        compiler, *FLAGS, *(f"-isystem{each}" for each in includes),
        f"-isystem{sysconfig.get_paths()['include']}", str(SOURCE), "-o", str(part),
        f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{compiler} could not compile {SOURCE.name}: {done.stderr[-2000:]}")
    part.replace(path)
    loaded.cache_clear()
    return path


@functools.cache
def loaded() -> Any:
    """The build, connected to the driver; None without one that loads."""
    path = _path()
    if os.environ.get("COSFORMER_NATIVE") == "0" or not path.exists():
        return None
    try:
        return connected(_import(path))
    except (ImportError, RuntimeError):  # made for another machine, or no driver here
        return None


def connected(host: Any) -> Any:
    """A build that launches by torch's driver."""
    driver = nvrtc.libraries()[0]
    addresses = (_address(driver.cuLaunchKernel), _address(driver.cuStreamIsCapturing))
    host.connect(*addresses, "cuda", nvrtc.mend_launch)
    return host


def _path() -> Path:
    """Where the cache keeps the build for this source, torch and Python."""
    made_from = (SOURCE.read_text(), torch.__version__, sys.version, *FLAGS)
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:32]
    return nvrtc.cache_folder() / f"{digest}.so"


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
