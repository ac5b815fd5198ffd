"""The shapes of Triton's programs, and into how many segments a sequence is cut."""

from typing import NamedTuple

import torch

TILE = 4096  # numbers in a block of kernels that multiply nothing
FEW_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
MANY_PROGRAMS = 1056


class Tiles(NamedTuple):
    """The shape of one program: rows in a chunk, columns of z, warps and stages of loads."""

    chunk: int
    columns: int
    warps: int
    stages: int


def choose_tiles(contracted: int, dtype: torch.dtype, *, light: bool = False) -> Tiles:
    """By width and precision alone: no length or batch compiles a kernel again.

    `light` passes carry no vectors beside the states, or do not read, and load further ahead.
    Triton 3.6 reads shared memory out of range where tensor cores get fewer columns than 64.
    """
    columns = 32 if dtype == torch.float32 else 64
    if dtype != torch.bfloat16:  # float32 tiles, also for float16
        return Tiles(32 if contracted <= 128 else 16, columns, 4 if contracted <= 64 else 8, 1)
    if contracted <= 64:
        return Tiles(64, columns, 4, 3 if light else 2)
    return Tiles(32, columns, 4, 2) if contracted <= 128 else Tiles(32, columns, 8, 1)


def segment_length(programs: int, length: int, wanted: int = FEW_PROGRAMS) -> int:
    """Rows in a segment: all where `programs` are enough without cutting.

    A multiple of 64, so that the chunks of every pass begin where a segment does.
    """
    segments = max(1, min(wanted // max(1, programs), length // 256))
    return max(1, -(-length // (segments * 64))) * 64


def padded(width: int, least: int = 16) -> int:
    """The power of two that a tile needs; products want 16 at least."""
    return max(least, 1 << (width - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """tf32 holds every float16; float32 is multiplied as such."""
    return "tf32" if dtype == torch.float16 else "ieee"
