"""A program's own source, as far as it tells what a value is read for: where, by which statements, and which way on.

`gpumem_tui/simulator/device/ways.py` follows a value from there through the program.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import NamedTuple

from gpumem_tui.step.sites import callers, is_installed, is_own

_SIZED = frozenset(
    {
        "range", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "eye", "new_zeros",
        "new_ones", "new_empty", "new_full", "view", "reshape", "expand", "split", "split_with_sizes", "tensor_split",
        "narrow", "repeat", "tile", "topk", "chunk", "unflatten", "unfold", "resize_", "pad", "islice", "interpolate",
    }
)  # fmt: skip
"""Functions and methods that take a size, or how often something is done."""
_FILLING = frozenset(("full", "new_full"))
"""Functions among these whose further arguments are no sizes."""
_CHANGING = frozenset(
    {
        "reshape", "split", "split_with_sizes", "tensor_split", "narrow", "repeat", "tile", "topk", "chunk",
        "unflatten", "unfold", "pad", "islice", "interpolate",
    }
)  # fmt: skip
"""Functions, not methods, whose first argument is the tensor they change, not a size."""
_SELECTING = frozenset(("nonzero", "where", "masked_select", "index_select", "argwhere", "flatnonzero"))
_LEAVING = (ast.Continue, ast.Break, ast.Return)

Defined = ast.FunctionDef | ast.AsyncFunctionDef
Function = Defined | ast.Module
_Is = Callable[[ast.AST], bool]
Key = tuple[int, str]
"""A variable by its function, 0 for those of modules; an attribute's name begins with a dot, a result's ends in ()."""
_MOST_FILES = 1_000
_WORD = re.compile(r"[^\W\d]\w*")


class ReadAt(NamedTuple):
    """Where a value is read.

    Attributes:
        first_line: of the function. called: the function that it calls there, which has read the value; empty for none.
        span: first and last line, and first and last column of what runs; empty before Python 3.11.
    """

    path: str
    first_line: int
    line: int
    called: str
    span: tuple[int | None, ...] = ()


def place() -> ReadAt | None:
    """Return where the program reads a value now; None where no code of its own does."""
    return next(places(), None)


def way_to_rows() -> bool | None:
    """Return the truth value by which the test that asks for one comes to where rows are taken by the names in it.

    As ``if mask.any(): x[mask]`` and ``if mask.sum() == 0: continue`` do. None where it is no such test.
    """
    here = place()
    return None if here is None else _way_to_rows(here)


def places() -> Iterator[ReadAt]:
    """Yield where the program reads a value now, and from where each of these functions is called."""
    called = ""
    for frame in callers(sys._getframe(1)):
        if is_own(frame.f_code.co_filename):
            code = frame.f_code
            yield ReadAt(code.co_filename, code.co_firstlineno, frame.f_lineno, called, _span(code, frame.f_lasti))
            called = code.co_name


@lru_cache(None)
def _span(code: CodeType, at: int) -> tuple[int | None, ...]:
    return next(islice(code.co_positions(), at // 2, None), ()) if hasattr(code, "co_positions") else ()


@lru_cache(256)
def source_tree(path: str) -> ast.Module | None:
    """Return a file's source, parsed; None where it is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def function_at(place: ReadAt) -> Function | None:
    """Return the function that reads, or the module itself."""
    found: Function | None = source_tree(place.path)
    if found is None:
        return None
    for one in ast.walk(found):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            starts = {one.lineno, *(each.lineno for each in one.decorator_list)}
            if place.first_line in starts and one.lineno <= place.line <= (one.end_lineno or 0):
                return one
    return found


def statements_at(within: Function, line: int) -> list[ast.stmt]:
    """Return the statements of a function that have a line in what they work out themselves, the innermost last."""
    return [
        one
        for one in _statements(within)
        if any(part.lineno <= line <= (part.end_lineno or 0) for part in expressions(one))
    ]


class Step(NamedTuple):
    """A statement, and the innermost function around it."""

    file: SourceFile
    function: Defined | None
    statement: ast.stmt
    parts: tuple[ast.expr, ...]


@dataclass(eq=False)
class SourceFile:
    """The parts of a file, or of one function of a library.

    Attributes:
        mentions: by name the statements that have it; an attribute's name begins with a dot.
        functions, classes: what it defines, by name. own: the names that a function sets. around: the function around.
        above: the statement around each, by identity.
    """

    path: str
    is_whole: bool
    imported: frozenset[str]
    mentions: dict[str, list[Step]] = field(default_factory=dict)
    functions: dict[str, list[Defined]] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    own: dict[int, set[str]] = field(default_factory=dict)
    around: dict[int, Defined | None] = field(default_factory=dict)
    above: dict[int, ast.stmt | None] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)

    def visit(self, node: ast.AST, function: Defined | None, above: ast.stmt | None) -> None:
        """Take in the statements of a node."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._take(child, function, above)
            elif isinstance(child, ast.excepthandler | ast.match_case):
                self.visit(child, function, above)

    def _take(self, one: ast.stmt, function: Defined | None, above: ast.stmt | None) -> None:
        self.above[id(one)] = above
        within = function
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.setdefault(one.name, []).append(one)
            self.around[id(one)] = function
            given = one.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            self.own[id(one)] = {each.arg for each in named}
            within = one
        elif isinstance(one, ast.ClassDef):
            self.classes[one.name] = one
        parts = tuple(expressions(one))
        if isinstance(one, ast.With | ast.AsyncWith):
            parts += tuple(item.optional_vars for item in one.items if item.optional_vars is not None)
        step = self.steps[id(one)] = Step(self, function, one, parts)
        names = set[str]()
        for part in parts:
            for node in ast.walk(part):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                    if function is not None and isinstance(node.ctx, ast.Store):
                        self.own[id(function)].add(node.id)
                elif isinstance(node, ast.Attribute):
                    names.add(f".{node.attr}")
        if isinstance(one, ast.Global) and function is not None:
            self.own[id(function)].difference_update(one.names)
            self.own[id(function)].update(f"global {name}" for name in one.names)
        for name in names:
            self.mentions.setdefault(name, []).append(step)
        self.visit(one, within, one)

    def key(self, name: str, function: Defined | None) -> Key:
        """Return which variable a name is in a function."""
        while function is not None:
            own = self.own.get(id(function), ())
            if name in own and f"global {name}" not in own:
                return id(function), name
            function = self.around.get(id(function))
        return 0, name


@lru_cache(_MOST_FILES)
def source_file(path: str) -> SourceFile | None:
    """Return a file of the program; None where it is no Python."""
    tree = source_tree(path)
    if tree is None:
        return None
    found = SourceFile(path, is_whole=True, imported=imported_names(path))
    found.visit(tree, None, None)
    return found


@lru_cache(_MOST_FILES)
def function_alone(place: ReadAt) -> SourceFile | None:
    """Return one function of a library, which is not followed out of it but by what it returns."""
    within = function_at(place)
    if within is None or isinstance(within, ast.Module):
        return None
    found = SourceFile(place.path, is_whole=False, imported=imported_names(place.path))
    found._take(within, None, None)
    return found


@lru_cache(1)
def files_by_word(_modules: int) -> dict[str, list[str]]:
    """Return the files of the program's own that are imported, by each word in their text.

    Args:
        _modules: how many modules there are, as more may have been imported since.
    """
    files = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    own = (file for file in files if isinstance(file, str) and file.endswith(".py"))
    found: dict[str, list[str]] = {}
    for path in dict.fromkeys(islice((file for file in own if is_own(file) and not is_installed(file)), _MOST_FILES)):
        for word in set(_WORD.findall("".join(linecache.getlines(path)))):
            found.setdefault(word, []).append(path)
    return found


@lru_cache(None)
def _way_to_rows(place: ReadAt) -> bool | None:
    within = function_at(place)
    if within is None:
        return None
    asking = next((one for one in statements_at(within, place.line) if isinstance(one, ast.If)), None)
    if asking is None:
        return None
    names = {name for node in ast.walk(asking.test) if (name := _name(node))}
    for _ in range(2):  # what these are made of
        made = [one for one in _statements(within) if _targets(one) & names]
        names |= {name for one in made for value in _values(one) for node in ast.walk(value) if (name := _name(node))}

    def selects(statements: list[ast.stmt]) -> bool:
        return any(
            _selects(part, _among(frozenset(names)))
            for top in statements
            for one in ast.walk(top)
            if isinstance(one, ast.stmt)
            for part in expressions(one)
        )

    if selects(asking.body):
        way = True
    elif selects(asking.orelse) or (isinstance(asking.body[-1], _LEAVING) and selects(within.body)):
        way = False
    else:
        return None
    is_negated = isinstance(asking.test, ast.UnaryOp) and isinstance(asking.test.op, ast.Not)
    return way is not is_negated


def _statements(within: ast.AST) -> Iterator[ast.stmt]:
    for one in ast.walk(within):
        if isinstance(one, ast.stmt) and one is not within:
            yield one


def expressions(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions of a statement itself, without those of the statements in it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    if isinstance(statement, ast.With | ast.AsyncWith):
        return [item.context_expr for item in statement.items]
    return [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]


def _targets(statement: ast.stmt) -> set[str]:
    """Return the names that a statement sets."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr) and (call := _adding(statement)) is not None:
        targets = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    else:
        targets = []
    walrus = [
        node.target for part in expressions(statement) for node in ast.walk(part) if isinstance(node, ast.NamedExpr)
    ]
    return {name for one in (*targets, *walrus) for name in _set_by(one)}


def _adding(statement: ast.Expr) -> ast.Call | None:
    """Return the call by which a statement adds to a list."""
    call = statement.value
    return call if isinstance(call, ast.Call) and called(call) in ("append", "extend", "insert") else None


def _set_by(target: ast.expr) -> set[str]:
    return {name for one in unpacked(target) if (name := _name(one))}


def unpacked(target: ast.expr) -> list[ast.expr]:
    """Return what a target of an assignment sets, one by one."""
    if isinstance(target, ast.Tuple | ast.List):
        return [each for one in target.elts for each in unpacked(one)]
    return [target.value if isinstance(target, ast.Starred | ast.Subscript) else target]


def _values(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement sets names to."""
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, ast.Expr) and (call := _adding(statement)) is not None:
        return [*call.args]
    value = getattr(statement, "value", None)
    return (
        [value]
        if isinstance(value, ast.expr)
        else [
            part for part in expressions(statement) if any(isinstance(node, ast.NamedExpr) for node in ast.walk(part))
        ]
    )


def _among(names: frozenset[str]) -> _Is:
    return lambda node: _name(node) in names


def _name(node: ast.AST) -> str:
    """Return a variable's name, or an attribute's with a dot before it; empty of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""


def called(node: ast.Call) -> str:
    """Return the name of the function or method that is called; empty of anything else."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def sizes_in(call: ast.Call, imported: frozenset[str]) -> list[ast.expr] | None:
    """Return the arguments of a call that may be sizes; None where it is none of `_SIZED`.

    Args:
        imported: names of modules and what else a file imports, which are not what is changed.
    """
    if called(call) not in _SIZED:
        return None
    if called(call) in _FILLING:
        return call.args[:1]
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    while isinstance(receiver, ast.Attribute):
        receiver = receiver.value
    is_function = receiver is None or (isinstance(receiver, ast.Name) and receiver.id in imported)
    args = call.args[1:] if is_function and called(call) in _CHANGING else call.args
    return [*args, *(one.value for one in call.keywords)]


@lru_cache(256)
def imported_names(path: str) -> frozenset[str]:
    """Return the names that a file imports, as of modules."""
    tree = source_tree(path)
    imports = [] if tree is None else [one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom)]
    return frozenset((each.asname or each.name).partition(".")[0] for one in imports for each in one.names)


def _selects(value: ast.AST, is_one: _Is) -> bool:
    """Return whether rows are taken by such a one: as an index, or by a function that does."""
    for node in ast.walk(value):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if any(is_one(one) or (isinstance(one, ast.UnaryOp) and is_one(one.operand)) for one in index):
                return True
        if isinstance(node, ast.Call) and called(node) in _SELECTING:
            receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            if any(is_one(one) for one in (*receiver, *node.args)):
                return True
    return False
