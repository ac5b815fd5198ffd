"""Attention on Hopper GPUs by `hopper.cu`: compiled on first use, launched with little ado.

Forward, dq, dk and dv are one kernel with its operands in other roles; see the head of that file.
"""

import ctypes
import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

RULES = {"none": 0, "clamp": 1, "add": 2, "signed": 3}
CHUNK = 64
THREADS = 640
SMALLEST_SEGMENT = 4 * CHUNK


def choose_segments(programs: int, length: int, processors: int, *, gathered: float = 0.6) -> int:
    """Into how many segments to cut a causal sequence: those that end first.

    A program takes a multiprocessor for itself. A cut sequence is swept once more, for the states
    that segments begin with, which costs `gathered` of a whole sweep.
    """
    best, least = 1, float("inf")
    for segments in range(1, max(1, min(64, length // SMALLEST_SEGMENT)) + 1):
        rounds = -(-programs * segments // processors)
        cost = rounds / segments * (1 + gathered * (segments > 1))
        if cost < least * 0.97:
            best, least = segments, cost
    return best


class Kernel(NamedTuple):
    function: ctypes.c_void_p
    shared: int


PARAMS = struct.Struct("12Q22q8if4x")


class Sweep(NamedTuple):
    """What the compiler is told; `hopper.cu` explains each."""

    KW: int
    R: int
    TURNED: bool = False
    READ: bool = True
    WRITE: bool = True
    REVERSE: bool = False
    X_RELU: bool = False
    Y_RELU: bool = False
    Z_RELU: bool = False
    RULE: int = 0
    DELTA: int = 0
    SCALED: bool = False
    GATED: bool = False
    MASKED: int = 0


@functools.cache
def kernel(name: str, options: Sweep | None, device: int) -> Kernel:
    flags = [f"-D{key}={int(value)}" for key, value in (options or Sweep(64, 1))._asdict().items()]
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # a context exists from here on
        return load(cubin(tuple(flags)), name)


def cubin(flags: tuple[str, ...]) -> bytes:
    """Machine code for these flags, from the cache on disk or from the compiler."""
    source = _source()
    digest = hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home, "cosformer", f"{digest}.cubin")
    try:
        return path.read_bytes()
    except OSError:
        code = _compile(source, flags)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(code)
        part.replace(path)
    except OSError:  # a cache that cannot be written costs a compilation, no more
        pass
    return code


@functools.cache
def _source() -> str:
    text = Path(__file__).with_name("hopper.cu").read_text()
    return text.replace("//@MMA", "".join(_mma(n) for n in (8, 64, 72, 128, 136)))


def _mma(n: int) -> str:
    """Wrappers of `wgmma` with n columns: its operands must be spelt out one by one."""
    count = n // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    places = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"

    def body(a: str, used: int, trans: str) -> str:
        b, add = count + used, count + used + 1
        return (
            f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{add}, 0; '
            f'{name} {{{sums}}}, {a}, %{b}, p, 1, 1, {trans}; }}" : {places} : '
        )

    quad = ", ".join(f"%{count + i}" for i in range(4))
    return f"""
template <> struct Mma<{n}> {{
  template <int TA, int TB>
  static INLINE void from_shared(float (&d)[{count}], u64 a, u64 b, int add) {{
    {body(f"%{count}", 1, f"%{count + 3}, %{count + 4}")}
      "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
  }}
  template <int TB>
  static INLINE void from_registers(float (&d)[{count}], const u32* a, u64 b, int add) {{
    {body(f"{{{quad}}}", 4, f"%{count + 6}")}
      "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB));
  }}
}};
"""


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The driver and NVRTC, which torch brings along."""
    version = str(torch.version.cuda).split(".")[0]
    names = [f"libnvrtc.so.{version}"]
    names += [str(p) for p in Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{names[0]}")]
    for name in names:
        try:
            return ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"NVRTC is needed to compile hopper.cu; tried {', '.join(names)}")


def _compile(source: str, flags: tuple[str, ...]) -> bytes:
    nvrtc = _libraries()[1]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"hopper.cu", 0, None, None
    )
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
            raise RuntimeError(f"NVRTC could not compile hopper.cu: {read('ProgramLog').decode()}")
        return read("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def load(code: bytes, name: str) -> Kernel:
    cuda = _libraries()[0]
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    place, size, shared = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), code))
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    if name != "sweep":
        return Kernel(function, 0)
    _check(cuda.cuModuleGetGlobal_v2(ctypes.byref(place), ctypes.byref(size), module, b"shared_bytes"))
    _check(cuda.cuMemcpyDtoH_v2(ctypes.byref(shared), place, 4))
    _check(cuda.cuFuncSetAttribute(function, 8, shared.value))  # dynamic shared memory
    return Kernel(function, shared.value)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA driver error {code}")


def launch(it: Kernel, grid: tuple[int, int], threads: int, device: int, *arguments: Any) -> None:
    """Arguments are ctypes values or bytes."""
    held = [ctypes.create_string_buffer(a, len(a)) if isinstance(a, bytes) else a for a in arguments]
    pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(a) for a in held))
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    code = _libraries()[0].cuLaunchKernel(
        it.function, *grid, 1, threads, 1, 1, it.shared, stream, pointers, None
    )
    _check(code)


def sweep(
    options: Sweep,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    basis: Tensor,
    rows: int,
    *,
    out: Tensor | None = None,
    gate: Tensor | None = None,
    total: Tensor | None = None,
    inverse: Tensor | None = None,
    delta: Tensor | None = None,
    first: Tensor | None = None,
    last: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 0.0,
    sums: bool = False,
) -> None:
    """States are [B, H, segments or 1, R, D, V (+1)]."""
    batch, heads, length, contracted = x.shape
    columns = z.shape[3]
    blocks, segments = -(-columns // 64), -(-length // rows)
    device = x.device.index

    def pointer(t: Tensor | None) -> int:
        return 0 if t is None else t.data_ptr()

    def strides(t: Tensor | None) -> tuple[int, ...]:
        return (0, 0, 0) if t is None else t.stride()[:3]

    def steps(t: Tensor | None) -> tuple[int, int]:
        if t is None:
            return (0, 0)
        return t.stride(1), t.stride(2) if t.shape[2] > 1 else 0

    params = PARAMS.pack(
        *(pointer(t) for t in (x, y, z, gate, out, total, inverse, delta, basis, first, last, mask)),
        *strides(x), *strides(y), *strides(z), *strides(gate), *strides(out),
        *(basis.stride(i) if basis.shape[i] > 1 else 0 for i in (0, 1)),
        0 if mask is None else mask.stride(0), *steps(first), *steps(last),
        heads, length, rows, segments, blocks, contracted, columns,
        (contracted if options.TURNED else columns) + sums, eps,
    )  # fmt: skip
    launch(
        kernel("sweep", options, device), (batch * heads * segments * blocks, 1), THREADS, device,
        params,
    )  # fmt: skip


def prepare(grad: Tensor, out: Tensor, total: Tensor, rule: str, eps: float) -> tuple[Tensor, Tensor]:
    """1/D and δ of every row."""
    inverse, delta = torch.empty_like(total), torch.empty_like(total)
    width, rows, device = out.shape[3], total.numel(), total.device.index
    wide = 64 if width <= 64 else 128
    launch(
        kernel("prepare", Sweep(wide, 1, RULE=RULES[rule]), device), (-(-rows * wide // 2048), 1), 256, device,
        *(ctypes.c_void_p(t.data_ptr()) for t in (grad, out, total, inverse, delta)),
        *(ctypes.c_longlong(n) for n in (*grad.stride()[:3], *out.stride()[:3], rows)),
        *(ctypes.c_int(n) for n in (*total.shape[1:], width)), ctypes.c_float(eps),
    )  # fmt: skip
    return inverse, delta


def edges(
    states: Tensor, start: Tensor | None, *, causal: bool, reverse: bool = False
) -> Tensor:
    """Turns what segments add into what they start with; returns the sum of all."""
    batch, heads, segments = states.shape[:3]
    last = states.new_empty(batch, heads, 1, *states.shape[3:])
    size = last[0, 0].numel()
    device = states.device.index
    begin = ctypes.c_void_p(0 if start is None else start.data_ptr())
    launch(
        kernel("edges", None, device), (batch * heads, -(-size // 256)), 256, device,
        ctypes.c_void_p(states.data_ptr()), begin, ctypes.c_void_p(last.data_ptr()),
        ctypes.c_longlong(size), ctypes.c_int(segments), ctypes.c_int(causal), ctypes.c_int(reverse),
    )  # fmt: skip
    return last
