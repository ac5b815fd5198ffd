"""CUDA C++ at run time: NVRTC compiles it, the CUDA driver loads and launches it.

NVRTC comes with torch. Machine code is kept in the cache, so that one process compiles it for all.
"""

import contextlib
import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.ops.hopper import cache

NO_CONTEXT = 201
DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
CHECKSUM = hashlib.sha256().digest_size


class Code(NamedTuple):
    """Machine code, and what it was made from."""

    binary: bytes
    source: str
    options: tuple[str, ...]
    stored: bool
    """Whether it was read from the cache, where it may be damaged or of another driver."""


class Kernel:
    """A function that is loaded on a device, and the bytes of shared memory that it takes."""

    def __init__(self, code: Code, name: str, device: int, *, shared: str = "") -> None:
        """`shared` names a constant of the code: the bytes of dynamic shared memory it takes."""
        _enter(device)
        module, self.function = _load(code), ctypes.c_void_p()
        address, size, wanted = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        _driver("cuModuleGetFunction", ctypes.byref(self.function), module, name.encode())
        if shared:
            found = (ctypes.byref(address), ctypes.byref(size), module, shared.encode())
            _driver("cuModuleGetGlobal_v2", *found)
            _driver("cuMemcpyDtoH_v2", ctypes.byref(wanted), address, ctypes.c_size_t(4))
            _driver("cuFuncSetAttribute", self.function, DYNAMIC_SHARED_MEMORY, wanted.value)
        self.shared = wanted.value


class Launch:
    """A launch with `count` pointers, which differ from call to call, and a tail that does not."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, device: int, count: int,
        tail: bytes = b"", offsets: tuple[int, ...] = (0,),
    ) -> None:  # fmt: skip
        """`offsets`: the byte of pointers and tail at which each argument of the kernel begins."""
        self._device, self._lock = device, threading.Lock()
        self._pointers = struct.Struct(f"{count}Q")
        self._memory = ctypes.create_string_buffer(8 * count + len(tail))
        base = ctypes.addressof(self._memory)
        ctypes.memmove(base + 8 * count, tail, len(tail))
        self._arguments = (ctypes.c_void_p * len(offsets))(*(base + at for at in offsets))
        self._shape = (kernel.function, *grid, 1, threads, 1, 1, kernel.shared)

    def __call__(self, *tensors: Tensor | None) -> None:
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self(*tensors)
            return
        pointers = tuple(0 if x is None else x.data_ptr() for x in tensors)
        if (noted := getattr(_noting, "launches", None)) is not None:
            noted.append((self, pointers))
        self.start(torch._C._cuda_getCurrentRawStream(self._device), pointers)

    def start(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Launch with these addresses, on the current device."""
        with self._lock:  # the driver copies the arguments before it returns
            self._pointers.pack_into(self._memory, 0, *pointers)
            for again in (False, True):
                code = driver_launch()(*self._shape, stream, self._arguments, None)
                if not code:
                    return
                mend_launch(code, self._device, again)


_noting = threading.local()


@contextlib.contextmanager
def noting_launches() -> Iterator[list[tuple[Launch, tuple[int, ...]]]]:
    """The launches of this thread inside the context, each with its addresses."""
    noted: list[tuple[Launch, tuple[int, ...]]] = []
    _noting.launches = noted
    try:
        yield noted
    finally:
        _noting.launches = None


def mend_launch(code: int, device: int, again: bool) -> None:
    """Raises the error of a launch, or gives a thread the context that it had lacked.

    A thread in which torch has not used CUDA yet has no context; the launch may then be repeated.
    """
    if again or code != NO_CONTEXT:
        _check("cuLaunchKernel", code)
    _enter(device)


def cubin(source: str, flags: tuple[str, ...]) -> Code:
    """Machine code for these flags, from the cache on disk or from the compiler."""
    options = (*OPTIONS, *flags)
    kept = cache.read(_path(source, options)) or b""
    binary = kept[CHECKSUM:]
    if binary and hashlib.sha256(binary).digest() == kept[:CHECKSUM]:
        return Code(binary, source, options, stored=True)
    return Code(_made(source, options), source, options, stored=False)


def _path(source: str, options: tuple[str, ...]) -> Path:
    """The file in the cache for what this version of the compiler makes of the source."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    compiler = f"{major.value}.{minor.value}"
    digest = hashlib.sha256("\0".join((compiler, source, *options)).encode()).hexdigest()[:32]
    return cache.folder() / f"{digest}.cubin"


def _made(source: str, options: tuple[str, ...]) -> bytes:
    """Compiles, and keeps the result for the next process if the cache can be written to."""
    binary = _compile(source, options)
    # Without a cache the next process compiles again, and that is all.
    with contextlib.suppress(OSError), cache.written(_path(source, options)) as part:
        part.write_bytes(hashlib.sha256(binary).digest() + binary)
    return binary


def _load(code: Code) -> ctypes.c_void_p:
    """The code as a loaded module; code of the cache that the driver refuses is compiled again."""
    module = ctypes.c_void_p()
    failed = libraries()[0].cuModuleLoadData(ctypes.byref(module), code.binary)
    if failed and code.stored:
        fresh = _made(code.source, code.options)
        failed = libraries()[0].cuModuleLoadData(ctypes.byref(module), fresh)
    _check("cuModuleLoadData", failed)
    return module


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = (source.encode(), b"cosformer.cu", 0, None, None)
    _nvrtc("nvrtcCreateProgram", ctypes.byref(program), *text)

    def read(what: str) -> bytes:
        _nvrtc(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        _nvrtc(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if libraries()[1].nvrtcCompileProgram(program, len(options), given):
            log = read("ProgramLog").rstrip(b"\0").decode()
            raise RuntimeError(f"NVRTC could not compile the kernels: {log}")
        return read("CUBIN")
    finally:
        _nvrtc("nvrtcDestroyProgram", ctypes.byref(program))


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The CUDA driver, and NVRTC in the version that torch was built with."""
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
def driver_launch() -> Any:
    """`cuLaunchKernel` with the types of its arguments."""
    launch = libraries()[0].cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return launch


def _enter(device: int) -> None:
    """Makes the context that torch uses on this device the current one of this thread."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _driver("cuDeviceGet", ctypes.byref(number), device)
    _driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    _driver("cuCtxSetCurrent", context)


def _driver(name: str, *args: Any) -> None:
    _check(name, getattr(libraries()[0], name)(*args))


def _nvrtc(name: str, *args: Any) -> None:
    if code := getattr(libraries()[1], name)(*args):
        raise RuntimeError(f"{name} failed with error {code} of NVRTC")


def _check(name: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p(b"unknown")
        libraries()[0].cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(
            f"{name} failed with error {code} of the CUDA driver: {(text.value or b'').decode()}"
        )
