"""Pathfinder (Linsley et al. 2018): do two marked ends belong to the same dashed snake?

Many pictures grow at once, a dash at a time; those that run into a dead end are given up.
"""

import copy
import functools
import math
from dataclasses import dataclass

import numpy as np

from cosformer.tasks import strokes
from cosformer.tasks.ragged import Array

ANGLES = 64
"""Directions that a dash can have."""
AT_ONCE = 1024
"""Pictures that grow together; most of long snakes find no room."""
TRIES = 3
"""Directions tried for one dash before the picture is given up."""
DISTRACTOR_TRIES = 12
"""Places tried for one distractor before the picture is given up."""


@dataclass(frozen=True)
class PathfinderRule:
    """Sizes in pixels; the defaults are the hard 32-pixel version of Long-Range Arena."""

    size: int = 32
    border: int = 1
    dash: int = 2
    margin: int = 1
    dashes: int = 14
    marker_radius: float = 1.5
    thickness: float = 0.5
    seed_distance: int = 7
    continuity: float = 1.0
    distractors: int = 5
    distractor_dashes: int = 4
    snake_contrast: float = 1.5
    distractor_contrast: float = 2.0

    def __post_init__(self) -> None:
        if self.size <= 4 * self.seed_distance:
            raise ValueError(
                f"size must exceed four times seed_distance = {self.seed_distance}, got {self.size}"
            )

    @property
    def radius(self) -> int:
        """Reach of a dash and of the space kept free around it."""
        return self.dash + math.ceil(self.thickness) + 2 * self.margin

    @property
    def frame(self) -> int:
        """Pixels around the window, so that no look-up leaves the array."""
        return self.dash + 2 * self.margin + self.radius + 2


@dataclass(frozen=True)
class _Tiles:
    """What a dash in each direction looks like, the head at the centre; [ANGLES, pixels]."""

    line: Array
    mask: Array
    near: Array
    """The mask dilated: where no head of another dash should be."""
    marker: Array
    """[pixels]"""
    directions: Array
    """[ANGLES, 2], (y, x)."""
    turn: Array
    """[ANGLES, ANGLES]: how likely one direction follows another."""


@functools.cache
def _tiles(rule: PathfinderRule) -> _Tiles:
    angles = np.arange(ANGLES) * 2 * math.pi / ANGLES
    large = [strokes.stroke(a, rule.dash, 0, rule.thickness, rule.radius) for a in angles]
    kept = [strokes.dilate(each, rule.margin * strokes.SCALE) for each in large]
    lines = np.stack([strokes.reduce(each, rule.radius) for each in large])
    masks = np.stack([strokes.reduce(each, rule.radius) >= strokes.SOLID for each in kept])
    # gaps between dashes are taken as well, or another snake would slip through
    back = rule.dash + rule.margin
    whole = [strokes.stroke(a, back, rule.margin, 2 * rule.thickness, rule.radius) for a in angles]
    masks |= np.stack([strokes.reduce(each, rule.radius) >= strokes.FAINT for each in whole])
    nears = np.stack([strokes.dilate(each, rule.margin) for each in masks])
    marker = strokes.reduce(strokes.disc(rule.marker_radius, rule.radius), rule.radius)
    between = np.abs(angles - angles[:, None])
    between = np.minimum(between, 2 * math.pi - between)
    turn = np.cos(np.minimum(rule.continuity * between, math.pi / 2)) ** 2
    return _Tiles(
        line=lines.reshape(ANGLES, -1).astype(np.float32),
        mask=masks.reshape(ANGLES, -1),
        near=nears.reshape(ANGLES, -1),
        marker=marker.reshape(-1).astype(np.float32),
        directions=np.stack([np.sin(angles), np.cos(angles)], axis=1),
        turn=turn.astype(np.float32),
    )


class _Canvas:
    """Pictures in the making: which dash took a pixel first, and what is drawn."""

    def __init__(self, rule: PathfinderRule, count: int) -> None:
        self.rule, self.tiles = rule, _tiles(rule)
        self.side = rule.size + 2 * rule.frame
        inner = slice(rule.frame + rule.border, rule.frame + rule.size - rule.border)
        taken = np.full((self.side, self.side), -1, np.int16)
        taken[inner, inner] = 0
        self.taken = np.tile(taken.reshape(-1), (count, 1))
        self.near = self.taken.copy()
        self.rows = np.arange(count)
        """The pictures not given up; `who` below counts among these."""
        self.drawn = np.zeros((count, self.side**2), np.float32)
        reach = np.arange(-rule.radius, rule.radius + 1)
        self.offsets = (reach[:, None] * self.side + reach).reshape(-1)

    def copy(self, who: Array) -> "_Canvas":
        """These pictures alone, to try something on."""
        other = copy.copy(self)
        rows, other.rows = self.rows[who], np.arange(len(who))
        other.taken, other.near, other.drawn = self.taken[rows], self.near[rows], self.drawn[rows]
        return other

    def accept(self, who: Array, other: "_Canvas") -> None:
        """Take over what became of these pictures."""
        rows, theirs = self.rows[who], other.rows
        self.taken[rows], self.near[rows] = other.taken[theirs], other.near[theirs]
        self.drawn[rows] = other.drawn[theirs]

    def place(self, point: Array) -> Array:
        """Index of the pixel at a point (y, x) of the window."""
        pixel = np.rint(point).astype(np.int64) + self.rule.frame
        return pixel[..., 0] * self.side + pixel[..., 1]

    def is_free(self, who: Array, head: Array, angle: Array, own: int) -> Array:
        """Whether a dash touches nothing but the dash `own`; head and angle [n, tries]."""
        found = self.taken[self.rows[who][:, None, None], head[..., None] + self.offsets]
        return ~(self.tiles.mask[angle] & (found != 0) & (found != own)).any(axis=-1)

    def add(self, who: Array, head: Array, angle: Array, name: int, contrast: float) -> None:
        """Draw a dash; pixels that an earlier one has taken stay its own."""
        rows, pixels = self.rows[who][:, None], head[:, None] + self.offsets
        self.drawn[rows, pixels] = np.maximum(
            self.drawn[rows, pixels], contrast * self.tiles.line[angle]
        )
        for grid, tiles in ((self.taken, self.tiles.mask), (self.near, self.tiles.near)):
            found = grid[rows, pixels]
            grid[rows, pixels] = np.where((found == 0) & tiles[angle], name, found)

    def mark(self, who: Array, point: Array) -> None:
        rows, pixels = self.rows[who][:, None], self.place(point)[:, None] + self.offsets
        self.drawn[rows, pixels] = np.maximum(self.drawn[rows, pixels], self.tiles.marker)

    def pictures(self) -> Array:
        """[count, size, size] from 0 to 255."""
        inner = slice(self.rule.frame, self.rule.frame + self.rule.size)
        shown = self.drawn[self.rows].reshape(-1, self.side, self.side)[:, inner, inner]
        low, high = (f(shown, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
        return np.rint((shown - low) / (high - low) * 255).astype(np.uint8)


@dataclass
class _Snake:
    """The latest dash of one snake in each picture, and where the snake began and ends."""

    name: int
    pivot: Array
    angle: Array
    tail: Array
    head: Array

    def keep(self, who: Array) -> None:
        for name in ("pivot", "angle", "tail", "head"):
            setattr(self, name, getattr(self, name)[who])


def draw(
    rng: np.random.Generator,
    count: int,
    rule: PathfinderRule | None = None,
    at_once: int = AT_ONCE,
) -> tuple[Array, Array]:
    """Pictures [count, size, size] of 0 to 255, and labels [count]: 1 if the ends belong."""
    rule = rule or PathfinderRule()
    pictures, labels, have = list[Array](), list[Array](), 0
    while have < count:
        canvas = _Canvas(rule, at_once)
        snakes = _grow_two(rng, canvas)
        _add_distractors(rng, canvas, snakes)
        number = len(snakes[0].angle)
        label = rng.integers(0, 2, number)  # after the snakes: chances of growing cannot tell it
        first = rng.integers(0, 2, number)
        last = np.where(label == 1, first, 1 - first)
        who = np.arange(number)
        canvas.mark(who, np.stack([s.tail for s in snakes])[first, who])
        canvas.mark(who, np.stack([s.head for s in snakes])[last, who])
        pictures.append(canvas.pictures())
        labels.append(label)
        have += number
    return np.concatenate(pictures)[:count], np.concatenate(labels)[:count]


def _grow_two(rng: np.random.Generator, canvas: _Canvas) -> list[_Snake]:
    """Two whole snakes a picture, from seeds in the middle, in turn; failures are given up."""
    rule, count = canvas.rule, len(canvas.rows)
    corner = 2 * rule.seed_distance
    tail = rng.integers(corner, rule.size - corner, (count, 2)).astype(float)
    around = rng.random(count) * 2 * math.pi
    other = tail + rule.seed_distance * np.stack([np.sin(around), np.cos(around)], axis=1)
    snakes, alive = list[_Snake](), np.ones(count, bool)
    for name, start in enumerate((tail, other), 1):
        angle = rng.integers(0, ANGLES, count)
        snake, ok = _seed(canvas, start, angle, name, rule.snake_contrast)
        snakes.append(snake)
        alive &= ok
    _keep(canvas, snakes, np.flatnonzero(alive))
    for _ in range(rule.dashes - 1):
        for snake in snakes:
            ok = _extend(rng, canvas, snake, rule.snake_contrast)
            _keep(canvas, snakes, np.flatnonzero(ok))
    return snakes


def _add_distractors(rng: np.random.Generator, canvas: _Canvas, snakes: list[_Snake]) -> None:
    """Short snakes wherever there is room."""
    rule = canvas.rule
    for number in range(rule.distractors):
        missing = np.arange(len(canvas.rows))
        for _ in range(DISTRACTOR_TRIES):
            if not len(missing):
                break
            trial = canvas.copy(missing)
            tail = rng.integers(0, rule.size, (len(missing), 2)).astype(float)
            angle = rng.integers(0, ANGLES, len(missing))
            name = 2 * rule.dashes + 3 + 2 * number * rule.distractor_dashes
            snake, ok = _seed(trial, tail, angle, name, rule.distractor_contrast)
            _keep(trial, [snake], np.flatnonzero(ok))
            for _ in range(rule.distractor_dashes - 1):
                ok = _extend(rng, trial, snake, rule.distractor_contrast)
                _keep(trial, [snake], np.flatnonzero(ok))
            canvas.accept(missing[trial.rows], trial)
            missing = np.delete(missing, trial.rows)
        _keep(canvas, snakes, np.delete(np.arange(len(canvas.rows)), missing))


def _seed(
    canvas: _Canvas, tail: Array, angle: Array, name: int, contrast: float
) -> tuple[_Snake, Array]:
    """A first dash where it fits, and where that is."""
    rule, direction = canvas.rule, canvas.tiles.directions[angle]
    head = tail + rule.dash * direction
    place, who = canvas.place(head), np.arange(len(tail))
    ok = canvas.is_free(who, place[:, None], angle[:, None], own=0)[:, 0]
    canvas.add(who[ok], place[ok], angle[ok], name, contrast)
    return _Snake(name, tail - rule.margin * direction, angle, tail, head), ok


def _extend(rng: np.random.Generator, canvas: _Canvas, snake: _Snake, contrast: float) -> Array:
    """One more dash for every picture; where that worked."""
    rule, tiles, who = canvas.rule, canvas.tiles, np.arange(len(snake.angle))
    if not len(who):
        return who.astype(bool)
    pivot = snake.pivot + (rule.dash + 2 * rule.margin) * tiles.directions[snake.angle]
    heads = pivot[:, None] + (rule.dash + rule.margin) * tiles.directions  # [n, ANGLES, 2]
    places = canvas.place(heads)
    near = canvas.near[canvas.rows[:, None], places]
    weight = tiles.turn[snake.angle] * ((near == 0) | (near == snake.name))
    total = weight.cumsum(axis=1)
    wish = rng.random((len(who), TRIES), dtype=np.float32) * total[:, -1:]
    tried = (total[:, None] <= wish[..., None]).sum(axis=-1).clip(max=ANGLES - 1)  # [n, TRIES]
    free = canvas.is_free(who, places[who[:, None], tried], tried, own=snake.name)
    ok = free.any(axis=1) & (total[:, -1] > 0)
    angle = tried[who, free.argmax(axis=1)]
    snake.name += 2  # odd names for one snake, even ones for the other
    snake.pivot, snake.angle, snake.head = pivot, angle, heads[who, angle]
    canvas.add(who[ok], places[who, angle][ok], angle[ok], snake.name, contrast)
    return ok


def _keep(canvas: _Canvas, snakes: list[_Snake], who: Array) -> None:
    canvas.rows = canvas.rows[who]
    for snake in snakes:
        snake.keep(who)
