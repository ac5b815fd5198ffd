"""Checks of arguments, one function for each rule: they raise a ValueError or a TypeError."""

import difflib
import math
import numbers
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosformer.runtime import autocasts, has_values, readable

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_THREADS = 1024
"""CPU threads that any system starts for one process."""


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Refuse q, k and v that do not fit together; autocast casts them as PyTorch's attention."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.is_nested or x.layout != torch.strided:
            found = "a nested one" if x.is_nested else f"layout {x.layout}"
            raise ValueError(f"{name} must be a dense tensor, got {found}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], got {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.shape[1] == 0:
            raise ValueError(f"{name} must have at least 1 head, got {list(x.shape)}")
        if x.shape[3] == 0:
            raise ValueError(f"{name} must have a width of at least 1, got {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if autocasts(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        if torch.float64 not in (q.dtype, k.dtype, v.dtype):
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q.shape[0]}, got {x.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the width of q, {q.shape[3]}, got {k.shape[3]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"v must have the heads and length of k, {list(k.shape[1:3])}, got {list(v.shape[1:3])}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"heads of q must be a multiple of the heads of k, got {q.shape[1]} and {k.shape[1]}"
        )
    return q, k, v


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_number(name: str, value: Any, wanted: str = "a number") -> None:
    """Refuse what is no real number; a symbolic one is a number, and a bool is none."""
    if isinstance(value, bool) or not isinstance(
        value, numbers.Real | torch.SymInt | torch.SymFloat
    ):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")
    check_bits(name, value, 63)  # torch takes no longer one


def check_index(name: str, index: Any) -> None:
    """Refuse an index of a token that float64 does not hold as a whole number."""
    check_bits(name, index, 53)


def check_bits(name: str, value: Any, most: int) -> None:
    """Refuse a whole number of more than `most` bits; symbolic numbers are not checked."""
    if torch.compiler.is_compiling() or not isinstance(value, int):
        return
    if value.bit_length() > most:
        raise ValueError(
            f"{name} must have at most {most} bits as a whole number, got {value.bit_length()}"
        )


def check_number_or_tensor(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.dtype.is_complex or value.dtype == torch.bool:
            raise ValueError(f"{name} must be real, got {value.dtype}")
        if value.is_meta:
            raise ValueError(f"{name} must hold values, got a meta tensor")
    else:
        check_number(name, value, "a number or a tensor")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {torch.typename(value)}")  # numpy has its own


def check_bools(**values: Any) -> None:
    for name, value in values.items():
        check_bool(name, value)


def check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must be a mapping from strings, got the key {key!r}")


class NotANumber(ValueError):
    """A value breaks a rule because it is NaN; training then reports that the run diverged."""


def require_all(right: Tensor, rule: str, values: Tensor) -> None:
    """Raise an error with the rule and a value that breaks it, unless all of `right` are True.

    On a GPU and in a graph the device asserts the rule, because reading the values would wait.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(right.all(), rule)
    elif not has_values(right) or torch._C._functorch.is_functorch_wrapped_tensor(right):
        return
    elif right.is_cuda:
        torch._assert_async(right.all(), rule)
    elif not bool(right.all()):
        wrong = float(values.detach()[~right].flatten()[0])
        raise (NotANumber if math.isnan(wrong) else ValueError)(f"{rule}, got {wrong}")


def check_choice(name: str, value: str, known: Collection[str]) -> str:
    if not isinstance(value, str) or value not in known:
        meant = did_you_mean(value, known) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}{meant}")
    return value


def did_you_mean(value: str, known: Collection[str]) -> str:
    """ "; did you mean …?", of the nearest by letters, or nothing; words may be in any order."""
    words = {" ".join(sorted(x.split("-"))): x for x in known}
    plain = value.lower().replace("_", "-")
    found = difflib.get_close_matches(" ".join(sorted(plain.split("-"))), words, 1, 0.7)
    found = [words[x] for x in found] or [x for x in known if plain.startswith(f"{x}-")]
    found = found or difflib.get_close_matches(plain, known, 1, 0.8)
    return f"; did you mean {found[0]!r}?" if found else ""


def check_positive(name: str, value: float) -> float:
    check_number(name, value)
    if not value > 0:  # nan is not
        raise ValueError(f"{name} must be above 0, got {value}")
    if value == float("inf"):
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def check_dropout(dropout: float) -> float:
    check_number("dropout", dropout)
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must lie in 0 ... 1, got {dropout}")
    return dropout


def check_eps(eps: float, dtype: torch.dtype = torch.float64) -> float:
    """Refuse what is no positive number within the range of `dtype`, the dtype of sums."""
    check_positive("eps", eps)
    limits = torch.finfo(dtype)
    if not limits.tiny <= eps <= limits.max:  # it would be rounded to 0 or inf
        raise ValueError(
            f"eps must lie between {limits.tiny:.3g} and {limits.max:.3g} where sums are {dtype}, "
            f"got {eps}"
        )
    return eps


def check_scale(scale: float, normaliser: str) -> float:
    check_positive("scale", scale)
    if normaliser == "sum" and scale != 1:
        raise ValueError(
            f"scale must be 1 with normaliser='sum', whose quotient it cancels from, got {scale}"
        )
    return scale


def check_whole(name: str, value: int, least: int) -> int:
    """Refuse what is no whole number from `least` on; another type, also bool, is a TypeError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number from {least} on, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be a whole number from {least} on, got {value}")
    return value


def check_threads(count: int) -> int:
    """Refuse a number of CPU threads for which torch aborts, as none can be started."""
    if check_whole("threads", count, 1) > MOST_THREADS:
        raise ValueError(f"threads must be at most {MOST_THREADS:,}, got {count}")
    return count


def check_seed(seed: int, below: int = 2**63) -> int:
    """Refuse a seed that is negative or has more than the 63 bits that PyTorch saves."""
    if check_whole("seed", seed, 0) >= below:
        raise ValueError(f"seed must be below {below}, got {seed}")
    return seed


def check_new_file(name: str, path: Path) -> Path:
    """Refuse a path where no file can be written; the file may exist, its folders need not."""
    if path.is_dir():
        raise ValueError(f"{name} must be a file, got {path}, which is a folder")
    return _check_within(name, path)


def check_folder(name: str, path: Path) -> Path:
    """Refuse a path that is not a folder."""
    if not path.is_dir():
        found = "which is a file" if path.exists() else "which does not exist"
        raise ValueError(f"{name} must be a folder, got {path}, {found}")
    return path


def check_new_folder(name: str, path: Path) -> Path:
    """Refuse a path where there is no folder and none can be made."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name} must be a folder, got {path}, which is a file")
    return _check_within(name, path)


def _check_within(name: str, path: Path) -> Path:
    there = next((above for above in path.parents if above.exists()), path.parent)
    if there.exists() and not there.is_dir():
        raise ValueError(f"{name} must lie in a folder, got {path}, but {there} is a file")
    return path


def check_generator(generator: torch.Generator | None) -> torch.Generator | None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    return generator


def check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    if key_mask is None:
        return
    check_tensor("key_mask", key_mask)
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool (True = real token), got {key_mask.dtype}")
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"key_mask must be [batch, keys] = {[k.shape[0], k.shape[2]]}, "
            f"got {list(key_mask.shape)}"
        )
    if key_mask.device != k.device:
        raise ValueError(f"key_mask must be on the device of k, {k.device}, got {key_mask.device}")


def check_packing(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Refuse boundaries that are not 0 = s₀ ≤ s₁ ≤ … = T, of sequences in a batch of one."""
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a vector of int32 or int64, got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens must be on the device of q, {q.device}, got {cu_seqlens.device}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, got {q.shape[0]}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"cu_seqlens needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have at least 2 entries, got {cu_seqlens.shape[0]}")
    if torch.compiler.is_compiling():
        ends_fit = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == q.shape[2])
        rising = (cu_seqlens.diff() >= 0).all()
        torch._assert_async(ends_fit & rising, "cu_seqlens must rise from 0 to the length")
        return
    if not readable(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != q.shape[2] or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must rise from 0 to the length {q.shape[2]}, got {ends}")
