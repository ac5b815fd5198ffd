"""The texts that NVRTC compiles: a file, the files it includes, and generated wrappers."""

import functools
import re
from pathlib import Path

from cosformer.ops.problem import LEAKY_SLOPE

HERE = Path(__file__).parent


@functools.cache
def source(name: str = "sweep.cu") -> str:
    """A file as one text, with the wrappers of `wgmma` in place of `//@MMA`."""
    products = "".join(_mma(n) for n in (8, 64, 72, 128, 136))
    text = _text(name).replace("//@MMA", products)
    return f"#define LEAKY_SLOPE {LEAKY_SLOPE}f\n{text}"


def _text(name: str) -> str:
    """A file of this folder, each `#include` replaced by the file that it names."""
    included = re.compile(r'^#include "(.+)"$', re.MULTILINE)
    return included.sub(lambda found: _text(found[1]), (HERE / name).read_text())


def _mma(n: int) -> str:
    """Wrappers of `wgmma` with n columns, generated because PTX wants every register by name."""
    count = n // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"

    def body(a: str, used: int, trans: str) -> str:
        b, add = count + used, count + used + 1
        return (
            f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{add}, 0; '
            f'{name} {{{sums}}}, {a}, %{b}, p, 1, 1, {trans}; }}" : {outputs} : '
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
