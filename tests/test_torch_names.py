"""Every private name of torch that the product uses is in `gpumem_tui/torch_internals.json`, with the reason."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import gpumem_tui
from gpumem_tui.simulator.allocator.profile import NEWEST_TORCH

PACKAGE = Path(gpumem_tui.__file__).parent
REGISTER = json.loads((PACKAGE / "torch_internals.json").read_text())
SECTIONS = ("replaced", "read", "elsewhere")
NAMES: list[str] = [name for section in SECTIONS for entry in REGISTER[section] for name in entry["names"]]
BY_NAME = ("getattr", "hasattr", "setattr", "set", "wrap", "replace", "replace_everywhere", "original", "extend")
"""Functions whose second argument is the name of an attribute of the first."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class Reader(ast.NodeVisitor):
    """Reads the private names in a file: qualified by their owner if there is one, else alone."""

    def __init__(self, tree: ast.Module) -> None:
        self.qualified: set[str] = set()
        self.alone: set[str] = set()
        self._known: dict[str, str] = {}
        for _ in range(3):  # a name may stand for what another one does, as `_aten = torch.ops.aten`
            self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._known[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            qualified = f"{node.module}.{alias.name}"
            self._known.setdefault(alias.asname or alias.name, qualified)
            self._add(qualified)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._bind(one, value)
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if is_private(node.attr) and not of_itself:
            qualified = self._resolved(node)
            if qualified:
                self._add(qualified)
            else:
                self.alone.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in BY_NAME and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            name = node.args[1].value
            if isinstance(name, str) and is_private(name):
                owner = self._resolved(node.args[0])
                if owner:
                    self._add(f"{owner}.{name}")
                else:
                    self.alone.add(name)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        qualified = self._resolved(value)
        if isinstance(target, ast.Name) and qualified:
            self._known.setdefault(target.id, qualified)

    def _resolved(self, node: ast.expr) -> str:
        """The qualified name; empty where it is a value's."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self._resolved(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def _add(self, qualified: str) -> None:
        parts = qualified.split(".")
        if parts[0] != "gpumem_tui" and any(is_private(part) for part in parts):
            self.qualified.add(qualified)


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the product's own functions, classes, variables and attributes have."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found |= {node.attr} if owner in ("self", "cls") else set()
    return found


def is_registered(name: str) -> bool:
    """Whether a name is in the register: whole, as the way to one that is, or by its owner's class and its own name."""
    tail = name.split(".")[-2:]
    return any(
        fnmatchcase(name, one) or one.startswith(f"{name}.") or (len(tail) > 1 and one.split(".")[-2:] == tail)
        for one in NAMES
    )


def used() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """By private name, the rooms that use it: qualified ones, and those that stand alone and are not our own."""
    files = {file: text for file in PACKAGE.rglob("*.py") if "torch" in (text := file.read_text())}
    trees = {file: ast.parse(text) for file, text in files.items()}
    ours = own_names(list(trees.values()))
    qualified, alone = defaultdict(set), defaultdict(set)
    for file, tree in trees.items():
        room = file.relative_to(PACKAGE).parts[0]
        names = Reader(tree)
        for name in names.qualified:
            if name.split(".")[0] == "torch":
                qualified[name].add(room)
        for name in names.alone - ours:
            alone[name].add(room)
    return qualified, alone


def test_every_private_name_of_torch_is_registered() -> None:
    qualified, alone = used()
    assert len(qualified) > 50
    assert {name: sorted(rooms) for name, rooms in qualified.items() if not is_registered(name)} == {}
    known = {name.rpartition(".")[2] for name in NAMES}
    assert {name: sorted(rooms) for name, rooms in alone.items() if name not in known} == {}


def test_what_the_register_reads_is_still_used() -> None:
    """An entry that nothing uses any more tells who comes next of a risk that does not exist."""
    text = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    unused = [
        name
        for section in ("read", "elsewhere")
        for entry in REGISTER[section]
        for name in entry["names"]
        if name.rpartition(".")[2].rstrip("*") not in text
    ]
    assert unused == []


@pytest.mark.parametrize("section", SECTIONS)
def test_an_entry_says_who_and_why(section: str) -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for entry in REGISTER[section]:
        assert entry["names"], entry
        assert entry["why"], entry
        assert set(entry["by"]) <= rooms, entry
    assert ".".join(map(str, NEWEST_TORCH)) in REGISTER["checked_on"]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("import torch\ntorch._C._not_registered()", "torch._C._not_registered"),
        ("from torch._secret import thing", "torch._secret.thing"),
        ("import torch\nC = torch._C\nC._not_registered", "torch._C._not_registered"),
        ("import torch\nreplace(torch.cuda, '_not_registered', None)", "torch.cuda._not_registered"),
    ],
)
def test_the_reader_finds_a_name(program: str, name: str) -> None:
    assert name in Reader(ast.parse(program)).qualified


def test_the_reader_finds_a_name_of_a_value() -> None:
    assert Reader(ast.parse("def f(node): return node._hidden")).alone == {"_hidden"}
