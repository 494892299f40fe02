"""`gpumem_tui.predict` and `gpumem_tui.simulated`, as a program calls them in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import nn

import gpumem_tui
from gpumem_tui.errors import OptionError, RunError, UserError
from gpumem_tui.report.objects import encoded
from gpumem_tui.search.printed import PredictObject
from tests.cuda_standin import cuda_played
from tests.sharing import WarmPython

WIDTH = 512
WEIGHTS_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def train(net: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, batch_size: int = 64) -> None:
    net = (nn.Linear(WIDTH, WIDTH) if net is None else net).cuda()
    optimizer = optimizer or torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.empty(batch_size, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def far_too_large() -> None:
    train(nn.Linear(WIDTH, WIDTH), batch_size=200_000_000)


def test_the_package_imports_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import gpumem_tui; print(*(set(sys.modules) - before));"
        "gpumem_tui.predict; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gpumem_tui"]


def test_a_block_has_its_peak_and_a_ledger_that_sums_to_the_card() -> None:
    with gpumem_tui.simulated("rtx-4090") as gpu:
        train()
        most_bytes = torch.cuda.max_memory_allocated()
        with pytest.raises(RunError, match="it has not ended; read `peak` after"):
            _ = gpu.peak
    assert gpu.peak_allocated_bytes == most_bytes
    peak_bytes: int = gpu.peak  # as mypy reads it through the package's lazy names
    assert peak_bytes == gpu.device_used_bytes > gpu.peak_reserved_bytes > most_bytes
    assert WEIGHTS_BYTES <= gpu.buckets["parameters"] <= WEIGHTS_BYTES + 1024
    assert sum(gpu.ledger.values()) == gpu.prediction.device.total_bytes
    assert gpu.ledger["context"] == gpu.peak - gpu.peak_reserved_bytes
    assert "optimizer state" in str(gpu.ledger)
    largest = gpu.composition[0]
    place: str = largest.source
    assert "test_steps.py:" in place
    assert largest.bytes == max(one.bytes for one in gpu.composition)
    printed = json.loads(encoded(gpu.prediction))
    assert msgspec.convert(printed, PredictObject) == gpu.prediction
    assert printed["workload"]["model"] == "block"
    assert "command" not in printed["workload"]


def test_what_was_made_before_is_as_it_was() -> None:
    """Also where backward has run before: autograd makes no thread for a device that it hears of later."""
    linear = nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(linear, nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, WIDTH)).sum().backward()
    before, gradient = [one.clone() for one in net.state_dict().values()], linear.weight.grad
    with gpumem_tui.simulated("rtx-4090") as gpu:
        train(net, optimizer)
    assert gpu.buckets["optimizer"] >= 2 * WEIGHTS_BYTES
    assert all(map(torch.equal, before, net.state_dict().values()))
    assert linear.weight.grad is gradient
    assert not optimizer.state
    net(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], linear.weight)


def test_a_step_of_this_process_is_predicted_also_where_it_does_not_fit() -> None:
    fits = gpumem_tui.predict(train, gpu="rtx-4090")
    assert fits.answer.startswith("The step `train` fits on NVIDIA GeForce RTX 4090: ")
    assert fits.traced.steps is msgspec.UNSET or fits.traced.steps == 2
    over = gpumem_tui.predict(far_too_large, gpu="t4-16gb")
    assert (over.traced.fits, over.traced.fit) == (False, "does not fit")
    assert over.traced.ledger
    assert over.traced.ledger["free"] < 0
    same = gpumem_tui.predict(f"{__name__}:train", gpu="sim:rtx-4090")
    assert same.traced.peak_reserved_bytes == fits.traced.peak_reserved_bytes
    page = over._repr_html_()
    assert "<script" not in page
    assert "http" not in page
    assert "does not fit" in page
    assert "test_steps.py:" in page


def test_compiled_code_runs_as_it_is_and_makes_the_verdict_an_estimate() -> None:
    def compiled() -> None:
        net: nn.Module = torch.compile(nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]
        train(net)

    found = gpumem_tui.predict(compiled, "rtx-4090")
    assert found.traced.fit == "may fit"
    assert any("torch.compile is left out" in one for one in found.traced.notes or ())


def test_an_error_in_a_block_leaves_cuda_as_it_was() -> None:
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    with pytest.raises(torch.OutOfMemoryError), gpumem_tui.simulated("t4-16gb") as gpu:
        far_too_large()
    with pytest.raises(RunError, match=r"it ended with OutOfMemoryError; `gpumem_tui.predict\(step\)`"):
        _ = gpu.ledger
    with pytest.raises(ZeroDivisionError), gpumem_tui.simulated("t4-16gb"):
        _ = 1 / 0
    assert {name: getattr(torch.cuda, name) for name in before} == before
    with gpumem_tui.simulated("t4-16gb") as gpu:
        train()
    assert gpu.peak


def test_one_block_at_a_time() -> None:
    refused: list[str] = []

    def nested() -> None:
        try:
            with gpumem_tui.simulated("t4-16gb"):
                pass
        except RunError as error:
            refused.append(str(error))

    with gpumem_tui.simulated("t4-16gb") as gpu:
        nested()
        thread = threading.Thread(target=nested)
        thread.start()
        thread.join()
        train()
    assert gpu.peak
    assert len(refused) == 2
    assert all("leave the other `with` block first" in one for one in refused)
    in_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_thread.append(gpumem_tui.predict(train, "t4-16gb").schema))
    thread.start()
    thread.join()
    assert in_thread == [1]


def test_a_process_that_uses_a_real_gpu_is_left_alone() -> None:
    with cuda_played() as cuda:
        cuda.allocate(512)
        for call in (lambda: gpumem_tui.predict(train, gpu="t4-16gb"), lambda: gpumem_tui.simulated("t4").__enter__()):
            with pytest.raises(RunError, match="this process uses a real GPU already"):
                call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gpumem_tui.predict(train, gpu="h101"), "unknown GPU 'h101'"),
        (lambda: gpumem_tui.predict(train, gpu="t4", batch_size=8), "batch_size: is for a command or a model"),
        (lambda: gpumem_tui.predict(lambda: None, gpu="t4"), "puts nothing on the GPU"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4"), "`predict(…, batch_size=8)`"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4", batch_size=1, precison="bf16"), "did you mean precision"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4", batch_size=1, precision="b"), "give one of fp32"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4", batch_size=1, seq_len=0), "must be from 1"),
        (lambda: gpumem_tui.predict("", gpu="t4"), "the command is empty"),
        (lambda: gpumem_tui.predict("python 'a b", gpu="t4"), "No closing quotation in the command; write `predict("),
        (lambda: gpumem_tui.predict(cast(Any, 3), gpu="t4"), "takes a command or a function, not int"),
        (lambda: gpumem_tui.predict(cast(Any, {"a": 1}), gpu="t4"), "not dict; write `predict("),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4", batch_size=0), "batch_size: give a whole number from 1 to"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4", batch_size=cast(Any, "8")), "batch_size: give a whole"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4", batch_size=cast(Any, 8.5)), "1 to 16,777,216, not 8.5"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu="t4", batch_size=True), "not True"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu=cast(Any, 0), batch_size=1), "--gpu: '0' is not available"),
        (lambda: gpumem_tui.predict(model="gpt2", gpu=cast(Any, 0.5), batch_size=1), 'gpu: give a name, such as'),
        (lambda: gpumem_tui.simulated(cast(Any, None)).__enter__(), "gpu: name the GPU to simulate"),
        (lambda: gpumem_tui.simulated(cast(Any, 0)).__enter__(), "--gpu: unknown GPU '0'"),
        (lambda: gpumem_tui.predict("no_such_module_here:train", gpu="t4"), "check the name of the module"),
        (lambda: gpumem_tui.predict("json:trains", gpu="t4"), "has no function trains"),
        (lambda: gpumem_tui.predict("nowhere.py:Big", gpu="t4", batch_size=1), "there is no file nowhere.py"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError) as raised:
        call()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


SCRIPT = f"""
import sys, torch
net = torch.nn.Linear({WIDTH}, {WIDTH}).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    net(torch.empty(int(sys.argv[1]), {WIDTH}, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_command_is_predicted_as_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    python = WarmPython.path()
    found = gpumem_tui.predict([python, "train.py", "{batch}"], "rtx-4090", batch_size=64, steps=2, limit="1GiB")
    assert capfd.readouterr() == ("", "")
    assert found.answer.startswith("Batch 64 fits on NVIDIA GeForce RTX 4090 limited to 1.00 GiB")
    assert (found.traced.buckets or {})["parameters"] >= WEIGHTS_BYTES
    with pytest.raises(RunError, match="open file") as raised:
        gpumem_tui.predict(f"{python} other.py", "rtx-4090")
    assert raised.value.exit_code == 2


def test_errors_have_one_root() -> None:
    assert issubclass(OptionError, UserError)
    assert (OptionError("x").exit_code, RunError("x").exit_code) == (2, 4)
