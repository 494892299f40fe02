"""The magics, in IPython's own shell, and once in a Jupyter kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gpumem_tui
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.watch.printed import LookLine
from tests.cuda_standin import cuda_played
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario

pytest.importorskip("IPython")
GPU = Scenario(gpus=[FakeGpu(used_bytes=10 * GIB, processes=[FakeProcess(4711, 10 * GIB)])])


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """IPython's shell, in a process that counts as attached: else it would publish for every test that comes later."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    monkeypatch.setattr("gpumem_tui.probe.entry._attached", True)
    shell = InteractiveShell(history_manager=None)
    with capture_output():
        shell.extension_manager.load_extension("gpumem_tui")
        yield shell
        shell.extension_manager.unload_extension("gpumem_tui")
    assert "gpumem" not in shell.magics_manager.magics["cell"]


TRAIN = """
net.cuda()
for _ in range(2):
    net(torch.empty(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
made_here = 1
"""


def test_a_cell_on_a_simulated_gpu_leaves_the_notebook_as_it_was(shell: Any) -> None:
    net = nn.Linear(512, 512)
    shell.user_ns.update(torch=torch, net=net, optimizer=torch.optim.AdamW(net.parameters()))
    found = shell.run_cell_magic("gpumem", "--gpu sim:rtx-4090", TRAIN)
    assert found.answer.startswith("The step `cell` fits on NVIDIA GeForce RTX 4090")
    assert found.traced.buckets["optimizer"] >= 2 * 4 * 512 * 512
    assert "made_here" not in shell.user_ns
    assert net.weight.device.type == "cpu"
    assert {held.source for held in found.traced.composition} >= {f"In[{shell.execution_count}]:4"}
    assert "lines that hold most" in found._repr_html_()


def test_a_cell_on_a_gpu_is_measured_by_bucket_and_line(shell: Any) -> None:
    with cuda_played() as cuda:
        held = [cuda.allocate(3 * MIB)]
        shell.user_ns.update(cuda=cuda, held=held, MIB=MIB)
        cell = "held.append(cuda.allocate(5 * MIB))\nmade_here = 1\ncuda.allocators[0].free(cuda.allocate(7 * MIB))\n"
        found = shell.run_cell_magic("gpumem", "", cell)
        assert not cuda.most_entries
    assert isinstance(found, LookLine)
    (device,) = found.devices
    assert device.peak_bytes == 15 * MIB
    lines = {one.source: one.bytes for one in device.by_source}
    here = f"In[{shell.execution_count}]"
    assert lines == {None: 3 * MIB, f"{here}:2": 5 * MIB, f"{here}:4": 7 * MIB}
    assert shell.user_ns["made_here"] == 1
    assert "15.0 MiB allocated at the peak" in found._repr_html_()


def test_an_error_in_a_cell_is_the_cells_own_and_ends_the_recording(shell: Any) -> None:
    with cuda_played() as cuda:
        with pytest.raises(ZeroDivisionError):
            shell.run_cell_magic("gpumem", "", "1 / 0")
        assert not cuda.most_entries


@pytest.mark.parametrize(
    ("line", "cell", "words"),
    [
        ("", "1", "%%gpumem --gpu sim:rtx-4090` shows what it would take"),
        ("--gpu sim:none", "1", "unknown GPU 'none'"),
        ("--gpus 2", "1", "write `%%gpumem`"),
        ("observe", None, "`%gpumem watch`"),
        ("watch", None, "no NVIDIA driver on this machine"),
    ],
)
def test_what_cannot_be_is_a_line_that_says_what_to_type(shell: Any, line: str, cell: str | None, words: str) -> None:
    from IPython.core.error import UsageError

    with pytest.raises(UsageError) as raised:
        shell.run_line_magic("gpumem", line) if cell is None else shell.run_cell_magic("gpumem", line, cell)
    assert words in str(raised.value)


def test_the_gpus_are_shown_live_until_that_is_stopped(shell: Any, fake_nvml: FakeMachine) -> None:
    fake_nvml.show(GPU)
    threads = set(threading.enumerate())
    shell.run_line_magic("gpumem", "watch")
    (watch,) = (one for one in threading.enumerate() if one.name == "gpumem watch")
    shell.run_line_magic("gpumem", "watch")  # the first one ends
    assert not watch.is_alive()
    shell.run_line_magic("gpumem", "stop")
    assert not [one for one in set(threading.enumerate()) - threads if one.name == "gpumem watch"]


def test_the_package_is_an_extension_without_importing_ipython() -> None:
    assert callable(gpumem_tui.load_ipython_extension)


@pytest.mark.slow
def test_in_a_jupyter_kernel(fake_machine: FakeMachine) -> None:
    """The magics as they are typed, with the display that a thread updates while a cell runs."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        "import torch, threading, time\nnet = torch.nn.Linear(512, 512)\n%load_ext gpumem_tui",
        "%%gpumem --gpu sim:rtx-4090\nnet.cuda()(torch.empty(64, 512, device='cuda')).sum().backward()",
        "%%gpumem\n1",
        "%gpumem watch",
        "time.sleep(2.5)\nprint([one.name for one in threading.enumerate() if 'watch' in one.name])",
        "%gpumem stop\nprint([one.name for one in threading.enumerate() if 'watch' in one.name])",
        "%gpumem watch",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(book, timeout=120, allow_errors=True)
    fake_machine.show(GPU)
    client.execute(env={**fake_machine.environment, **os.environ})
    _, predicted, measured, watched, before, after, _ = (cell.outputs for cell in book.cells)
    assert "fits on NVIDIA GeForce RTX 4090" in predicted[-1]["data"]["text/html"]
    assert "shows what it would take on one" in measured[-1]["text"]
    shown = watched[-1]["data"]["text/html"]
    assert "GPU 0: " in shown
    assert "10.00 GiB" in shown
    assert before[-1]["text"] == "['gpumem watch']\n"
    assert after[-1]["text"] == "[]\n"
