"""Pathfinder: pictures that follow the rule, labels that only the path tells."""

import itertools

import numpy as np
import pytest

from cosformer.tasks import pathfinder, snakes, strokes
from cosformer.tasks.pathfinder import PathfinderRule, _Canvas, _Snake
from cosformer.tasks.ragged import Ragged
from cosformer.tasks.snakes import by_length, draw_snakes

COUNT = 400


@pytest.fixture(scope="module")
def drawn():
    return pathfinder.draw(np.random.default_rng(0), COUNT)


def test_pictures_have_all_grey_levels_which_do_not_tell_the_balanced_labels(drawn):
    pictures, labels = drawn
    assert (pictures.shape, pictures.dtype) == ((COUNT, 32, 32), np.uint8)
    assert (pictures.min(axis=(1, 2)) == 0).all()
    assert (pictures.max(axis=(1, 2)) == 255).all()
    assert set(labels.tolist()) == {0, 1}
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / COUNT**0.5
    bright = pictures.mean(axis=(1, 2))
    spread = bright.std() * 2 / COUNT**0.5
    assert abs(bright[labels == 1].mean() - bright[labels == 0].mean()) < 4 * spread


def _paths(monkeypatch):
    """Heads [pictures, dashes, 2] of both snakes of many pictures."""
    extend, keep = pathfinder._extend, _Snake.keep
    heads = {}

    def following(rng, canvas, snake, contrast):
        ok = extend(rng, canvas, snake, contrast)
        heads.setdefault(id(snake), []).append(snake.head)
        return ok

    def keeping(self, who):
        keep(self, who)
        heads[id(self)] = [each[who] for each in heads.get(id(self), [])]

    monkeypatch.setattr(pathfinder, "_extend", following)
    monkeypatch.setattr(_Snake, "keep", keeping)
    canvas = _Canvas(PathfinderRule(), 2048)
    snakes = pathfinder._grow_two(np.random.default_rng(1), canvas)
    return [np.stack(heads[id(snake)], axis=1) for snake in snakes]


def _cross(p, q):
    def side(a, b, c):
        return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])

    return any(
        side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0
        for a, b in itertools.pairwise(p)
        for c, d in itertools.pairwise(q)
    )


def test_snakes_have_all_dashes_stay_inside_and_do_not_cross(monkeypatch):
    first, second = _paths(monkeypatch)
    assert first.shape[1:] == second.shape[1:] == (13, 2)
    assert 0.05 < len(first) / 2048 < 0.2  # of attempts, those that find room for all
    for heads in (first, second):
        assert 0 < heads.min() <= heads.max() < 31
        # from head to head: two halves of a bend, so never more than l + 2m + rounding
        steps = np.linalg.norm(np.diff(heads, axis=1), axis=2)
        assert steps.max() <= 4 + 1e-6
    crossings = sum(_cross(p, q) for p, q in zip(first, second, strict=True))
    assert crossings / len(first) <= 0.05  # a gap is one pixel wide: a few still slip through


def test_the_label_is_that_of_the_marked_ends(monkeypatch):
    marked, mark = [], _Canvas.mark

    def noting(self, who, point):
        marked.append(point)
        mark(self, who, point)

    monkeypatch.setattr(_Canvas, "mark", noting)
    rule = PathfinderRule(dashes=1, distractors=0)
    pictures, labels = pathfinder.draw(np.random.default_rng(3), 100, rule)
    first, second = (points[:100] for points in marked[:2])
    apart = np.linalg.norm(first - second, axis=1)
    assert apart[labels == 1] == pytest.approx(rule.dash)  # the two ends of one dash
    assert apart[labels == 0].min() > rule.dash + 1
    for points in (first, second):
        y, x = np.rint(points).astype(int).T
        assert (pictures[np.arange(100), y, x] > 160).all()


def test_shorter_snakes_come_in_all_lengths_equally_often(monkeypatch):
    monkeypatch.setattr(snakes, "AT_ONCE", 256)
    rule = PathfinderRule(dashes=5)
    pictures, labels = draw_snakes(np.random.default_rng(0), 18, rule)
    assert pictures.shape == (18, 32, 32)
    assert np.bincount(labels // 2).tolist() == [5, 5, 4, 4]
    assert set(labels.tolist()) >= {0, 1}  # of one dash, both answers
    assert len(draw_snakes(np.random.default_rng(0), 3, rule)[1]) == 3  # fewer than lengths
    again = draw_snakes(np.random.default_rng(0), 18, rule)
    assert all(map(np.array_equal, (pictures, labels), again))


def test_shorter_snakes_are_told_apart_by_their_labels():
    drawn = Ragged.of([np.full(4, n) for n in range(6)], [5, 0, 4, 1, 3, 0])
    short, middle, long, *others = by_length(drawn)
    assert [len(part) for part in others] == [0] * 10
    assert [part.flat[::4].tolist() for part in (short, middle, long)] == [[1, 3, 5], [4], [0, 2]]
    assert [part.labels.tolist() for part in (short, middle, long)] == [[0, 1, 0], [1], [1, 0]]
    pictures, labels = draw_snakes(np.random.default_rng(0), 40, PathfinderRule(dashes=3))
    ink = (pictures > 0).sum((1, 2))
    assert ink[labels // 2 == 1].mean() > ink[labels // 2 == 0].mean()  # two dashes, and one


def test_a_stroke_is_reduced_to_half_its_size_and_keeps_its_amount():
    large = strokes.stroke(0.0, back=4, ahead=0, thickness=2, radius=8)
    small = strokes.reduce(large, 8)
    assert (large.shape, small.shape) == ((33, 33), (17, 17))
    assert small.sum() * 4 == pytest.approx(large.sum(), rel=0.1)
    assert small[8, 5:8].min() > 0.8  # behind the centre, where it comes from
    assert small[8, 11:].max() < 0.1


def test_a_window_too_small_for_its_seeds_is_refused():
    with pytest.raises(ValueError, match="size must exceed four times seed_distance = 7, got 28"):
        PathfinderRule(size=28)
