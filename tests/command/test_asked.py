"""Questions about tensors in the sources of installed libraries get a GPU's answer when simulated."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.in_process import as_cuda
from tests.simulator.simulated_steps import simulated_gpu

pytestmark = pytest.mark.scripts

LIBRARIES = ("transformers", "accelerate", "diffusers", "peft", "timm", "bitsandbytes", "deepspeed", "trl")
_ASKS = re.compile(r"FakeTensor\b|\bis_fake\b|(?:type\(\w+\)|\.__class__) (?:is|==|in|!=|not)")
_FUNCTION = re.compile(r"^def (is_(?:fake|tracing|jit_tracing|torch_fx_proxy)\w*)\(", re.M)
_WITHIN_CLASSES = {"torch", "nn", "Tensor", "Parameter", "parameter"}


def sources(library: str) -> Iterator[tuple[Path, str]]:
    """Each file of a library that may ask."""
    found = importlib.util.find_spec(library)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{library} is not installed")
    for folder in found.submodule_search_locations:
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if _ASKS.search(text) or _FUNCTION.search(text):
                yield path.relative_to(Path(folder).parent), text


def names_in(node: ast.AST) -> set[str]:
    """Every name and attribute of an expression."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def questions_of_class(tree: ast.AST) -> Iterator[str]:
    """Each comparison of ``type(x)`` or ``x.__class__`` with torch's classes, with `asked` in the place of x."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        left = node.left
        is_type = isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "type"
        is_class = isinstance(left, ast.Attribute) and left.attr == "__class__"
        classes = set().union(*map(names_in, node.comparators))
        if (is_type or is_class) and classes and classes <= _WITHIN_CLASSES:
            asked = ast.Compare(ast.parse("type(asked)" if is_type else "asked.__class__", mode="eval").body, node.ops,
                                node.comparators)  # fmt: skip
            yield ast.unparse(asked)


def imports_of_fakes(tree: ast.AST) -> Iterator[str]:
    """Each import of `FakeTensor` or `is_fake` as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._subclasses"):
            for name in node.names:
                if name.name in ("FakeTensor", "is_fake"):
                    yield f"from {node.module} import {name.name} as found"


@pytest.fixture
def tensors() -> Iterator[dict[str, torch.Tensor]]:
    """A weight without data on the host, one on the device, and what a step makes of it."""
    with as_cuda(simulated_gpu()):
        host, device = nn.Linear(1024, 1024), nn.Linear(1024, 1024).cuda()
        yield {"host": host.weight, "device": device.weight, "made": device.weight * 2}


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_library_finds_that_it_is_simulated(library: str, tensors: dict[str, Any]) -> None:
    plain = nn.Parameter(torch.zeros(2, device="cpu"))
    for path, text in sources(library):
        tree = ast.parse(text)
        scope = {"torch": torch, "nn": nn, "Parameter": nn.Parameter, "Tensor": torch.Tensor}
        for question in questions_of_class(tree):
            for name, tensor in tensors.items():
                expected = eval(question, {**scope, "asked": plain.detach() if name == "made" else plain})
                assert eval(question, {**scope, "asked": tensor}) == expected, f"{path}: {question}"
        for line in imports_of_fakes(tree):
            asking: dict[str, Any] = {"__name__": ".".join(path.with_suffix("").parts)}
            exec(line, asking)
            found = asking["found"]
            for tensor in tensors.values():
                says = isinstance(tensor, found) if isinstance(found, type) else found(tensor)
                assert not says, f"{path}: {line}"
        for name in _FUNCTION.findall(text):
            module = importlib.import_module(".".join(path.with_suffix("").parts))
            for tensor in tensors.values():
                function = getattr(module, name)
                arguments = (tensor,) if function.__code__.co_argcount else ()
                assert not function(*arguments), f"{path}: {name}"


def test_torch_itself_takes_parameters_for_those_of_a_gpu(tensors: dict[str, Any]) -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    weight = tensors["device"]
    assert type(weight) is nn.Parameter
    assert weight.__class__ is nn.Parameter
    assert _default_to_fused_or_foreach([weight], differentiable=False) == (False, True)
    assert weight.device.type in _get_foreach_kernels_supported_devices()
    made = weight.__class__(weight.data, **weight.__dict__)  # as accelerate and PEFT make another one
    assert type(made) is nn.Parameter
    assert made.is_cuda
    on_host = type(weight)(torch.zeros(3, device="cpu"), requires_grad=False, **vars(weight))
    assert on_host.tolist() == [0, 0, 0]
