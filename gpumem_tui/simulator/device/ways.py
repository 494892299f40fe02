"""The ways that a number read from the GPU may take through a program's own files: may anything be sized by it?

Names, attributes, arguments and containers that get it are followed in every file of the program that is imported.
Where the source is not clear, "it may" is the answer, as that costs no more than one more trace, with other numbers
read (`gpumem_tui/search/predicting.py`): memory that a program takes by such a number, in any way, differs there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch

from gpumem_tui.simulator.device.taken import WHOLE as WHOLE_TYPES
from gpumem_tui.simulator.device.uses import (
    Defined,
    Key,
    ReadAt,
    SourceFile,
    Step,
    called,
    expressions,
    files_by_word,
    function_alone,
    function_at,
    places,
    sizes_in,
    source_file,
    statements_at,
    unpacked,
)
from gpumem_tui.step.sites import is_installed

NUMBER, WHOLE, TRUTH, CHOSEN = 1, 2, 4, 8
"""The kind of value that is read from a GPU: numbers, whole ones, truth values; or as many elements as these tell."""

_MOST_PLACES = 12
_MOST_STEPS = 5_000
_READING = frozenset(("item", "tolist", "cpu", "numpy", "to", "int", "float"))
_TO_WHOLE = frozenset(
    ("int", "round", "ceil", "floor", "trunc", "long", "astype", "rint", "int64", "int32", "digitize")
)
_TO_NUMBER = frozenset(("float", "mean", "std", "var", "sqrt", "exp", "log", "average", "median"))
_TO_TRUTH = frozenset(("all", "any", "bool", "isnan", "isfinite", "isinf", "isclose", "allclose", "equal"))
_TO_NOTHING = frozenset(("str", "repr", "format", "isinstance", "type", "size", "numel", "dim", "join", "print"))
_COUNTING = frozenset(("sum", "count_nonzero", "cumsum", "bincount"))
_CHOOSING = frozenset(
    {
        "nonzero", "where", "flatnonzero", "argwhere", "unique", "filter", "compress", "query", "dropna", "Counter",
        "index_select", "masked_select", "set",
    }
)  # fmt: skip
_GIVING_PLACES = frozenset(
    (
        "argmax",
        "argmin",
        "argsort",
        "topk",
        "sort",
        "searchsorted",
        "linear_sum_assignment",
        "index",
        "choice",
        "choices",
    )
)
_ADDING = frozenset(("append", "extend", "insert", "add", "update", "put", "setdefault", "appendleft", "setattr"))
_ASKED_BY_PYTHON = frozenset(("__len__", "__iter__", "__next__", "__index__"))
"""Methods that no line of the program calls by name, as those of a sampler."""
_HARMLESS = frozenset(
    {
        "debug", "info", "warning", "error", "log", "log_dict", "log_metrics", "add_scalar", "add_scalars", "write",
        "set_postfix", "set_postfix_str", "set_description", "writerow", "writerows", "record", "max", "min", "abs",
        "list", "tuple", "dict", "sorted", "reversed", "enumerate", "zip", "map", "tensor", "as_tensor", "from_numpy",
        "array", "asarray", "divmod", "accumulate", "deque", "isinstance", "report", "step", "dumps", "dump",
        "record_metrics",
    }
)  # fmt: skip
"""Functions that size nothing on a GPU by what they are given, whosever they are."""
_HOST_LIBRARIES = frozenset(
    {
        "np", "numpy", "math", "pd", "pandas", "plt", "sns", "sklearn", "scipy", "json", "csv", "wandb", "mlflow",
        "logging", "logger", "log", "tqdm", "time", "os", "sys", "operator", "statistics", "collections", "pickle",
    }
)  # fmt: skip


class Way(NamedTuple):
    """The way of a number that a program has read.

    Attributes:
        may_size: whether a size, an index or the rounds of a loop may come from it. divides: whether it is divided by.
        lines: files and lines that work with it, from the first to the last of a statement.
    """

    may_size: bool = False
    divides: bool = False
    lines: frozenset[tuple[str, int, int]] = frozenset()

    def reaches(self, path: str, line: int) -> bool:
        """Return whether a line works with the number."""
        return any(path == file and first <= line <= last for file, first, last in self.lines)


def kind_of(tensor: torch.Tensor) -> int:
    """Return the kind of a tensor's values."""
    return TRUTH if tensor.dtype is torch.bool else WHOLE if tensor.dtype in WHOLE_TYPES else NUMBER


def way(kind: int) -> Way:
    """Return the way of the value that is being read, which is of a kind, as far as the source shows."""
    return _way(tuple(islice(places(), _MOST_PLACES)), kind)


@lru_cache(None)
def _way(read: tuple[ReadAt, ...], kind: int) -> Way:
    following = _Following()
    for one in read:
        name = following.start(one, kind)
        following.go()
        if not name or not following.state.get((0, f"{name}()")):
            break
    return Way(following.may_size, following.divides, frozenset(following.lines))


class _Following:
    """Follows a value, statement by statement, until nothing new is found to have it."""

    def __init__(self) -> None:
        self.state: dict[Key, int] = {}
        self.may_size = self.divides = False
        self.lines: set[tuple[str, int, int]] = set()
        self._read: dict[int, int] = {}
        self._waiting: dict[int, Step] = {}
        self._files: dict[str, SourceFile] = {}
        self._step: Step

    def start(self, place: ReadAt, kind: int) -> str:
        """Begin at what reads a value at a place, or calls what has read it; return the function's name."""
        is_library = is_installed(place.path)
        file = function_alone(place) if is_library else source_file(place.path)
        within = function_at(place)
        if file is None or within is None:
            return ""
        self._files[place.path] = file
        for one in statements_at(within, place.line):
            for node in _reading(one, place, file.imported):
                self._read[id(node)] = kind
                if id(one) in file.steps:
                    self._waiting[id(one)] = file.steps[id(one)]
        return "" if isinstance(within, ast.Module) else within.name

    def go(self) -> None:
        """Follow it to every end, or to `_MOST_STEPS` statements: what goes as far may size something."""
        for _ in range(_MOST_STEPS):
            if not self._waiting:
                return
            _, step = self._waiting.popitem()
            self._step = step
            self._follow(step)
        self.may_size = True
        self._waiting.clear()

    def _taint(self, key: Key, kind: int) -> None:
        """Note that a variable has such a value, and look at the statements that name it."""
        before = self.state.get(key, 0)
        if kind | before == before:
            return
        self.state[key] = kind | before
        number, name = key
        name = name.removesuffix("()")
        names = [name] if number or name.startswith(".") else [name, f".{name}"]
        for one in self._files_with(name) if not number else [self._step.file]:
            for step in (each for name in names for each in one.mentions.get(name, ())):
                self._waiting[id(step.statement)] = step
        if not number and not key[1].endswith("()"):  # a module's variable is an attribute elsewhere, and back
            self._taint((0, name[1:] if name.startswith(".") else f".{name}"), kind)

    def _files_with(self, name: str) -> Iterator[SourceFile]:
        """Yield the program's files whose text has a name."""
        if not self._step.file.is_whole:
            yield self._step.file
            return
        others = files_by_word(len(sys.modules)).get(name.removeprefix("."), ())
        for path in dict.fromkeys((self._step.file.path, *others)):
            if path not in self._files and (found := source_file(path)) is not None:
                self._files[path] = found
            if path in self._files and self._files[path].is_whole:
                yield self._files[path]

    def _follow(self, step: Step) -> None:
        one = step.statement
        nodes = [node for part in step.parts for node in ast.walk(part)]
        for node in nodes:
            if isinstance(node, ast.comprehension) and (kind := self._kind(node.iter)):
                self._set(node.target, kind & ~CHOSEN)
        for node in nodes:
            if isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Slice):
                self._size(*filter(None, (node.lower, node.upper, node.step)))
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                if not isinstance(node.slice, ast.Slice):
                    self._size(node.slice)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
                self.divides = self.divides or bool(self._kind(node.right))
            elif isinstance(node, ast.NamedExpr):
                self._set(node.target, self._kind(node.value))
        self._follow_statement(one)
        if any(self._kind(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute | ast.Call)):
            last = max(part.end_lineno or part.lineno for part in step.parts)
            self.lines.add((step.file.path, one.lineno, last))

    def _follow_statement(self, one: ast.stmt) -> None:
        if isinstance(one, ast.Assign):
            for target in one.targets:
                self._assign(target, one.value)
        elif isinstance(one, ast.AnnAssign) and one.value is not None:
            self._assign(one.target, one.value)
        elif isinstance(one, ast.AugAssign):
            self._set(one.target, self._kind(one.value))
        elif isinstance(one, ast.For | ast.AsyncFor):
            self._set(one.target, self._kind(one.iter) & ~CHOSEN)
        elif isinstance(one, ast.With | ast.AsyncWith):
            for item in one.items:
                if item.optional_vars is not None:
                    self._set(item.optional_vars, self._kind(item.context_expr))
        elif isinstance(one, ast.Return) and one.value is not None:
            self._return(self._kind(one.value))
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Yield) and one.value.value is not None:
            self._return(self._kind(one.value.value))
        elif isinstance(one, ast.If | ast.While) and self._kind(one.test):
            if isinstance(one, ast.While) and self._kind(one.test) & (WHOLE | TRUTH):
                self.may_size = self.may_size or any(isinstance(node, ast.Compare) for node in ast.walk(one.test))
            self._follow_choice(one)

    def _follow_choice(self, one: ast.If | ast.While) -> None:
        """Follow what is added up, or to a list, where a value chooses whether it is."""
        chosen: list[ast.stmt] = [one]
        if any(isinstance(node, ast.Continue) for node in ast.walk(one)):
            loop = self._step.file.above.get(id(one))
            while loop is not None and not isinstance(loop, ast.For | ast.While):
                loop = self._step.file.above.get(id(loop))
            chosen = [loop or one]
        for top in chosen:
            for node in ast.walk(top):
                if isinstance(node, ast.AugAssign):
                    self._set(node.target, WHOLE)
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    if type(node.value.value) is int:
                        for target in node.targets:
                            self._set(target, WHOLE)
                elif isinstance(node, ast.Call) and called(node) in _ADDING and isinstance(node.func, ast.Attribute):
                    self._set(node.func.value, WHOLE | CHOSEN, adds=True)
                elif isinstance(node, ast.Yield):
                    self._return(WHOLE | CHOSEN)

    def _return(self, kind: int) -> None:
        function = self._step.function
        if kind and function is not None:
            self.may_size = self.may_size or function.name in _ASKED_BY_PYTHON
            self._taint((0 if self._step.file.is_whole else id(function), f"{function.name}()"), kind)
            self.state[0, f"{function.name}()"] = kind  # a library's is asked for by who called it

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript) and _is_environment(target.value):
            self._write_into_environment(value)
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for one, given in pairs:
            self._set(one, self._kind(given))

    def _write_into_environment(self, *texts: ast.expr) -> None:
        """Take a number that is part of a text there for a size: other programs, and this one, read sizes there."""
        self.may_size = self.may_size or any(self._kind(part) for text in texts for part in ast.walk(text))

    def _set(self, target: ast.expr, kind: int, *, adds: bool = False) -> None:
        """Note that what a target names has such a value; `adds`: or that it is added to what it names."""
        if not kind:
            return
        for given in unpacked(target):
            one, into = given, adds or isinstance(target, ast.Subscript)
            while isinstance(one, ast.Subscript):
                one = one.value
            if isinstance(one, ast.Attribute):
                self._taint(self._attribute(one.attr), kind)
            elif isinstance(one, ast.Name) and one.id not in self._step.file.imported | {"self", "cls"}:
                key = self._step.file.key(one.id, self._step.function)
                self._taint(key, kind)
                if into and self._step.function is not None and key[0] == id(self._step.function):
                    self._give_back(self._step.function, one.id, kind)

    def _give_back(self, function: Defined, name: str, kind: int) -> None:
        """Note that who calls a function has such a value in what it gives by a name, to which the function adds."""
        given, before = function.args, self._step
        positional = [each.arg for each in (*given.posonlyargs, *given.args)]
        if name not in positional or not before.file.is_whole:
            return
        at = positional.index(name)
        defaults = dict(zip(positional[::-1], given.defaults[::-1], strict=False))
        passed = (
            [(before._replace(function=before.file.around[id(function)]), defaults[name])] if name in defaults else []
        )
        at -= positional[0] in ("self", "cls")
        for file in list(self._files_with(function.name)):
            for step in (*file.mentions.get(function.name, ()), *file.mentions.get(f".{function.name}", ())):
                calls = (node for part in step.parts for node in ast.walk(part) if isinstance(node, ast.Call))
                for node in (each for each in calls if called(each) == function.name):
                    passed += [(step, one) for one in node.args[at : at + 1]]
                    passed += [(step, each.value) for each in node.keywords if each.arg == name]
        for self._step, one in passed:
            if isinstance(one, ast.Name | ast.Attribute):
                self._set(one, kind)
        self._step = before

    def _attribute(self, name: str) -> Key:
        file, function = self._step.file, self._step.function
        return 0 if file.is_whole or function is None else id(function), f".{name}"

    def _size(self, *given: ast.expr) -> None:
        self.may_size = self.may_size or any(map(self._kind, given))

    def _kind(self, node: ast.AST | None) -> int:
        """Return what a value may hold that comes from the one that is followed; 0 for nothing."""
        if node is None:
            return 0
        if id(node) in self._read:
            return self._read[id(node)] | (WHOLE if isinstance(node, ast.Call) and called(node) == "int" else 0)
        if isinstance(node, ast.Name):
            return self.state.get(self._step.file.key(node.id, self._step.function), 0)
        if isinstance(node, ast.Attribute):
            if node.attr in ("shape", "dtype", "device", "ndim"):
                return self._kind(node.value) & CHOSEN
            known = self.state.get(self._attribute(node.attr), 0) | self.state.get((0, f"{node.attr}()"), 0)
            return known | self._kind(node.value)
        if isinstance(node, ast.Subscript):
            return self._kind(node.value) | (CHOSEN if self._kind(node.slice) & TRUTH else 0)
        if isinstance(node, ast.Compare):
            return TRUTH if any(map(self._kind, (node.left, *node.comparators))) else 0
        if isinstance(node, ast.UnaryOp):
            kind = self._kind(node.operand)
            return TRUTH if kind and isinstance(node.op, ast.Not) else kind
        if isinstance(node, ast.BinOp):
            return self._of_operation(node)
        if isinstance(node, ast.IfExp):
            return self._kind(node.body) | self._kind(node.orelse) | (WHOLE if self._kind(node.test) else 0)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            chosen = any(self._kind(test) for each in node.generators for test in each.ifs)
            return self._kind(node.elt) | ((WHOLE | CHOSEN) if chosen else 0)
        if isinstance(node, ast.JoinedStr | ast.Lambda | ast.Constant):
            return 0
        kind = 0
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                kind |= self._kind(child)
        return kind

    def _of_operation(self, node: ast.BinOp) -> int:
        kind = self._kind(node.left) | self._kind(node.right)
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if not kind or is_text or isinstance(node.left, ast.JoinedStr):
            return 0
        if isinstance(node.op, ast.Div):
            return NUMBER
        if isinstance(node.op, ast.FloorDiv):
            return WHOLE
        is_logical = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
        return kind if is_logical or not kind & TRUTH else WHOLE

    def _of_call(self, node: ast.Call) -> int:
        name = called(node)
        receiver = self._kind(node.func.value) if isinstance(node.func, ast.Attribute) else 0
        kind = receiver
        for one in (*node.args, *(each.value for each in node.keywords)):
            kind |= self._kind(one)
        kind |= self.state.get((0, f"{name}()"), 0)
        if not kind or name in _TO_NOTHING:
            return 0
        if name == "len":
            return WHOLE if kind & CHOSEN else 0
        if name in _TO_WHOLE:
            return WHOLE | kind & CHOSEN
        if name in _TO_NUMBER:
            return NUMBER
        if name in _TO_TRUTH:
            return TRUTH
        if name in _COUNTING:
            return WHOLE if kind & (WHOLE | TRUTH) else NUMBER
        if name in _CHOOSING:
            return WHOLE | CHOSEN
        return WHOLE if name in _GIVING_PLACES else kind

    def _call(self, node: ast.Call) -> None:
        """Follow what a call is given."""
        if called(node) == "putenv" or (isinstance(node.func, ast.Attribute) and _is_environment(node.func.value)):
            self._write_into_environment(*node.args, *(each.value for each in node.keywords))
        kinds = [self._kind(one) for one in node.args]
        named = {one.arg: kind for one in node.keywords if (kind := self._kind(one.value))}
        if not any(kinds) and not named:
            return
        name, attribute = called(node), node.func if isinstance(node.func, ast.Attribute) else None
        if name in _ADDING:
            every = 0
            for kind in (*kinds, *named.values()):
                every |= kind
            if attribute is not None:
                self._set(attribute.value, every, adds=True)
            for one in node.args[1:2] if name == "setattr" else ():
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    self._taint(self._attribute(one.value), every)
        if self._give(node, name, kinds, named):
            return
        if (sizes := sizes_in(node, self._step.file.imported)) is not None:
            self._size(*sizes)
            return
        if name in _ADDING or name in _HARMLESS or name in _TO_NOTHING | _TO_WHOLE | _TO_NUMBER | _TO_TRUTH:
            return
        if name in _COUNTING | _CHOOSING | _GIVING_PLACES or name == "len":
            return
        root: ast.AST | None = node.func
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id in _HOST_LIBRARIES:
            return
        if attribute is not None and self._kind(attribute.value):
            return  # a method of what is followed
        whole = WHOLE | TRUTH | CHOSEN
        self.may_size = self.may_size or any(kind & whole for kind in (*kinds, *named.values()))

    def _give(self, node: ast.Call, name: str, kinds: list[int], named: dict[str | None, int]) -> bool:
        """Give a function of the program its arguments; return whether there is one of that name."""
        if not self._step.file.is_whole:
            return False
        is_there = False
        for file in list(self._files_with(name)):
            functions = [*file.functions.get(name, ())]
            if (made := file.classes.get(name)) is not None:
                is_there = True
                makers = [one for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
                functions += makers
                fields = [one.target.id for one in made.body if isinstance(one, ast.AnnAssign)
                          and isinstance(one.target, ast.Name)] if not makers else []  # fmt: skip
                for each, kind in (*zip(fields, kinds, strict=False), *named.items()):
                    if kind and each and not makers:
                        self._taint((0, f".{each}"), kind)
            for function in functions:
                is_there = True
                self._bind(file, function, node, kinds, named)
        return is_there

    def _bind(
        self, file: SourceFile, function: Defined, node: ast.Call, kinds: list[int], named: dict[str | None, int]
    ) -> None:
        given = function.args
        names = [one.arg for one in (*given.posonlyargs, *given.args)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        taken = {*names, *(one.arg for one in given.kwonlyargs)}
        before, self._step = self._step, self._step._replace(file=file)
        for position, kind in enumerate(kinds):
            name = names[position] if position < len(names) else given.vararg.arg if given.vararg else ""
            if isinstance(node.args[position], ast.Starred):
                for each in names[position:]:
                    self._taint((id(function), each), kind)
            elif kind and name:
                self._taint((id(function), name), kind)
        for word, kind in named.items():
            if word in taken:
                self._taint((id(function), str(word)), kind)
            elif word is None:
                for each in taken:
                    self._taint((id(function), each), kind)
            elif given.kwarg:
                self._taint((id(function), given.kwarg.arg), kind)
        self._step = before


def _reading(one: ast.stmt, place: ReadAt, imported: frozenset[str]) -> list[ast.expr]:
    """Return what in a statement has the value that is read at a place: calls, or variables that are tensors."""
    nodes = [node for part in expressions(one) for node in ast.walk(part) if isinstance(node, ast.expr)]
    here = [node for node in nodes if node.lineno <= place.line <= (node.end_lineno or 0)]
    exact = [
        node for node in here if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place.span
    ]
    if place.span and not exact:  # another statement of the line
        return []
    if exact:
        here = [node for part in exact for node in ast.walk(part) if isinstance(node, ast.expr)]
    wanted = {place.called} if place.called else _READING
    calls = [node for node in exact or here if isinstance(node, ast.Call)]
    if found := [node for node in calls if called(node) in wanted]:
        return list(found)
    if place.called:
        return list(exact or calls)
    variables = [node for node in here if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return [*exact, *(node for node in variables if node.id not in imported)]


def _is_environment(node: ast.expr) -> bool:
    """Return whether a name is that of the process's environment: `os.environ` or `environ`."""
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "environ"
