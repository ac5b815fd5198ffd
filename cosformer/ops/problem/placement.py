"""Where queries and keys stand: positions, causality, packed sequences."""

from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_bool, check_choice, check_index, check_packing

CONVENTIONS = ("index", "stretch")


class Placement(NamedTuple):
    """The arguments about positions; `cosformer.attention` explains each."""

    causal: bool = False
    query_start: int | None = None
    cu_seqlens: Tensor | None = None
    positions: str = "index"
    stream_position: Tensor | None = None  # how many tokens of a stream came before


class Packed(NamedTuple):
    """Where the tokens of packed sequences stand, as one kernel makes it."""

    position: Tensor  # [1, T] float64
    theta: Tensor  # [h, 1], or [1, T] for sequences with horizons of their own; float64
    sequence: Tensor  # [T]
    bounds: Tensor  # [sequences + 1] int32
    basis: Tensor  # ψ [1, h, T, R] float32


def check_placement(q: Tensor, k: Tensor, given: Placement) -> None:
    """Refuse arguments about positions that are wrong or that exclude each other."""
    check_bool("causal", given.causal)
    check_choice("positions", given.positions, CONVENTIONS)
    start, packed = given.query_start, given.cu_seqlens is not None
    if start is not None and (isinstance(start, bool) or not isinstance(start, int | torch.SymInt)):
        raise TypeError(f"query_start must be an int, got {type(start).__name__}")
    check_index("query_start", start)
    if given.positions == "stretch":
        excluded = {"causal=True": given.causal, "query_start": start is not None}
        for name, is_given in {**excluded, "cu_seqlens": packed}.items():
            if is_given:
                raise ValueError(
                    f"positions='stretch' scales by the lengths: {name} has no meaning"
                )
    if given.cu_seqlens is not None:
        if start is not None:
            raise ValueError("query_start has no meaning with cu_seqlens: sequences start at 0")
        check_packing(given.cu_seqlens, q, k)


def check_decays_there(q: Tensor, k: Tensor, given: Placement, names: str) -> None:
    """Refuse a decay unless the call is causal or query i stands at key i, as many of both.

    `names` are the arguments that ask for the decay.
    """
    if given.causal:
        return
    rule = (
        f"{names} without causal=True must meet query i at key i, so cross attention has no decay"
    )
    if given.positions == "stretch":
        raise ValueError(f"{rule}: got positions='stretch'")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"{rule}: got {q.shape[2]} queries and {k.shape[2]} keys")
    if given.query_start:
        raise ValueError(f"{rule}: got query_start={given.query_start}")


def positions_of(
    q: Tensor, k: Tensor, given: Placement
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Four members of a `Problem`: query_position, key_position, query_start and sequence."""
    queries, keys = q.shape[2], k.shape[2]
    start = given.query_start
    if start is None:
        start = keys - queries if given.causal else 0
    index = torch.arange(queries, dtype=torch.float64, device=q.device)
    query_position = (index + start)[None]
    key_position = torch.arange(keys, dtype=torch.float64, device=q.device)[None]
    sequence = None
    if given.positions == "stretch":
        longest = longer(queries, keys)
        query_position = query_position * (longest / max(queries, 1))
        key_position = key_position * (longest / max(keys, 1))
    if given.cu_seqlens is not None:
        sequence = sequence_of(given.cu_seqlens, queries)
        query_position = key_position = (index - given.cu_seqlens[sequence])[None]
    if given.stream_position is not None:
        before = given.stream_position.to(torch.float64).reshape(-1, 1)
        query_position, key_position = query_position + before, key_position + before
    return query_position, key_position, start, sequence


def sequence_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of the packed sequence that each token belongs to."""
    index = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(index, cu_seqlens[1:], right=True)


def longer(one: int, other: int) -> int:
    """The larger length; an exported graph with two open lengths must not fix which one it is."""
    if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt):
        return torch.sym_max(one, other)
    return max(one, other)
