"""CUDA C++ at run time: NVRTC compiles, the driver loads and launches; torch brings both along."""

import ctypes
import functools
import hashlib
import os
import struct
import threading
from pathlib import Path
from typing import Any

import torch

NO_CONTEXT = 201


class Kernel:
    """A function on a device, and the shared memory it takes."""

    def __init__(self, code: bytes, name: str, device: int, *, shared: str = "") -> None:
        """`shared` names a constant of the code: how much dynamic shared memory it takes."""
        cuda = libraries()[0]
        _enter(device)
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        place, size, wanted = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        _check(cuda.cuModuleLoadData(ctypes.byref(module), code))
        _check(cuda.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()))
        if shared:
            found = (ctypes.byref(place), ctypes.byref(size), module, shared.encode())
            _check(cuda.cuModuleGetGlobal_v2(*found))
            _check(cuda.cuMemcpyDtoH_v2(ctypes.byref(wanted), place, 4))
            _check(cuda.cuFuncSetAttribute(self.function, 8, wanted.value))
        self.shared = wanted.value


class Launch:
    """A launch whose arguments are `count` pointers, which change, and a tail that does not."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, device: int, count: int,
        tail: bytes = b"", offsets: tuple[int, ...] = (0,),
    ) -> None:  # fmt: skip
        """`offsets`: where in the pointers and the tail each argument of the kernel begins."""
        self._device, self._lock = device, threading.Lock()
        self._pointers = struct.Struct(f"{count}Q")
        self._memory = ctypes.create_string_buffer(8 * count + len(tail))
        base = ctypes.addressof(self._memory)
        ctypes.memmove(base + 8 * count, tail, len(tail))
        self._places = (ctypes.c_void_p * len(offsets))(*(base + at for at in offsets))
        self._shape = (kernel.function, *grid, 1, threads, 1, 1, kernel.shared)

    def __call__(self, *pointers: int) -> None:
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self(*pointers)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:  # the driver copies the arguments before it returns
            self._pointers.pack_into(self._memory, 0, *pointers)
            code = _launch()(*self._shape, stream, self._places, None)
            if code == NO_CONTEXT:  # a thread that torch has not used CUDA in
                _enter(self._device)
                code = _launch()(*self._shape, stream, self._places, None)
        _check(code)


def cubin(source: str, flags: tuple[str, ...]) -> bytes:
    """Machine code for these flags, from the cache on disk or from the compiler."""
    digest = hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home, "cosformer", f"{digest}.cubin")
    try:
        return path.read_bytes()
    except OSError:
        code = _compile(source, flags)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        part.write_bytes(code)
        part.replace(path)
    except OSError:  # a cache that cannot be written costs a compilation, no more
        pass
    return code


def _compile(source: str, flags: tuple[str, ...]) -> bytes:
    nvrtc = libraries()[1]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"cosformer.cu", 0, None, None)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", *(flag.encode() for flag in flags)]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )

    def read(what: str) -> bytes:
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    try:
        if failed:
            raise RuntimeError(
                f"NVRTC could not compile the kernels: {read('ProgramLog').decode()}"
            )
        return read("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The driver and NVRTC, which torch brings along."""
    version = str(torch.version.cuda).split(".")[0]
    names = [f"libnvrtc.so.{version}"]
    names += [str(p) for p in Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{names[0]}")]
    for name in names:
        try:
            return ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"NVRTC is needed to compile the kernels; tried {', '.join(names)}")


@functools.cache
def _launch() -> Any:
    launch = libraries()[0].cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return launch


def _enter(device: int) -> None:
    """Makes torch's context the one of this thread."""
    cuda, number, context = libraries()[0], ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(number), device))
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    _check(cuda.cuCtxSetCurrent(context))


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p(b"unknown")
        libraries()[0].cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {code}: {(text.value or b'').decode()}")
