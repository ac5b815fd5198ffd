"""Compiles the kernels of a model's step for a Hopper GPU, which need not be there."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cosformer.mechanisms.dense import softmax_kernels
from cosformer.ops.triton.kernels import likeliest, rows, step, token

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "*bf16": "x weight bias residual norm_weight norm_bias out added total rows state logits "
    "queries k_cache v_cache q k v",
    "*fp32": "key_value key_sum taps parts sums tops",
    "*i64": "length position chosen token drawn slots",
    "*fp64": "theta fade faded turns",
    "fp32": "eps norm_eps log_most scale",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
HEADS = {"K": 64, "V": 64, "BLOCK_K": 64, "BLOCK_V": 64}
STRIDES = ("_r", "_b", "_h", "_s", "_k", "_t")
AFTER = {"NORM": True, "GATE": "sigmoid"}


def compiled(kernel, warps, **constants):
    """The kernel with these constants; other arguments are pointers or whole numbers."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names
    }
    given = {(names.index(name),): value for name, value in constants.items()}
    # As launches find it: addresses and strides are multiples of 16.
    even = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name.endswith(STRIDES)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=even)
    options = {"num_warps": warps, "launch_pdl": constants.get("EARLY", False)}
    made = triton.compile(source, target=HOPPER, options=options).asm
    assert len(made["cubin"])
    print(kernel.__name__, constants)
    return made["ptx"]


def waits_before(ptx, *signs):
    """Whether a kernel waits for the one in front of it before the first of these instructions."""
    wait = ptx.index("griddepcontrol.wait")
    assert ptx.index("griddepcontrol.launch_dependents") < wait
    assert all(wait < ptx.index(sign) for sign in signs), ptx


linear = {"K": 768, "BLOCK_K": 1024, "BLOCK_N": 4, "NORM": True, "GELU": True, "RESIDUAL": True}
for count, early in ((1, True), (4, False)):
    ptx = compiled(rows.linear_rows_kernel, count, **linear, BIAS=True, ROWS=count, EARLY=early)
    if early:
        waits_before(ptx, "st.global")
        # All of the weight, its bias and the norm are on their way before; x and the residual not.
        wait = ptx.index("griddepcontrol.wait")
        assert ptx[:wait].count("ld.global") > ptx[wait:].count("ld.global") > 0
compiled(rows.add_norm_kernel, 4, K=768, BLOCK_K=1024, ADD=True)
convolved = compiled(rows.convolve_kernel, 4, WIDTH=4, BLOCK=512, BIAS=True, EARLY=True)
waits_before(convolved, "ld.global", "st.global")
for fade, gate in (("", "silu"), ("head", ""), ("token", "sigmoid")):
    given = {**HEADS, "R": 2, "FADE": fade, "NORM": True, "GATE": gate, "GROUPS": 2}
    ptx = compiled(token.sums_token_kernel, 4, **given, EARLY=True)
    waits_before(ptx, "st.global")
    # Threads share cells of the key sums: all have read before any writes.
    assert "bar.sync" in ptx[: ptx.index("st.global")], fade
one = {"SLOTS": True, "SHARED": False, "CHECKED": True, "NUMBER": False}
for fade in ("", "head", "token"):
    compiled(step.step_kernel, 8, **HEADS, **one, R=2, FADE=fade)
chosen = {"AHEAD": 16, "BLOCK": 8192, "AT_ONCE": 4, "ROOM": True, "EARLY": True}
waits_before(compiled(likeliest.likeliest_kernel, 32, **chosen), "ld.global", "st.global")
written = compiled(softmax_kernels.write_kernel, 1, **HEADS, ROTARY=True, EARLY=True)
waits_before(written, "st.global")
waits_before(compiled(softmax_kernels.part_kernel, 4, **HEADS, BLOCK_S=64, EARLY=True), "st.global")
joined = {"V": 64, "BLOCK_V": 64, "SPLITS": 64, **AFTER, "EARLY": True}
waits_before(compiled(softmax_kernels.join_kernel, 4, **joined), "ld.global", "st.global")
