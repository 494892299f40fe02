"""Loops that end by a value which only the GPU computes: how many rounds a trace makes.

A loop that ends otherwise too, as one over ``range(40)`` does, continues to that end; where the fewest rows are traced
it ends at once. One that nothing else ends makes one round more. A loop that trains is never ended.
"""

from __future__ import annotations

import ast
import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from gpumem_tui.simulator.device.uses import source_tree
from gpumem_tui.step.sites import callers, is_installed, is_own

_TRAINING = frozenset(("backward", "step", "training_step"))
_ENDLESS = frozenset(("count", "cycle", "iter"))
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}

MOST_ROUNDS = 1 << 16
"""That a loop makes: what else ends it may be unknown, too."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A test of values by which a loop ends.

    Attributes:
        going_on: the truth value of what is asked by which it continues.
        is_bounded: whether it ends otherwise, too. trains: whether steps are made in it.
        asked: what is asked, which may be a comparison of a number that is read.
    """

    going_on: bool
    is_bounded: bool
    trains: bool
    asked: tuple[ast.expr, ...]


class Asked(NamedTuple):
    """A test that is being made, and the frame that makes it."""

    ending: Ending
    frame: FrameType

    @property
    def key(self) -> tuple[int, int]:
        """Tell it from others."""
        return id(self.frame), self.frame.f_lineno

    def number(self, now: float, low: float, high: float, truth: bool) -> float | None:
        """Return a number from `low` to `high`, `now` if it will do, of which the comparison is `truth`, or None."""
        for one in self.ending.asked:
            if not isinstance(one, ast.Compare) or len(one.ops) > 1:
                continue
            kind, other = type(one.ops[0]), one.comparators[0]
            if _value(other, self.frame) is None:
                kind, other = _MIRRORED.get(kind, kind), one.left
            value, compare = _value(other, self.frame), _COMPARISONS.get(kind)
            if value is None or compare is None:
                continue
            near = (now, low, high, value, value - 1, value + 1, value / 2, 2 * value)
            return next(
                (
                    each
                    for each in near
                    if math.isfinite(each) and low <= each <= high and compare(each, value) is truth
                ),
                None,
            )
        return None


def asked() -> Asked | None:
    """Return the test by which a loop of the program's own, and not a library's, may end now; None where it is none."""
    for frame in callers(sys._getframe(1)):
        path = frame.f_code.co_filename
        if is_own(path):
            ending = None if is_installed(path) else _ending(path, frame.f_lineno)
            return None if ending is None else Asked(ending, frame)
    return None


@lru_cache(None)
def _ending(path: str, line: int) -> Ending | None:
    tree = source_tree(path)
    found = None if tree is None else _around(tree, line)
    if found is None:
        return None
    loop, test = found
    going_on = _goes_on(test)
    if going_on is None or (isinstance(test, ast.While) and isinstance(test.body[0], ast.Raise)):
        return None
    leaves = _reading(list(_leaves(test.test, going_on)))
    if len({truth for _, truth in leaves}) > 1:
        return None
    calls = {_called(node) for node in ast.walk(loop) if isinstance(node, ast.Call)}
    return Ending(leaves[0][1], _ends_otherwise(loop, test), bool(calls & _TRAINING), tuple(one for one, _ in leaves))


def _around(tree: ast.AST, line: int) -> tuple[ast.While | ast.For, ast.If | ast.While] | None:
    """Return the innermost loop around a line in whose test, or in that of an ``if``, the line is, and that one."""
    loop: ast.While | ast.For | None = None
    at: ast.AST = tree
    while True:
        within = [
            one for one in ast.walk(at)
            if one is not at and isinstance(one, ast.stmt) and one.lineno <= line <= (one.end_lineno or 0)
        ]  # fmt: skip
        if not within:
            return None
        at = within[0]  # the outermost of them, as `ast.walk` goes by levels
        is_test = isinstance(at, ast.If | ast.While) and at.test.lineno <= line <= (at.test.end_lineno or 0)
        if isinstance(at, ast.While) and is_test:
            return at, at
        if isinstance(at, ast.If) and is_test:
            return None if loop is None else (loop, at)
        if isinstance(at, ast.While | ast.For):
            loop = at
        elif isinstance(at, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            loop = None


def _goes_on(test: ast.If | ast.While) -> bool | None:
    """Return the truth value of a test by which its loop continues; None where it continues by either."""
    if isinstance(test, ast.While):
        return True
    if any(isinstance(one, ast.Break | ast.Return) for one in test.body):
        return False
    return True if any(isinstance(one, ast.Break | ast.Return) for one in test.orelse) else None


def _leaves(test: ast.expr, truth: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what a test asks, each with the truth value by which the whole is `truth`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not truth)
    elif isinstance(test, ast.BoolOp):
        for one in test.values:
            yield from _leaves(one, truth)
    else:
        yield test, truth


def _reading(leaves: list[tuple[ast.expr, bool]]) -> list[tuple[ast.expr, bool]]:
    """Return those of what a test asks that read a value: calls, else all but comparisons, else all."""
    calling = [leaf for leaf in leaves if any(isinstance(node, ast.Call) for node in ast.walk(leaf[0]))]
    return calling or [leaf for leaf in leaves if not isinstance(leaf[0], ast.Compare)] or leaves


def _ends_otherwise(loop: ast.While | ast.For, test: ast.If | ast.While) -> bool:
    if isinstance(loop, ast.For):
        return not (isinstance(loop.iter, ast.Call) and _called(loop.iter) in _ENDLESS)
    if isinstance(loop.test, ast.BoolOp) and isinstance(loop.test.op, ast.And):
        return True
    if loop is not test and not isinstance(loop.test, ast.Constant):
        return True
    others = (one for one in ast.walk(loop) if isinstance(one, ast.If) and one is not test)
    return any(isinstance(each, ast.Break | ast.Return | ast.Raise) for one in others for each in one.body)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _value(node: ast.expr, frame: FrameType) -> float | None:
    """Return a number that is in the source, or that a variable or an attribute of one has."""
    found: Any = None
    if isinstance(node, ast.Constant):
        found = node.value
    elif isinstance(node, ast.Name):
        found = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = getattr(frame.f_locals.get(node.value.id), "__dict__", {}).get(node.attr)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        under = _value(node.operand, frame)
        found = None if under is None else -under
    return found if type(found) in (int, float) else None
