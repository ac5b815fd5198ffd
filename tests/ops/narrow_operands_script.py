"""A script: which launches of the sweep make tensor cores read a narrow operand row by row.

It compiles for a Hopper GPU, and needs none. It prints a line for every such launch; the tests run
it in a process of its own, because theirs interprets Triton's kernels.
"""

import re
import sys

import torch
from layouts import dense, in_columns
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

from cosformer import linear_attention
from cosformer.ops import dispatch
from cosformer.ops.triton.kernels import prepare, sweep

TARGET = GPUTarget("cuda", 90, 32)
WIDE = 128  # bytes: the widest pattern in which shared memory is laid out
OPERAND = re.compile(r"!ttg\.memdesc<(\d+)x(\d+)x\w+, (#\w+)")
LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.nvmma_shared<\{swizzlingByteWidth = (\d+), transposed = (\w+)"
)


class Launches:
    """In place of a kernel: notes what it is launched with."""

    def __init__(self, kernel):
        self.kernel, self.given = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **options: self.given.append((args, options))


def code_of(kernel, args, options):
    """What Triton makes of a launch for Hopper, before it is machine code."""
    backend = make_backend(TARGET)
    options = {"debug": False, **options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*args, **options)
    chosen, *parts = kernel._pack_args(backend, options, bound, specialization, rest)
    found = compile(ASTSource(kernel, *parts), target=TARGET, options=vars(chosen))
    return found.asm["ttgir"]


def narrow(code):
    """Operands in shared memory, of fewer than 128 bytes a row, that are not summed along it."""
    layouts = {name: (int(width), turned == "true") for name, width, turned in layouts_in(code)}
    for line in code.splitlines():
        if "ttng.warp_group_dot " not in line:
            continue
        left, right = line.split(" * ", 1)
        for text, is_left in ((left, True), (right, False)):
            if found := OPERAND.search(text):
                width, turned = layouts[found[3]]
                if width < WIDE and turned == is_left:
                    yield f"{found[1]} x {found[2]}"


def layouts_in(code):
    return [found.groups() for line in code.splitlines() if (found := LAYOUT.match(line))]


DECAY = {"gamma": 0.99}
PACKED = {"cu_seqlens": torch.tensor([0, 100, 300])}
CASES = {
    "columns, decay": (in_columns, 2, 64, DECAY),
    "columns, decay, cosine": (in_columns, 2, 64, {**DECAY, "theta": 1e-3}),
    "columns, packed": (in_columns, 1, 64, PACKED),
    "width 1, decay": (dense, 2, 1, DECAY),
}


def main() -> int:
    dispatch.why_not = lambda *given: None  # tensors on the CPU are taken
    launches = sweep.sweep_kernel = Launches(sweep.sweep_kernel)
    prepare.sums_kernel = Launches(prepare.sums_kernel)
    count = 0
    for name, (layout, batch, width, options) in CASES.items():
        q, k, v = (layout(torch.randn(batch, 2, 300, width).bfloat16()) for _ in range(3))
        linear_attention(q, k, v, causal=True, impl="triton", **options)
        for args, about in launches.given:
            count += 1
            for operand in narrow(code_of(launches.kernel, args, about)):
                print(f"{name}: {operand}")
        launches.given.clear()
    assert count >= len(CASES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
