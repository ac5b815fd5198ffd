"""Small pictures of one stroke or disc: drawn twice as large, reduced by a Lanczos filter."""

import math

import numpy as np

from cosformer.tasks.ragged import Array

SCALE = 2
"""How much larger things are drawn than shown."""
SOLID = 0.9
"""Coverage from which a pixel of a reduced mask counts as taken …"""
FAINT = 0.4
"""… and of a reduced line."""


def stroke(angle: float, back: float, ahead: float, thickness: float, radius: int) -> Array:
    """A line through the centre from `back` pixels behind to `ahead` before it, seen large."""
    y, x = _grid(radius)
    along = x * math.cos(angle) + y * math.sin(angle)
    along = np.clip(along, -back * SCALE, ahead * SCALE)
    distance = np.hypot(x - along * math.cos(angle), y - along * math.sin(angle))
    return distance <= max(thickness * SCALE, 1) / 2


def disc(extent: float, radius: int) -> Array:
    """A filled circle around the centre, seen large."""
    y, x = _grid(radius)
    return np.hypot(x, y) <= extent * SCALE


def dilate(picture: Array, extent: int) -> Array:
    """Every pixel within `extent` of one that is set."""
    grown = np.zeros_like(picture)
    padded = np.pad(picture, extent)
    rows, columns = picture.shape
    for down in range(-extent, extent + 1):
        for right in range(-extent, extent + 1):
            if down**2 + right**2 <= extent**2:
                top, left = extent + down, extent + right
                grown |= padded[top : top + rows, left : left + columns]
    return grown


def reduce(picture: Array, radius: int) -> Array:
    """The picture at the size it is shown, [2·radius + 1] squared, without negative ripples."""
    weights = _lanczos(len(picture), 2 * radius + 1)
    return np.clip(weights @ picture @ weights.T, 0, 1)


def _grid(radius: int) -> tuple[Array, Array]:
    reach = radius * SCALE
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    return y.astype(float), x.astype(float)


def _lanczos(size: int, reduced: int) -> Array:
    """[reduced, size] weights of the three-lobed filter."""
    ratio = size / reduced
    centre = (np.arange(reduced) + 0.5) * ratio
    t = (np.arange(size) + 0.5 - centre[:, None]) / ratio
    weights = np.where(np.abs(t) < 3, np.sinc(t) * np.sinc(t / 3), 0)
    return weights / weights.sum(axis=1, keepdims=True)
