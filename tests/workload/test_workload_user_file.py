"""Workload files: what is accepted, and the one line that each mistake is answered with."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

from gpumem_tui.step.workload import Workload, WorkloadError
from gpumem_tui.workload import train
from gpumem_tui.workload.errors import is_users
from gpumem_tui.workload.spec import split_file
from gpumem_tui.workload.user_file import load_workload_file


def load(path: str) -> Workload:
    """The workload of ``FILE[:NAME]``."""
    return load_workload_file(*split_file(path))


CPU = torch.device("cpu")
WriteFile = Callable[[str], str]

GOOD = """\
import torch
from torch import nn

def build(device):
    model = nn.Linear(4, 2, device=device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def make_batch(batch_size, device):
    return torch.ones(batch_size, 4, device=device)

def train_step(model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

IN_A_CLASS = """\
import torch
from torch import nn

class Inference:
    def build(self, device):
        return nn.Linear(4, 2, device=device), None

    def make_batch(self, batch_size, device):
        return torch.ones(batch_size, 4, device=device)

    def train_step(self, model, optimizer, batch):
        model(batch)

ready = Inference()

class Sized(Inference):
    def __init__(self, width):
        self.width = width
"""


@pytest.fixture(autouse=True)
def _restored_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are named relative to the working folder, and leave nothing importable behind.

    Their imports of libraries stay: compiled modules, such as triton's, cannot be loaded a second time.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    """Writes train.py and returns how a user would name it."""

    def write_file(text: str) -> str:
        (tmp_path / "train.py").write_text(dedent(text), encoding="utf-8")
        return "train.py"

    return write_file


def refusal_of(path: str) -> str:
    with pytest.raises(WorkloadError) as refusal:
        load(path)
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_runs_the_three_functions(write: WriteFile) -> None:
    workload = load(write(GOOD))
    assert workload.name == "train"
    model, optimizer = workload.build(CPU)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = workload.make_batch(3, CPU)
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (3, 4)
    workload.train_step(model, optimizer, batch)
    assert all(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["Inference", "ready"])
def test_name_selects_a_class_or_an_object(write: WriteFile, name: str) -> None:
    workload = load(f"{write(IN_A_CLASS)}:{name}")
    assert workload.name == name
    model, optimizer = workload.build(CPU)
    assert isinstance(model, nn.Linear)
    assert optimizer is None
    workload.train_step(model, optimizer, workload.make_batch(2, CPU))


def test_imports_its_neighbours_and_can_be_loaded_twice(tmp_path: Path, write: WriteFile) -> None:
    (tmp_path / "my_neighbour.py").write_text(GOOD, encoding="utf-8")
    path = write(
        """
        from dataclasses import dataclass
        from my_neighbour import build, make_batch, train_step
        import my_neighbour as whole

        @dataclass
        class NeedsItsModule:
            x: "int"
        """
    )
    first, second, whole = load(path), load(path), load(f"{path}:whole")
    for workload in (first, second, whole):
        assert isinstance(workload.build(CPU)[0], nn.Linear)


def test_a_colon_in_the_files_own_name(tmp_path: Path) -> None:
    (tmp_path / "a:b.py").write_text(GOOD, encoding="utf-8")
    assert load("a:b.py").name == "a:b"


@pytest.mark.parametrize("path", ["nowhere.py", "nowhere.py:Name"])
def test_missing_file(path: str) -> None:
    assert refusal_of(path) == "--workload nowhere.py: there is no such file; check the path"


def test_not_python(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1", encoding="utf-8")
    assert refusal_of("config.yaml") == ("--workload config.yaml: not a Python file; give a .py file, or FILE.py:NAME")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("x = 1\ny = = 2\n", "train.py:2: syntax error: invalid syntax; fix it", id="syntax"),
        pytest.param(
            "def f():\n    return undefined\n\nf()\n",
            "train.py:2: NameError: name 'undefined' is not defined; fix it",
            id="raises",
        ),
        pytest.param(
            "import json\njson.loads('[')\n",
            "train.py:2: JSONDecodeError: Expecting value: line 1 column 2 (char 1); fix it",
            id="raises below",
        ),
        pytest.param("raise ValueError('one\\ntwo')\n", "train.py:1: ValueError: one two; fix it", id="two lines"),
        pytest.param("\nraise KeyError\n", "train.py:2: KeyError; fix it", id="no message"),
        pytest.param(
            "import no_such_package_xyz\n",
            f"train.py:1: ModuleNotFoundError: No module named 'no_such_package_xyz'; install it for {sys.executable}",
            id="missing package",
        ),
        pytest.param(
            "import sys\nsys.exit(2)\n",
            'train.py:2: exits while being imported; move its script part under if __name__ == "__main__":',
            id="script",
        ),
    ],
)
def test_a_file_that_cannot_be_imported(write: WriteFile, text: str, message: str) -> None:
    path, before = write(text), list(sys.path)
    assert refusal_of(path) == f"--workload {message}"
    assert sys.path == before


def test_syntax_error_in_a_neighbour_names_the_neighbour(tmp_path: Path, write: WriteFile) -> None:
    neighbour = tmp_path / "my_neighbour.py"
    neighbour.write_text("\n\nx = (", encoding="utf-8")
    assert refusal_of(write("import my_neighbour")) == (
        f"--workload {neighbour}:3: syntax error: '(' was never closed; fix it"
    )


def test_a_binary_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"x = 1\0\n")
    message = refusal_of("train.py")
    assert message.startswith("--workload train.py")
    assert "null bytes" in message


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        ("build", "build(device)"),
        ("make_batch", "make_batch(batch_size, device)"),
        ("train_step", "train_step(model, optimizer, batch)"),
    ],
)
def test_a_missing_function(write: WriteFile, function: str, signature: str) -> None:
    path = write(GOOD.replace(f"def {function}(", f"def not_{function}("))
    assert refusal_of(path) == f"--workload train.py has no {function}; define {signature}"


def test_a_missing_method_names_the_class(write: WriteFile) -> None:
    path = write(IN_A_CLASS.replace("def build", "def make"))
    assert refusal_of(f"{path}:Inference") == "--workload train.py: Inference has no build; define build(device)"


def test_a_name_that_is_not_there(write: WriteFile) -> None:
    assert refusal_of(f"{write(GOOD)}:Gpt") == (
        "--workload train.py: defines no Gpt; name a class or object of that file"
    )


def test_a_class_that_needs_arguments(write: WriteFile) -> None:
    message = refusal_of(f"{write(IN_A_CLASS)}:Sized")
    assert message.startswith("--workload train.py: Sized() raised TypeError: ")
    assert message.endswith("'width'; make it work without arguments")


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("None", "returned None"),
        ("model", "returned an object of type Linear"),
        ("(model, None, None)", "returned a tuple of 3"),
        ("('model', None)", "returned an object of type str as the model"),
        ("(model, 'adam')", "returned an object of type str as the optimizer"),
    ],
)
def test_build_must_return_a_model_and_an_optimizer(write: WriteFile, returned: str, what: str) -> None:
    text = GOOD.replace("return model, torch.optim.SGD(model.parameters(), lr=0.1)", f"return {returned}")
    with pytest.raises(WorkloadError) as refusal:
        load(write(text)).build(CPU)
    assert str(refusal.value) == (
        f"--workload train.py:4: build {what}; return (model, optimizer): a torch.nn.Module and a "
        "torch.optim.Optimizer or None"
    )


@pytest.mark.parametrize("is_simulated", [False, True])
def test_cycles_are_left_alone_where_runs_are_to_be_alike(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch, is_simulated: bool
) -> None:
    """A real GPU shows what training takes, in which Python frees them."""
    monkeypatch.delattr(torch, "simgpu", raising=False)
    if is_simulated:
        monkeypatch.setattr(torch, "simgpu", None, raising=False)
    collects: list[bool] = []
    monkeypatch.setattr(train, "train", lambda *_: collects.append(gc.isenabled()))
    try:
        train.main(["--workload", write(GOOD), "--batch-size", "1"])
    finally:
        gc.enable()
    assert collects == [not is_simulated]


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/home/me/train.py", True),
        ("/home/me/.local/lib/python3.11/site-packages/torch/optim/adam.py", False),
        ("/usr/lib/python3/dist-packages/torch/optim/adam.py", False),
        (os.__file__, False),
        ("<string>", False),
    ],
)
def test_libraries_are_not_the_users_own_wherever_they_are_installed(path: str, is_own: bool) -> None:
    """A virtual environment may lie over another one, and pip installs for the user alone."""
    assert is_users(path) == is_own
