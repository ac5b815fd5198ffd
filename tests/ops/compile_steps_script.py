"""Compiles the kernels of a model's step for a Hopper GPU, which need not be there."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cosformer.mechanisms.dense import softmax_kernels
from cosformer.ops.triton.kernels import likeliest, rows, token

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "*bf16": "x weight bias residual norm_weight norm_bias out added total rows state logits "
    "queries k_cache v_cache",
    "*fp32": "key_value key_sum taps parts sums tops",
    "*i64": "place position chosen token drawn",
    "*fp64": "theta fade faded turns",
    "fp32": "eps norm_eps log_most scale",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
HEADS = {"K": 64, "V": 64, "BLOCK_K": 64, "BLOCK_V": 64}
AFTER = {"NORM": True, "GATE": "sigmoid"}


def compiled(kernel, warps, **constants):
    """The kernel with these constants; other arguments are pointers or whole numbers."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names
    }
    given = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=given)
    options = {"num_warps": warps, "launch_pdl": constants.get("EARLY", False)}
    made = triton.compile(source, target=HOPPER, options=options).asm
    assert len(made["cubin"])
    print(kernel.__name__, constants)
    return made["ptx"]


linear = {"K": 768, "BLOCK_K": 1024, "BLOCK_N": 4, "NORM": True, "GELU": True, "RESIDUAL": True}
for count, early in ((1, False), (3, True)):
    compiled(rows.linear_rows_kernel, 4, **linear, BIAS=True, ROWS=count, EARLY=early)
compiled(rows.add_norm_kernel, 4, K=768, BLOCK_K=1024, ADD=True)
compiled(rows.convolve_kernel, 4, WIDTH=4, BLOCK=512, BIAS=True)
for fade, gate in (("", "silu"), ("head", ""), ("token", "sigmoid")):
    given = {**HEADS, "R": 2, "FADE": fade, "NORM": True, "GATE": gate}
    ptx = compiled(token.sums_token_kernel, 8, **given, EARLY=fade == "token")
    # Threads share cells of the key sums: all have read before any writes.
    assert "bar.sync" in ptx[: ptx.index("st.global")], fade
compiled(likeliest.likeliest_kernel, 32, BLOCK=16384, ROOM=True)
compiled(softmax_kernels.place_kernel, 1, **HEADS, ROTARY=True)
compiled(softmax_kernels.part_kernel, 4, **HEADS, BLOCK_S=64)
compiled(softmax_kernels.join_kernel, 4, V=64, BLOCK_V=64, SPLITS=64, **AFTER)
