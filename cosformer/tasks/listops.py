"""ListOps (Nangia & Bowman 2018) as Long-Range Arena draws it: trees of operators on digits.

Many trees grow at once, level by level, so that the many that end too short cost little.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cosformer.tasks.ragged import Array, Ragged

TOKENS = ("[MIN", "[MAX", "[MED", "[SM", *"0123456789", "]")
DIGIT, CLOSE = 4, 14
"""The token of the digit 0, and of a closing bracket; operators are 0 to 3."""
TREES = 8_000
"""Trees that start at once: enough to keep arrays long, few enough for the cache."""


@dataclass(frozen=True)
class ListOpsRule:
    """Which trees are drawn and kept; the defaults are those of Long-Range Arena."""

    max_depth: int = 10
    operator_rate: float = 0.25
    max_arguments: int = 10
    above: int = 500
    """Kept are samples longer than this …"""
    below: int = 2000
    """… and shorter than this."""

    def __post_init__(self) -> None:
        if not 0 <= self.operator_rate <= 1:
            raise ValueError(f"operator_rate must lie in 0 to 1, got {self.operator_rate}")
        if self.max_arguments < 2:
            raise ValueError(f"max_arguments must be at least 2, got {self.max_arguments}")
        if self.below - self.above < 2:
            raise ValueError(f"below must exceed above by 2 or more, got {self.above, self.below}")


class _Level(NamedTuple):
    """Nodes of one depth, those of a parent side by side, parents in order."""

    parent: Array
    """Index in the level above; at the root the tree's own number."""
    kind: Array
    """The operator's or digit's token."""
    arguments: Array
    """How many; 0 for digits."""


def draw(rng: np.random.Generator, count: int, rule: ListOpsRule | None = None) -> Ragged:
    """`count` samples: their tokens, and as labels the values of the expressions."""
    rule = rule or ListOpsRule()
    kept, have = list[Ragged](), 0
    while have < count:
        kept.append(_serialise(_grow(rng, TREES, rule)))
        have += len(kept[-1])
    return Ragged.join(kept).take(np.arange(count))


def acceptance(rng: np.random.Generator, trees: int, rule: ListOpsRule | None = None) -> float:
    """Share of trees whose length is one of those kept."""
    return len(_grow(rng, trees, rule or ListOpsRule())[0].kind) / trees


def evaluate(tokens: Array) -> int:
    """The value of one expression, by a stack: how a reader would do it, for checks."""
    stack: list[tuple[int, list[int]]] = [(-1, [])]
    for token in tokens.tolist():
        if token < DIGIT:
            stack.append((token, []))
        elif token == CLOSE:
            operator, arguments = stack.pop()
            if operator < 0 or not arguments:
                raise ValueError("tokens must be an expression, got a bracket that closes nothing")
            stack[-1][1].append(_value(operator, arguments))
        else:
            stack[-1][1].append(token - DIGIT)
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ValueError(f"tokens must be one whole expression, got {len(tokens)} that are not")
    return stack[0][1][0]


def _value(operator: int, arguments: list[int]) -> int:
    if operator == 2:
        ordered, half = sorted(arguments), len(arguments) // 2
        return (ordered[(len(arguments) - 1) // 2] + ordered[half]) // 2
    return (min(arguments), max(arguments), 0, sum(arguments) % 10)[operator]


def _grow(rng: np.random.Generator, trees: int, rule: ListOpsRule) -> list[_Level]:
    """Levels of the trees of a length that is kept; the others are dropped as soon as known."""
    levels, parents = list[_Level](), np.arange(trees)
    length = np.zeros(trees, np.int64)
    tree = parents
    owners = list[Array]()
    for depth in range(1, rule.max_depth + 1):
        may = depth < rule.max_depth
        is_operator = (rng.random(len(tree)) <= rule.operator_rate) & may
        kind = np.where(
            is_operator, rng.integers(0, 4, len(tree)), rng.integers(DIGIT, CLOSE, len(tree))
        )
        arguments = is_operator * rng.integers(2, rule.max_arguments + 1, len(tree))
        length += np.bincount(tree, 1 + is_operator, trees).astype(np.int64)
        levels.append(_Level(parents, kind, arguments))
        owners.append(tree)
        parents = np.repeat(np.arange(len(tree)), arguments)
        tree = tree[parents]
        if not len(tree):
            break
    return _prune(levels, owners, (rule.above < length) & (length < rule.below))


def _prune(levels: list[_Level], owners: list[Array], wanted: Array) -> list[_Level]:
    """The levels without the trees that are not wanted."""
    pruned = list[_Level]()
    renumbered = np.cumsum(wanted) - 1
    for level, tree in zip(levels, owners, strict=True):
        keep = wanted[tree]
        parents = renumbered[level.parent[keep]]
        pruned.append(_Level(parents, level.kind[keep], level.arguments[keep]))
        renumbered = np.cumsum(keep) - 1
    return pruned


def _serialise(levels: list[_Level]) -> Ragged:
    """Tokens in reading order: sizes and values from the leaves up, places from the root down."""
    sizes, values = _sizes_and_values(levels)
    starts = np.concatenate([[0], np.cumsum(sizes[0])])
    flat = np.full(starts[-1], CLOSE, np.uint8)  # what no node overwrites closes a bracket
    place = starts[:-1]
    for depth, level in enumerate(levels):
        flat[place] = level.kind
        if depth + 1 < len(levels):
            below = levels[depth + 1]
            before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]  # sizes of all to the left
            first = np.cumsum(level.arguments) - level.arguments
            if len(below.parent):
                place = place[below.parent] + 1 + before - before[first[below.parent]]
            else:
                place = below.parent
    return Ragged(flat, starts, values[0])


def _sizes_and_values(levels: list[_Level]) -> tuple[list[Array], list[Array]]:
    sizes, values = list[Array](), list[Array]()
    for depth in reversed(range(len(levels))):
        level = levels[depth]
        is_operator = level.arguments > 0
        size = 1 + is_operator.astype(np.int64)
        value = level.kind - DIGIT
        if is_operator.any():
            parent = levels[depth + 1].parent
            size += np.bincount(parent, sizes[-1], len(size)).astype(np.int64)
            value[is_operator] = _apply(
                level.kind[is_operator], level.arguments[is_operator], values[-1]
            )
        sizes.append(size)
        values.append(value)
    return sizes[::-1], values[::-1]


def _apply(operator: Array, arguments: Array, values: Array) -> Array:
    """Every operator on its own run of `values`."""
    used = np.arange(arguments.max()) < arguments[:, None]
    table = np.full(used.shape, 10)  # sorts behind every digit
    table[used] = values
    table.sort(axis=1)
    rows = np.arange(len(arguments))
    last, low, high = arguments - 1, (arguments - 1) // 2, arguments // 2
    total = np.where(used, table, 0).sum(axis=1)
    results = (
        table[:, 0],
        table[rows, last],
        (table[rows, low] + table[rows, high]) // 2,
        total % 10,
    )
    return np.choose(operator, results)
