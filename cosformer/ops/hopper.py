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
MAX_WIDTH = 128
PARAMS = struct.Struct("12Q22q8if4x")


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, bounds: Tensor | None, states: int
) -> str | None:
    """What these kernels need and do not get; None if they can compute the problem."""
    if q.dtype != torch.bfloat16:
        return f"bfloat16, got {q.dtype}"
    if not q.is_cuda or not _is_hopper(q.device.index):
        return "a Hopper GPU"
    if decay is not None or bounds is not None or states > 2:
        return "plain or cosine weights, without decay or packing"
    if q.shape[1] != k.shape[1]:
        return f"as many heads of k as of q, got {k.shape[1]} and {q.shape[1]}"
    if not q.numel() or not k.numel():
        return "at least one token"
    for x in (q, k, v):
        if x.shape[3] > MAX_WIDTH or x.shape[3] % 8:
            return f"widths up to {MAX_WIDTH} that 8 divides, got {x.shape[3]}"
        if not _aligned(x):
            return f"rows that begin at multiples of 16 bytes, got strides {x.stride()}"
    return None


@functools.cache
def choose_segments(
    programs: int, length: int, processors: int, *, extra: float = 0.0, weight: int = 192
) -> int:
    """Into how many segments to cut a sequence: those that end first.

    A program takes a multiprocessor for itself and costs its rows, and `weight` rows for a state
    in or out. `extra`: what a cut sequence must be swept once more for, as a share of a sweep.
    """
    best, least = 1, float("inf")
    for segments in range(1, max(1, min(64, length // (4 * CHUNK))) + 1):
        rounds = -(-programs * segments // processors)
        cost = rounds * (length / segments + weight * (segments > 1)) * (1 + extra * (segments > 1))
        if cost < 0.98 * least:
            best, least = segments, cost
    return best


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    key_mask: Tensor | None,
    query_basis: Tensor,
    key_basis: Tensor,
    causal: bool,
    feature_map: str,
    rule: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, row totals and the state after the last key, as `fused_forward` in `fused.py`."""
    query_basis, key_basis = query_basis.contiguous(), key_basis.contiguous()
    state = None if state is None else state.contiguous()
    call = Call(q, v, query_basis.shape[3], feature_map, rule, eps, key_mask)
    same_width = q.shape[3] == v.shape[3]
    out = torch.empty_like(q) if same_width else q.new_empty(*q.shape[:3], v.shape[3])
    total = q.new_empty(q.shape[:3] if rule != "none" else (*q.shape[:2], 0), dtype=torch.float32)
    roles = call.roles
    if causal:
        rows = call.rows(v, q.shape[2], extra=0.6)
        if rows >= q.shape[2]:
            last = call.states(1)
            call.sweep(
                roles.forward,
                q,
                k,
                v,
                key_basis,
                rows,
                out=out,
                total=total,
                first=state,
                last=last,
            )
            return out, total, last
        first, last = call.gather(roles.gather, k, v, key_basis, rows, state, causal=True)
        call.sweep(roles.forward, q, k, v, key_basis, rows, out=out, total=total, first=first)
        return out, total, last
    rows = call.rows(v, k.shape[2])
    _, last = call.gather(roles.gather, k, v, key_basis, rows, state, causal=False)
    rows = call.rows(v, q.shape[2])
    call.sweep(roles.read, q, q, v, query_basis, rows, out=out, total=total, first=last)
    return out, total, last


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    key_mask: Tensor | None,
    query_basis: Tensor,
    key_basis: Tensor,
    out: Tensor,
    total: Tensor,
    grad: Tensor,
    grad_last: Tensor | None,
    causal: bool,
    feature_map: str,
    rule: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the state."""
    grad, out = (x if _aligned(x) else x.contiguous() for x in (grad, out))
    query_basis, key_basis = query_basis.contiguous(), key_basis.contiguous()
    state, grad_last = (None if x is None else x.contiguous() for x in (state, grad_last))
    call = Call(q, v, query_basis.shape[3], feature_map, rule, eps, key_mask)
    roles, (queries, keys) = call.roles, (q.shape[2], k.shape[2])
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if rule != "none":
        call.inverse, call.delta = prepare(grad, out, total, rule, eps)
    rows = call.rows(v, keys, extra=0.6 if causal else 0.0)
    whole = causal and rows >= keys
    first, last, grad_first = state, grad_last, call.states(1) if whole else None
    if not whole:
        first, everything = call.gather(roles.gather, k, v, key_basis, rows, state, causal=causal)
        first = first if causal else everything
    if causal:
        call.sweep(roles.dq, grad, v, k, key_basis, rows, out=dq, gate=q, first=first)
    else:
        here = call.rows(q, queries)
        call.sweep(roles.dq_read, grad, grad, k, query_basis, here, out=dq, gate=q, first=first)
    if not whole:
        back = rows if causal else call.rows(q, queries)
        last, grad_first = call.gather(
            roles.dk_gather, grad, q, query_basis, back, grad_last, causal=causal, turned=True
        )
        last = last if causal else grad_first
    if causal:
        call.sweep(
            roles.dk, v, grad, q, key_basis, rows, out=dk, gate=k, first=last,
            last=grad_first if whole else None,
        )  # fmt: skip
        call.sweep(roles.dv, k, q, grad, key_basis, rows, out=dv, first=last)
    else:
        here = call.rows(k, keys)
        call.sweep(roles.dk_read, v, v, q, key_basis, here, out=dk, gate=k, first=last)
        call.sweep(roles.dv_read, k, k, grad, key_basis, call.rows(v, keys), out=dv, first=last)
    assert grad_first is not None
    return dq, dk, dv, grad_first


class Kernel(NamedTuple):
    function: ctypes.c_void_p
    shared: int


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


class Roles(NamedTuple):
    """The sweep kernel in each of its roles."""

    forward: Sweep
    gather: Sweep
    read: Sweep
    dq: Sweep
    dq_read: Sweep
    dk: Sweep
    dk_gather: Sweep
    dk_read: Sweep
    dv: Sweep
    dv_read: Sweep


@functools.cache
def roles_of(
    width: int, value_width: int, states: int, relu: bool, rule: int, masked: bool
) -> Roles:
    """`hopper.cu` has the table of what stands where."""
    by_key = Sweep(64 if width <= 64 else 128, states, RULE=rule)
    by_value = Sweep(64 if value_width <= 64 else 128, states, RULE=rule, TURNED=True, GATED=relu)
    divided, hidden, hides = rule != 0, 2 * masked, 1 * masked
    forward = by_key._replace(X_RELU=relu, Y_RELU=relu, MASKED=hides)
    dq = by_value._replace(Z_RELU=relu, DELTA=int(divided), MASKED=hides)
    dk = by_value._replace(
        Z_RELU=relu, DELTA=2 * divided, SCALED=divided, REVERSE=True, MASKED=hidden
    )
    dv = by_key._replace(X_RELU=relu, Y_RELU=relu, SCALED=divided, REVERSE=True, MASKED=hidden)
    return Roles(
        forward,
        forward._replace(READ=False, X_RELU=False),
        forward._replace(WRITE=False, Y_RELU=False),
        dq, dq._replace(WRITE=False, Z_RELU=False),
        dk, dk._replace(READ=False, GATED=False, MASKED=0), dk._replace(WRITE=False, Z_RELU=False),
        dv, dv._replace(WRITE=False, Y_RELU=False),
    )  # fmt: skip


class Call:
    """What the launches of one call have in common."""

    def __init__(
        self, q: Tensor, v: Tensor, states: int, feature_map: str, rule: str, eps: float,
        key_mask: Tensor | None,
    ) -> None:  # fmt: skip
        self.programs = q.shape[0] * q.shape[1]
        self.shape = (states, q.shape[3], v.shape[3] + (rule != "none"))  # of a state
        self.like, self.eps, self.sums = q, eps, rule != "none"
        self.roles = roles_of(
            q.shape[3], v.shape[3], states, feature_map == "relu", RULES[rule], key_mask is not None
        )
        self.key_mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        self.inverse: Tensor | None = None
        self.delta: Tensor | None = None

    def rows(self, z: Tensor, length: int, extra: float = 0.0) -> int:
        """The length of a segment where z gives the columns."""
        programs = self.programs * -(-z.shape[3] // 64)
        processors = _processors(self.like.device.index)
        segments = choose_segments(programs, length, processors, extra=extra)
        return -(-length // (segments * CHUNK)) * CHUNK

    def states(self, segments: int) -> Tensor:
        """Room for states `[B, H, segments, R, D, V(+1)]`, or `[B, H, R, D, V(+1)]` for one."""
        several = (segments,) if segments > 1 else ()
        return self.like.new_empty(*self.like.shape[:2], *several, *self.shape, dtype=torch.float32)

    def gather(
        self, options: Sweep, y: Tensor, z: Tensor, basis: Tensor, rows: int, start: Tensor | None,
        *, causal: bool, turned: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What each segment starts with, and the state after all of them."""
        segments = -(-y.shape[2] // rows)
        local = self.states(segments)
        self.sweep(options, y, y, z, basis, rows, last=local)
        if segments == 1 and start is None:
            return local, local
        return local, edges(local, start, segments, causal=causal, reverse=turned)

    def sweep(
        self, options: Sweep, x: Tensor, y: Tensor, z: Tensor, basis: Tensor, rows: int, *,
        out: Tensor | None = None, gate: Tensor | None = None, total: Tensor | None = None,
        first: Tensor | None = None, last: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One launch; without `out` it only sums states. `rows` is the length of a segment."""
        batch, heads, length, contracted = x.shape
        columns, device = z.shape[3], x.device.index
        blocks, segments = -(-columns // 64), -(-length // rows)
        mask = self.key_mask if options.MASKED else None
        params = ctypes.create_string_buffer(PARAMS.size)
        PARAMS.pack_into(
            params, 0, x.data_ptr(), y.data_ptr(), z.data_ptr(), _pointer(gate), _pointer(out),
            _pointer(total), _pointer(self.inverse), _pointer(self.delta),
            basis.data_ptr(), _pointer(first), _pointer(last), _pointer(mask),
            *x.stride()[:3], *y.stride()[:3], *z.stride()[:3], *_strides(gate), *_strides(out),
            *_per_head(basis), length, *_steps(first), *_steps(last),
            heads, length, rows, segments, blocks, contracted, columns,
            (contracted if options.TURNED else columns) + self.sums, self.eps,
        )  # fmt: skip
        grid = (batch * heads * segments * blocks, 1)
        launch(kernel("sweep", options, device), grid, THREADS, device, params)


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _steps(states: Tensor | None) -> tuple[int, int]:
    """From head to head and from segment to segment; one state may serve all segments."""
    if states is None:
        return 0, 0
    return states.stride(1), states.stride(2) if states.dim() == 6 else 0


def _per_head(basis: Tensor) -> tuple[int, int]:
    batch, heads = basis.shape[:2]
    return basis.stride(0) if batch > 1 else 0, basis.stride(1) if heads > 1 else 0


def _aligned(x: Tensor) -> bool:
    """Rows in one piece that begin where 16 bytes do."""
    *steps, one = x.stride()
    return one == 1 and not any(step % 8 for step in steps) and x.data_ptr() % 16 == 0


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"hopper.cu", 0, None, None)
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
    _check(
        cuda.cuModuleGetGlobal_v2(ctypes.byref(place), ctypes.byref(size), module, b"shared_bytes")
    )
    _check(cuda.cuMemcpyDtoH_v2(ctypes.byref(shared), place, 4))
    _check(cuda.cuFuncSetAttribute(function, 8, shared.value))  # dynamic shared memory
    return Kernel(function, shared.value)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA driver error {code}")


def launch(it: Kernel, grid: tuple[int, int], threads: int, device: int, *arguments: Any) -> None:
    """Arguments are ctypes values."""
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            launch(it, grid, threads, device, *arguments)
        return
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    code = _libraries()[0].cuLaunchKernel(
        it.function, *grid, 1, threads, 1, 1, it.shared, stream, pointers, None
    )
    _check(code)


def prepare(
    grad: Tensor, out: Tensor, total: Tensor, rule: str, eps: float
) -> tuple[Tensor, Tensor]:
    """1/D and δ of every row."""
    inverse, delta = torch.empty_like(total), torch.empty_like(total)
    width, rows, device = out.shape[3], total.numel(), total.device.index
    wide = 64 if width <= 64 else 128
    launch(
        kernel("prepare", Sweep(wide, 1, RULE=RULES[rule]), device),
        (-(-rows * wide // 2048), 1), 256, device,
        *(ctypes.c_void_p(t.data_ptr()) for t in (grad, out, total, inverse, delta)),
        *(ctypes.c_longlong(n) for n in (*grad.stride()[:3], *out.stride()[:3], rows)),
        *(ctypes.c_int(n) for n in (*total.shape[1:], width)), ctypes.c_float(eps),
    )  # fmt: skip
    return inverse, delta


def edges(
    states: Tensor, start: Tensor | None, segments: int, *, causal: bool, reverse: bool
) -> Tensor:
    """Turns what segments add into what they start with; returns the sum of all."""
    shape = (*states.shape[:2], *states.shape[-3:])
    last = states.new_empty(shape)
    size, device = last.stride(1), states.device.index
    programs = (shape[0] * shape[1], -(-size // 256))
    launch(
        kernel("edges", None, device), programs, 256, device,
        ctypes.c_void_p(states.data_ptr()), ctypes.c_void_p(_pointer(start)),
        ctypes.c_void_p(last.data_ptr()), ctypes.c_longlong(size), ctypes.c_int(segments),
        ctypes.c_int(causal), ctypes.c_int(reverse),
    )  # fmt: skip
    return last
