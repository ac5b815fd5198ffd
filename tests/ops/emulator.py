"""The kernels in CUDA C++ on a CPU, for tests: g++ compiles them, `emulator.h` runs their threads.

It proves nothing about speed, or about what only a GPU does wrong. But every number is made by the
very code of the kernels, through all that the host prepares.
"""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import stub_driver

from cosformer.ops.hopper import nvrtc
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.hopper import source as hopper_source

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


class Emulator(stub_driver.Driver):
    """A driver whose launches run the kernels.

    `folder` keeps what is compiled. `fault` is a pair of texts, (what a kernel says, what it shall
    say instead), for tests that ask whether a fault is seen.
    """

    def __init__(self, folder, fault=None):
        super().__init__()
        self.folder, self.fault = folder, fault

    def _launch(self, function, *rest):
        *shape, _stream, places, _ = rest
        name, options = self.kernels[function - 1]
        x, y, _, threads, *_ = shape
        run = compiled(name, options, self.folder, self.fault).launch
        return run(x, y, threads, ctypes.c_void_p(places))


def install(monkeypatch, folder, fault=None):
    """Kernels for Hopper that run on the CPU, for tensors there."""
    monkeypatch.setattr(nvrtc, "mend_launch", _refuse)
    return stub_driver.install(monkeypatch, Emulator(folder, fault))


def _refuse(code, *_):
    raise RuntimeError({710: "an assertion failed", 719: "threads wait for each other"}[code])


@functools.cache
def compiled(name, options, folder, fault):
    """A library whose `launch` runs the kernel with these options."""
    whole = program(name, options)
    if fault is not None and name == "sweep":
        assert fault[0] in whole
        whole = whole.replace(*fault)
    path = Path(folder, f"{hashlib.sha256(whole.encode()).hexdigest()[:24]}.so")
    if not path.exists():  # other processes may be at it too
        with tempfile.TemporaryDirectory(dir=folder) as room:
            given, made = Path(room, "kernel.cpp"), Path(room, "kernel.so")
            given.write_text(whole)
            words = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-w"]
            subprocess.run([*words, given, "-o", made], check=True)
            made.replace(path)
    library = ctypes.CDLL(str(path))
    library.launch.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
    return library


def program(name, options):
    """The text of a kernel for g++, with the emulator in place of CUDA and its instructions."""
    values = {"LEAKY_SLOPE": f"{hopper_source.LEAKY_SLOPE}f"}
    values |= {key: str(int(value)) for key, value in options._asdict().items()}
    return "\n".join(
        [
            (HERE / "emulator.h").read_text(),
            *(f"#define {key} {value}" for key, value in values.items()),
            text(hopper_plan.FILES[type(options)]),
            'extern "C" int launch(unsigned x, unsigned y, int threads, void** places) {',
            f"  return emulated::launch({name}, x, y, threads, places);",
            "}",
        ]
    )


def text(file):
    """A file of the kernels with the files that it includes."""
    if file == "instructions.cu":
        return (HERE / "emulated_instructions.h").read_text()
    own = (hopper_source.HERE / file).read_text()
    own = own.replace("extern __shared__", "extern").replace("__shared__", "static")
    return re.sub(r'^#include "(.+)"$', lambda found: text(found[1]), own, flags=re.M)
