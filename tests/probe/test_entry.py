"""The ways in, and that a process into which the probe came is otherwise unchanged."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import gpumem_tui
from gpumem_tui.attach.running import PROBE_FILES
from tests.probe.watched import SCRIPTS, run

PACKAGE = Path(gpumem_tui.__file__).parent
TRAIN = """
import torch, threading
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9)
for _ in range(3):
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
print("threads", threading.active_count())
"""


def _entries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def test_run_without_torch_leaves_no_trace(tmp_path: Path) -> None:
    """Another `sitecustomize` runs as ever; torch is not imported; the program's import path is its own."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('mine', __name__, __file__)\n")
    code = "import sys; print([name for name in ('torch', 'textual') if name in sys.modules]); print(sys.path[1:])"
    program = "import sys; sys.path[:0] = []\n" + code
    plain = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, timeout=60
    )
    site = str(PACKAGE / "probe" / "site")
    watched = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{site}:{tmp_path}", "GPUMEM_TUI_DIR": str(tmp_path / "published")},
        timeout=60,
    )
    assert plain.stdout.splitlines()[0] == f"mine sitecustomize {tmp_path / 'sitecustomize.py'}"
    assert watched.stdout == plain.stdout.replace(repr(str(tmp_path)), f"{site!r}, {str(tmp_path)!r}")
    assert watched.stderr == plain.stderr == ""
    assert _entries(tmp_path / "published") == []


def test_a_broken_sitecustomize_is_reported_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    site = str(PACKAGE / "probe" / "site")
    done = subprocess.run(
        [sys.executable, "-c", "print('runs')"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{site}:{tmp_path}"},
        timeout=60,
    )
    assert done.stdout == "runs\n"
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_torch_may_be_looked_for_before_it_is_imported(tmp_path: Path) -> None:
    """As transformers does. Then three steps, in the only thread, and one more way in that changes nothing."""
    program = "import importlib.util; importlib.util.find_spec('torch')\n" + TRAIN + "import gpumem_tui\n"
    program += "assert gpumem_tui.attach() is None\noptimizer.step()\n"
    done = run(["-c", program], tmp_path / "published")
    assert (done.code, done.output, done.errors) == (0, "threads 1\n", "")
    (found,) = done.published
    assert found.header.process.entry == "run"
    assert found.last.step == 4
    assert found.last.parameters_bytes == found.last.optimizer_bytes == 16
    assert found.documents["model"]["optimizers"][0]["name"] == "torch.optim.sgd.SGD"


@pytest.mark.scripts
@pytest.mark.skipif(find_spec("lightning") is None or find_spec("transformers") is None, reason="needs both libraries")
def test_callbacks(tmp_path: Path) -> None:
    program = "from gpumem_tui.probe import callbacks\nlightning = callbacks.lightning()\n"
    program += "import lightning.pytorch, transformers\nassert isinstance(lightning, lightning.pytorch.Callback)\n"
    program = program.replace("\nlightning = ", "\nfitting = ").replace("(lightning, ", "(fitting, ")
    program += "training = callbacks.hugging_face()\nassert isinstance(training, transformers.TrainerCallback)\n"
    program += "training.on_train_begin(None, None, None)\nfitting.on_fit_start(None, None)\n"
    done = run(["-c", program + TRAIN], tmp_path / "published", watched=False)
    assert done.code == 0, done.errors
    assert [found.header.process.entry for found in done.published] == ["callback"]


def test_a_torch_that_the_probe_cannot_watch_is_told_once_and_trains_on(tmp_path: Path) -> None:
    """As one before 2.1, which has nothing of what the probe needs."""
    (tmp_path / "torch.py").write_text("print('trains')\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch\n"
    program += "from gpumem_tui.probe.entry import attach; print(attach('attach'))"
    done = run(["-c", program], tmp_path / "published", python=sys.executable)
    assert done.code == 0
    assert done.output.startswith("trains\nModuleNotFoundError: ")
    assert done.errors.startswith("gpumem-tui cannot watch this process: ")
    assert len(done.errors.splitlines()) == 1


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import gpumem_tui; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ast.literal_eval(done.stdout) - {"__future__"} == {"gpumem_tui"}


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all but what only a type checker reads, of names whose rooms may be newer."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _run_nodes(child)


def test_the_probe_is_written_for_python_3_9_and_needs_only_torch() -> None:
    """Its imports from this package too. Parsed as that version; no library but torch."""
    files = [file for pattern in PROBE_FILES for file in PACKAGE.glob(pattern)]
    own = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for file in files}
    for file in files:
        for node in _run_nodes(ast.parse(file.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.keyword):
                assert node.arg not in ("slots", "kw_only", "strict"), file
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module == "gpumem_tui":
                names = [f"gpumem_tui.{alias.name}" for alias in node.names]
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in filter(None, names):
                place = PACKAGE.parent / name.replace(".", "/")
                is_ours = place.is_dir() or place.with_suffix(".py").exists()
                known = name.split(".")[0] in {*sys.stdlib_module_names, "torch"}
                assert known or name in own or (not is_ours and name.rpartition(".")[0] in own), (file, name)


def test_scripts_are_what_they_say() -> None:
    """None of them knows of the probe but the one that harms it, and the one that has it look sooner."""
    for script in SCRIPTS.glob("*.py"):
        assert ("gpumem" in script.read_text()) == (script.name in ("harmed.py", "stops.py")), script
