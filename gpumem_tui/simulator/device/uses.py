"""What a program does with a value that it reads from the GPU, as its own source tells: is it a size, or chooses rows?

A count that is printed changes nothing; one that a slice ends at does. So the names that a value gets are followed
through the function that reads it, and out of that where it returns them.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from gpumem_tui.step.sites import callers, is_installed, is_own

Use = Literal["size", "rows", ""]
"""A value is taken for a size, or rows are chosen by it, or neither is seen."""

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
_PASSING = frozenset(
    {
        "int", "max", "min", "sum", "abs", "round", "list", "tuple", "sorted", "enumerate", "zip", "reversed", "array",
        "asarray", "cumsum", "accumulate", "ceil", "floor", "divmod",
    }
)  # fmt: skip
_TO_WHOLE = frozenset(("int", "round", "ceil", "floor", "trunc", "long", "astype"))
"""Functions and methods that make whole numbers of others."""
_READING = frozenset(("item", "tolist", "cpu", "numpy", "to"))
_SELECTING = frozenset(("nonzero", "where", "masked_select", "index_select", "argwhere", "flatnonzero"))
_LEAVING = (ast.Continue, ast.Break, ast.Return)
_ROUNDS = 8
"""Names of names of names … that are followed."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_Is = Callable[[ast.AST], bool]
_Found = Use | Literal["returned"]

_entered: list[ast.FunctionDef] = []
"""The functions that a value is being followed through as an argument: one that calls itself is entered once."""


class ReadAt(NamedTuple):
    """Where a value is read: a file, the first line of the function, the line, and the function that it calls there."""

    path: str
    first_line: int
    line: int
    called: str


def use(*, of_whole: bool = True) -> Use:
    """Return what the value that is being read is used for; where the function returns it, by the one that called.

    Args:
        of_whole: whether it is a whole number; any other one is a size only where the program makes one of it.
    """
    for one in _places():
        found = _use(one) if of_whole else _use_of_float(one)
        if found != "returned":
            return found
    return ""


def place() -> ReadAt | None:
    """Return where the program reads a value now; None where no code of its own does."""
    return next(_places(), None)


def reaches(read: ReadAt, line: tuple[str, int, int]) -> bool:
    """Return whether a line, with its file and its function's first line, works with what was read at a place."""
    return line[:2] == read[:2] and _reaches(read, line[2])


@lru_cache(None)
def _reaches(read: ReadAt, line: int) -> bool:
    within = _function(read)
    if within is None:
        return False
    reading = _at(within, read.line)
    is_named = _among(frozenset(_followed(within, {name for one in reading for name in _targets(one)}, read.path)))
    return any(_has(part, is_named) for one in _at(within, line)[-1:] for part in _parts(one))


def divides() -> bool:
    """Return whether the function that reads a value divides by it, or by what it works out from it."""
    here = place()
    return here is not None and _divides(here)


def way_to_rows() -> bool | None:
    """Return the truth value by which the test that asks for one comes to where rows are taken by the names in it.

    As ``if mask.any(): x[mask]`` and ``if mask.sum() == 0: continue`` do. None where it is no such test.
    """
    here = place()
    return None if here is None else _way_to_rows(here)


def _places() -> Iterator[ReadAt]:
    called = ""
    for frame in callers(sys._getframe(2)):
        if is_own(frame.f_code.co_filename):
            yield ReadAt(frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno, called)
            called = frame.f_code.co_name


@lru_cache(256)
def source_tree(path: str) -> ast.Module | None:
    """Return a file's source, parsed; None where it is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def _function(place: ReadAt) -> _Function | None:
    """Return the function that reads, or the module itself."""
    found: _Function | None = source_tree(place.path)
    if found is None:
        return None
    for one in ast.walk(found):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            starts = {one.lineno, *(each.lineno for each in one.decorator_list)}
            if place.first_line in starts and one.lineno <= place.line <= (one.end_lineno or 0):
                return one
    return found


def _at(within: _Function, line: int) -> list[ast.stmt]:
    """Return the statements of a function that have a line in what they work out themselves, the innermost last."""
    return [
        one for one in _statements(within) if any(part.lineno <= line <= (part.end_lineno or 0) for part in _parts(one))
    ]


def _reading(within: _Function, line: int) -> tuple[list[ast.stmt], list[ast.expr], _Is]:
    """Return the statements that read at a line, their own expressions, and what among these is read."""
    reading = _at(within, line)
    parts = [part for one in reading for part in _parts(one)]
    return reading, parts, _reads if any(_has(part, _reads) for part in parts) else _is_variable


@lru_cache(None)
def _use(place: ReadAt) -> _Found:
    within = _function(place)
    if within is None:
        return ""
    reading, parts, reads = _reading(within, place.line)
    if any(_is_sized(part, reads, place.path) for part in parts):
        return "size"
    read = _set_from(reading, reads, place.path)
    here = [one for part in parts for one in _comprehensions(part) if _passes(one.iter, reads, place.path)]
    names = frozenset(read | {name for one in here for name in _set_by(one.target)})
    found = _use_of(within, names, place.path, () if here else tuple(reading))
    if not found:
        kept = frozenset(name for name in _followed(within, set(names), place.path) if name.startswith("."))
        found = _use_of_attributes(within, kept, place.path)
    given = (_use_by_call(node, reads, place.path) for part in parts for node in ast.walk(part))
    if found in ("", "returned") and "rows" in given:
        return "rows"
    return "returned" if not found and any(isinstance(one, ast.Return) for one in reading) else found


@lru_cache(None)
def _divides(place: ReadAt) -> bool:
    within = _function(place)
    if within is None:
        return False
    reading, parts, reads = _reading(within, place.line)
    read = _set_from(reading, reads, place.path)
    is_named = _among(frozenset(_followed(within, read, place.path)))
    others = [part for one in _statements(within) for part in _parts(one)]
    return any(_divides_by(part, reads) for part in parts) or any(_divides_by(part, is_named) for part in others)


def _divides_by(value: ast.AST, is_one: _Is) -> bool:
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod)
        and _has(node.right, is_one)
        for node in ast.walk(value)
    )


@lru_cache(None)
def _use_of_float(place: ReadAt) -> _Found:
    """Return what a number is used for of which the program makes whole ones."""
    within = _function(place)
    if within is None:
        return ""
    reading = _at(within, place.line)
    parts = [part for one in reading for part in _parts(one)]

    def reads(node: ast.AST) -> bool:
        called = _called(node) if isinstance(node, ast.Call) else ""
        return bool(called) and (called == place.called if place.called else called in _READING)

    if not place.called and not any(_has(part, reads) for part in parts):
        reads = _reads
    values = [value for one in reading for value in _values(one)]
    names = (
        {name for one in reading for name in _targets(one)} if any(_works_out(one, reads) for one in values) else set()
    )
    for _ in range(_ROUNDS):
        is_named = _among(frozenset(names))
        more = {
            name for one in _statements(within) if any(_works_out(value, is_named) for value in _values(one))
            for name in _targets(one)
        }  # fmt: skip
        if more <= names:
            break
        names |= more
    is_named = _among(frozenset(names))
    others = [part for one in _statements(within) if one not in reading for part in _parts(one)]
    made = {id(node) for part in parts for node in ast.walk(part) if _makes_whole(node, reads)}
    made |= {id(node) for part in (*parts, *others) for node in ast.walk(part) if _makes_whole(node, is_named)}

    def is_made(node: ast.AST) -> bool:
        return id(node) in made

    if any(_is_sized(part, is_made, place.path) for part in (*parts, *others)):
        return "size"
    whole = _set_from(_statements(within), is_made, place.path)
    if whole and _use_of(within, frozenset(whole), place.path) == "size":
        return "size"
    kept = frozenset(name for name in whole if name.startswith("."))
    if _use_of_attributes(within, kept, place.path) == "size":
        return "size"
    returned = [one for one in _statements(within) if isinstance(one, ast.Return) and one.value is not None]
    passes = (_works_out(one.value, reads if one in reading else is_named) for one in returned if one.value is not None)
    return "returned" if any(passes) else ""


def _works_out(value: ast.AST, is_one: _Is) -> bool:
    """Return whether a number is worked out of such a one, and not only compared, or written, with it."""
    if is_one(value):
        return True
    if isinstance(value, ast.Compare | ast.JoinedStr | ast.Dict | ast.Lambda):
        return False
    if isinstance(value, ast.Call) and _called(value) in ("len", "size", "numel", "str", "format"):
        return False
    if isinstance(value, ast.Attribute) and value.attr in ("shape", "dtype", "device"):
        return False
    return any(_works_out(one, is_one) for one in ast.iter_child_nodes(value) if isinstance(one, ast.expr))


def _makes_whole(node: ast.AST, is_one: _Is) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.FloorDiv) and _works_out(node, is_one)
    return isinstance(node, ast.Call) and _called(node) in _TO_WHOLE and _works_out(node, is_one)


@lru_cache(None)
def _use_of(within: _Function, names: frozenset[str], path: str, reading: tuple[ast.stmt, ...] = ()) -> _Found:
    """Return what a function uses some names for, in all but the statements that read them."""
    is_named = _among(frozenset(_followed(within, set(names), path)))
    others = [part for one in _statements(within) if one not in reading for part in _parts(one)]
    if any(_is_sized(part, is_named, path) for part in others):
        return "size"
    loops = [one for one in _statements(within) if isinstance(one, ast.While) and one not in reading]
    if any(isinstance(node, ast.Compare) and _has(node, is_named) for one in loops for node in ast.walk(one.test)):
        return "size"
    calls = (_use_by_call(node, is_named, path) for part in others for node in ast.walk(part))
    if any(_selects(part, is_named) for part in others) or "rows" in calls:
        return "rows"
    returned = [one.value for one in _statements(within) if isinstance(one, ast.Return) and one.value is not None]
    return "returned" if any(_passes(value, is_named, path) for value in returned) else ""


@lru_cache(None)
def _use_of_attributes(within: _Function, names: frozenset[str], path: str) -> _Found:
    """Return what the other functions of a file use the attributes for that one sets."""
    tree = source_tree(path)
    others = [] if tree is None or not names else [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    found = {_use_of(one, names, path) for one in others if one is not within and one not in _entered}
    return "size" if "size" in found else "rows" if "rows" in found else ""


def _use_by_call(node: ast.AST, is_one: _Is, path: str) -> _Found:
    """Return what a function of the program's own uses its arguments for that are such ones."""
    function, path = _defined(path).get(_called(node), (None, path)) if isinstance(node, ast.Call) else (None, path)
    if function is None or not isinstance(node, ast.Call) or function in _entered:
        return ""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    if isinstance(node.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    more = [given.vararg.arg] if given.vararg else []
    takes = {*names, *(one.arg for one in given.kwonlyargs)}
    rest = [given.kwarg.arg] if given.kwarg else []
    parameters = set[str]()
    for position, one in enumerate(node.args):
        if _has(one, is_one):
            parameters.update(names[position : position + 1] or more)
    for each in node.keywords:
        if _has(each.value, is_one):
            parameters.update([each.arg] if each.arg in takes else rest)
    _entered.append(function)
    try:
        return _use_of(function, frozenset(parameters), path) if parameters else ""
    finally:
        _entered.pop()


@lru_cache(None)
def _way_to_rows(place: ReadAt) -> bool | None:
    within = _function(place)
    asking = None if within is None else next((one for one in _at(within, place.line) if isinstance(one, ast.If)), None)
    if within is None or asking is None:
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
            for part in _parts(one)
        )

    if selects(asking.body):
        way = True
    elif selects(asking.orelse) or (isinstance(asking.body[-1], _LEAVING) and selects(within.body)):
        way = False
    else:
        return None
    is_negated = isinstance(asking.test, ast.UnaryOp) and isinstance(asking.test.op, ast.Not)
    return way is not is_negated


@lru_cache(256)
def _defined(path: str) -> Mapping[str, tuple[ast.FunctionDef, str]]:
    """Return the functions and methods that a file defines, and the program's own that it imports, by name."""
    tree = source_tree(path)
    if tree is None:
        return {}
    found = {one.name: (one, path) for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    found |= {one.name: (one, path) for one in tree.body if isinstance(one, ast.FunctionDef)}
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and (other := _file_of(path, one)):
            theirs = source_tree(other)
            defined = (
                {} if theirs is None else {each.name: each for each in theirs.body if isinstance(each, ast.FunctionDef)}
            )
            found |= {
                each.asname or each.name: (defined[each.name], other) for each in one.names if each.name in defined
            }
    return found


def _file_of(path: str, imported: ast.ImportFrom) -> str:
    """Return the program's own file that another one imports from; empty where that is a library's."""
    if imported.level:
        folders = [os.path.join(os.path.dirname(path), *[os.pardir] * (imported.level - 1))]
    else:
        folders = [os.path.dirname(path), *sys.path]
    words = (imported.module or "").split(".")
    for folder in folders:
        for file in (os.path.join(folder, *words) + ".py", os.path.join(folder, *words, "__init__.py")):
            if os.path.isfile(file):
                return "" if is_installed(file) else os.path.normpath(file)
    return ""


def _statements(within: ast.AST) -> Iterator[ast.stmt]:
    for one in ast.walk(within):
        if isinstance(one, ast.stmt) and one is not within:
            yield one


def _parts(statement: ast.stmt) -> list[ast.expr]:
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
    walrus = [node.target for part in _parts(statement) for node in ast.walk(part) if isinstance(node, ast.NamedExpr)]
    return {name for one in (*targets, *walrus) for name in _set_by(one)}


def _adding(statement: ast.Expr) -> ast.Call | None:
    """Return the call by which a statement adds to a list."""
    call = statement.value
    return call if isinstance(call, ast.Call) and _called(call) in ("append", "extend", "insert") else None


def _set_by(target: ast.expr) -> set[str]:
    return {name for one in _unpacked(target) if (name := _name(one))}


def _unpacked(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [each for one in target.elts for each in _unpacked(one)]
    return [target.value if isinstance(target, ast.Starred | ast.Subscript) else target]


def _values(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement sets names to."""
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, ast.Expr) and (call := _adding(statement)) is not None:
        return [*call.args]
    value = getattr(statement, "value", None)
    return [value] if isinstance(value, ast.expr) else [part for part in _parts(statement) if _has(part, _is_walrus)]


def _set_from(statements: Iterable[ast.stmt], is_one: _Is, path: str) -> set[str]:
    """Return the names that statements set to such values."""
    setting = [one for one in statements if any(_passes(value, is_one, path) for value in _values(one))]
    return {name for one in setting for name in _targets(one)}


def _is_walrus(node: ast.AST) -> bool:
    return isinstance(node, ast.NamedExpr)


def _followed(within: _Function, names: set[str], path: str) -> set[str]:
    """Return the names, and those that are worked out from them as whole numbers."""
    for _ in range(_ROUNDS):
        is_named = _among(frozenset(names))
        more = _set_from(_statements(within), is_named, path)
        passing = (one for one in _comprehensions(within) if _passes(one.iter, is_named, path))
        more |= {name for one in passing for name in _set_by(one.target)}
        if more <= names:
            break
        names |= more
    return names


def _among(names: frozenset[str]) -> _Is:
    return lambda node: _name(node) in names


def _comprehensions(within: ast.AST) -> Iterator[ast.comprehension]:
    return (node for node in ast.walk(within) if isinstance(node, ast.comprehension))


def _name(node: ast.AST) -> str:
    """Return a variable's name, or an attribute's with a dot before it; empty of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _reads(node: ast.AST) -> bool:
    """Return whether a node reads a value from a tensor."""
    return isinstance(node, ast.Call) and _called(node) in ("item", "tolist", "int", "cpu", "numpy", "to")


def _is_variable(node: ast.AST) -> bool:
    """Return whether a node is a variable, as a tensor whose value Python itself asks for, in ``x[:count]``."""
    return isinstance(node, ast.Name)


def _has(node: ast.AST, is_one: _Is) -> bool:
    return any(map(is_one, ast.walk(node)))


def _passes(value: ast.AST, is_one: _Is, path: str) -> bool:
    """Return whether a value is such a one, or a whole number, or numbers, worked out from it."""
    if is_one(value):
        return True
    if isinstance(value, ast.Call):
        receiver = value.func.value if isinstance(value.func, ast.Attribute) else None
        if receiver is not None and _passes(receiver, is_one, path):
            return True
        if _use_by_call(value, is_one, path) == "returned":
            return True
        return _called(value) in _PASSING and any(_passes(one, is_one, path) for one in value.args)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        return False
    if isinstance(value, ast.Compare | ast.JoinedStr | ast.Dict | ast.Lambda):
        return False
    if isinstance(value, ast.ListComp | ast.GeneratorExp):
        return _passes(value.elt, is_one, path) or any(_passes(one.iter, is_one, path) for one in value.generators)
    if isinstance(value, ast.Subscript):
        return _passes(value.value, is_one, path)
    return any(_passes(one, is_one, path) for one in ast.iter_child_nodes(value) if isinstance(one, ast.expr))


def _is_sized(value: ast.AST, is_one: _Is, path: str) -> bool:
    """Return whether such a one ends a slice, or is an argument of what takes sizes, as the program's own may."""
    for node in ast.walk(value):
        if isinstance(node, ast.Slice) and _has(node, is_one):
            return True
        if isinstance(node, ast.Call) and _called(node) in _SIZED:
            sizes = _sizes_in(node, path)
            if any(_has(one, is_one) for one in sizes):
                return True
        if _use_by_call(node, is_one, path) == "size":
            return True
    return False


def _sizes_in(call: ast.Call, path: str) -> list[ast.expr]:
    """Return the arguments of one of `_SIZED` that may be sizes."""
    if _called(call) in _FILLING:
        return call.args[:1]
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    while isinstance(receiver, ast.Attribute):
        receiver = receiver.value
    is_function = receiver is None or (isinstance(receiver, ast.Name) and receiver.id in _imported(path))
    args = call.args[1:] if is_function and _called(call) in _CHANGING else call.args
    return [*args, *(one.value for one in call.keywords)]


@lru_cache(256)
def _imported(path: str) -> frozenset[str]:
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
        if isinstance(node, ast.Call) and _called(node) in _SELECTING:
            receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            if any(is_one(one) for one in (*receiver, *node.args)):
                return True
    return False
