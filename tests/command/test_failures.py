"""Failures of a command: one clear line, the right exit code, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Program
from tests.command.running import Project
from tests.waiting import DEADLINE_S, wait_until

ROOT = str(Path(__file__).parents[2])
NOT_CUDA = 'is none of CUDA\'s: write device="cuda" to follow it'


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("def f(:\n", "train.py:1: syntax error: invalid syntax"),
        (
            "import no_such_library\n",
            "train.py:1: ModuleNotFoundError: No module named 'no_such_library'; install it for",
        ),
        (
            "try:\n    import no_such_library\nexcept ImportError as error:\n"
            "    raise RuntimeError(\"cannot locate 'app.Net'\") from error\n",
            "train.py:4: RuntimeError: cannot locate 'app.Net' (ModuleNotFoundError: No module named "
            "'no_such_library'); install it for",
        ),
        ("import sys; sys.exit(1)\n", "the command ended (exit code 1) without importing torch"),
        ("print('nothing to train')\n", "the command ended (exit code 0) without importing torch: nothing to train"),
        ("import os; os.kill(os.getpid(), 9)\n", "the command ended (killed by signal 9"),
        ("name = input('name? ')\n", "train.py:1: the command asks for input"),
    ],
    ids=["syntax", "missing library", "of what an error came", "exit 1", "no torch", "killed", "input"],
)
def test_what_ends_a_command_before_torch(project: Project, script: str, said: str) -> None:
    project.write("train.py", script)
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.stdout == ""
    assert f"gpumem-tui: {said}" in done.complaint


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param(
            "import sys; sys.exit('no data')",
            "the command ended (exit code 1) before its first optimizer step: no data",
            marks=pytest.mark.slow,
        ),
        ("raise ValueError('bad\\nnews')", "train.py:4: ValueError: bad news"),
        (
            "import sys\nsys.excepthook = lambda *_: print('my own')\n"
            "net.cuda()(torch.ones(2, 8).cuda()).sum().backward()\n"
            "torch.optim.SGD(net.parameters(), 1.0).step()\nraise ValueError('bad news')",
            "train.py:8: ValueError: bad news (after 1 optimizer step)",
        ),
        pytest.param("net(torch.ones(2, 9))", "train.py:4: RuntimeError: ", marks=pytest.mark.slow),
        ("net(torch.ones(2, 8)).sum()", "before its first optimizer step"),
        ("torch.optim.SGD(net.parameters(), 1.0).step()", "leaves the GPU empty"),
        (
            "net = torch.nn.Linear(2048, 2048)\nnet(torch.ones(2, 2048)).sum().backward()\n"
            "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)\n"
            "torch.optim.SGD(net.parameters(), 1.0).step()",
            "leaves the GPU empty (its model is on the CPU)",
        ),
        ("net.to('cuda:1')", "train.py:4: AcceleratorError: CUDA error: invalid device ordinal"),
        ("net.to('mps')", f'train.py:4: the device "mps" {NOT_CUDA}'),
        ("torch.ones(2, 8, device='xpu')", f'train.py:4: the device "xpu" {NOT_CUDA}'),
        ("torch.mps.empty_cache()", f'train.py:4: the device "mps" {NOT_CUDA}'),
    ],
    ids=[
        "exit with a word",
        "error",
        "error that the program prints",
        "error in torch",
        "never steps",
        "trains on the CPU",
        "trains much there",
        "second GPU",
        "another device",
        "made on another device",
        "another device's module",
    ],
)
def test_what_ends_a_command_before_its_steps(project: Project, script: str, said: str) -> None:
    project.write("train.py", f"import torch\n\nnet = torch.nn.Linear(8, 8)\n{script}\n")
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert said in done.complaint


def test_an_error_of_a_loader_s_worker_is_named_by_its_last_line_and_place(project: Project) -> None:
    project.write(
        "rows.py",
        """
        import torch

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, at):
                try:
                    return {}[at]
                except KeyError:
                    raise ValueError(f"no sample {at}\\nin {{}}" + " of many" * 99)
        """,
    )
    script = (
        "import torch, rows\nfor batch in torch.utils.data.DataLoader(rows.Rows(), 4, num_workers=1):\n    batch.cuda()"
    )
    project.write("train.py", script)
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "gpumem-tui: rows.py:12: ValueError: no sample 0 in {} of many" in done.complaint
    assert done.complaint.endswith("... (in DataLoader worker process 0)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no-such-program", "train.py"), "no-such-program: No such file or directory; check the command"),
        (("python", "missing.py"), "can't open file"),
        (("./train.txt",), "Permission denied; check the command"),
        (("sh", "-c", "exit 3"), "the command ended (exit code 3) without importing torch"),
        (("python", "-I", "train.py"), "`python -I` (isolated mode) keeps the command from being followed"),
    ],
    ids=["no program", "no script", "not a program", "shell", "isolated"],
)
def test_a_command_that_cannot_be_started(project: Project, words: tuple[str, ...], said: str) -> None:
    project.write("train.txt", "not a program")
    project.write("train.py", "")
    done = project.predict(*words)
    assert done.code == 2
    assert said in done.complaint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("search", "--"), "no command follows"),
        (
            ("search", "--", "python", "train.py", "--batch-size", "32"),
            "`gpumem-tui search -- python train.py --batch-size {batch}`",
        ),
        (
            ("search", "--", "python", "train.py", "bs=32"),
            "`gpumem-tui search -- python train.py bs={batch}`",
        ),
        (
            ("search", "--", "python", "train.py"),
            "has no {batch}: give the program an option for its batch size, then `",
        ),
        (("search", "--model", "gpt2", "--", "python", "train.py"), "--model and -- COMMAND: give only one of them"),
        (("search", "--layers", "3", "--", "python", "{batch}"), "--layers: a command builds its own model"),
        (("search", "--precision", "bf16", "--", "python", "{batch}"), "decides precision, optimizer and the rest"),
        (
            ("predict", "--", "python", "train.py", "{batch}"),
            "{batch} has no number: `gpumem-tui predict --batch-size 8 -- python train.py",
        ),
        (("predict", "--batch-size", "4", "--", "python", "x.py", "-b", "8"), "has no {batch} to put it in"),
        (("predict", "gpt2"), "unexpected extra argument"),
    ],
)
def test_options_that_do_not_go_together(project: Project, arguments: tuple[str, ...], said: str) -> None:
    done = Program(project.folder)(*arguments)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert said in done.err


@pytest.mark.slow
def test_a_command_that_hangs_says_where_it_stands(project: Project) -> None:
    project.write(
        "train.py",
        """
        import time

        import torch


        def fetch():
            time.sleep(600)


        fetch()
        """,
    )
    words = ("predict", "--gpu", "sim:a100-80gb", "--timeout", "15", "--", project.python, "train.py")
    done = project.run(*words, environment={})  # in a process of its own, with which its interpreter ends
    assert done.code == 2
    assert "no optimizer step within 15 s; it is at train.py:8; --timeout waits longer" in done.complaint
    assert _left_over(project) == []


FOREVER = """
    import subprocess
    import sys
    import time

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("started", flush=True)
    time.sleep(600)
"""


def test_ctrl_c_leaves_nothing_running(project: Project) -> None:
    project.write("train.py", FOREVER)
    program = _start(project, "predict", "--", sys.executable, "train.py")
    _wait_for(program, "started")
    program.send_signal(signal.SIGINT)
    assert program.wait(DEADLINE_S) == 130
    assert _left_over(project) == []


def test_a_program_that_is_killed_takes_the_command_along(project: Project) -> None:
    project.write("train.py", FOREVER)
    program = _start(project, "predict", "--", sys.executable, "train.py")
    _wait_for(program, "started")
    program.kill()
    program.wait()
    wait_until(lambda: not _left_over(project), "the end of the command")


def test_a_launcher_may_fail_after_the_script_did(project: Project) -> None:
    project.write("train.py", "raise KeyError('column')\n")
    project.write("run.sh", f"{sys.executable} train.py || {{ echo the script failed; exit 7; }}\n")
    done = project.predict("sh", "run.sh")
    assert done.code == 2
    assert "train.py:1: KeyError: 'column'" in done.complaint


def _start(project: Project, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", *arguments],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": ROOT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _wait_for(program: subprocess.Popen[bytes], word: str) -> None:
    assert program.stderr is not None
    for line in program.stderr:
        if word.encode() in line:
            return
    raise AssertionError(f"the command never printed {word!r}")


def _left_over(project: Project) -> list[int]:
    """Processes that still run in the project's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(project.folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
