"""The build of `host.cpp`, with which `replay.py` repeats calls on a GPU without Python.

Only the command `cosformer build` makes one, in the cache. Without a build, or if the environment
has COSFORMER_NATIVE=0, all calls go through Python.
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
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.hopper import cache, nvrtc

SOURCE = Path(__file__).with_name("host.cpp")
NAME = "cosformer_host"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")


@dataclass(frozen=True)
class Options:
    """Compile the C++ code that calls kernels on Hopper GPUs, for this torch and this Python."""

    compiler: str = "g++"
    """A C++ compiler that is compatible with the one that torch was built with."""


def run(options: Options) -> int:
    print(build(options.compiler))
    return 0


def build(compiler: str = "g++") -> Path:
    """The path of the build in the cache; compiles `host.cpp` if there is none that is loaded."""
    path = _path()
    if path.exists() and not cache.refusal(path):
        return path
    if shutil.which(compiler) is None:
        raise ValueError(f"compiler must be a program on the PATH, got {compiler!r}")
    home = Path(torch.__file__).parent
    includes = (home / "include", home / "include/torch/csrc/api/include")
    with cache.written(path) as part:
        command = [
            compiler, *FLAGS, *(f"-isystem{each}" for each in includes),
            f"-isystem{sysconfig.get_paths()['include']}", str(SOURCE), "-o", str(part),
            f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{compiler} could not compile {SOURCE.name}: {done.stderr[-2000:]}")
    loaded.cache_clear()
    return path


def loaded_for(q: Tensor) -> Any:
    """The build for calls with this q; None on a CPU, where no build is looked for."""
    return loaded() if q.is_cuda else None


@functools.cache
def loaded() -> Any:
    """The build, connected to the CUDA driver; None if there is none that can be loaded."""
    path = _path()
    if os.environ.get("COSFORMER_NATIVE") == "0" or not path.exists():
        return None
    if reason := cache.refusal(path):
        warnings.warn(f"the build of `cosformer build` is ignored: {reason}", stacklevel=2)
        return None
    try:
        return connected(_import(path))
    except (ImportError, RuntimeError):  # made for another machine, or no driver here
        return None


def connected(host: Any) -> Any:
    """A build that has been told the functions of the CUDA driver."""
    driver = nvrtc.libraries()[0]
    addresses = (_address(driver.cuLaunchKernel), _address(driver.cuStreamIsCapturing))
    host.connect(*addresses, "cuda", nvrtc.mend_launch)
    return host


def _path() -> Path:
    """The file in the cache for the build of this source with this torch and Python."""
    made_from = (SOURCE.read_text(), torch.__version__, sys.version, *FLAGS)
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:32]
    return cache.folder() / f"{digest}.so"


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
