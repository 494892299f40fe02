"""Trials of a command on a real GPU, from the request to the outcome: CUDA below torch is `tests.cuda_standin`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.monitor.devices import list_gpus
from gpumem_tui.options.workload import choose_device
from gpumem_tui.run import command_trial
from gpumem_tui.run.command_trial import _Real
from gpumem_tui.run.control import Control, Terms, converse
from gpumem_tui.run.cuda_recorder import history_of
from gpumem_tui.run.events import ChildEvent, Failed, Output, TrialDone, TrialRequest
from gpumem_tui.run.neighbours import Neighbours, own_bytes
from gpumem_tui.run.session import Reporter
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec
from tests.cuda_standin import ENVIRONMENT, Card, Machine, cuda_played
from tests.nvml_stub.machine import FakeMachine

ROOT = Path(__file__).parents[2]
GPU = find_gpu("h200-141gb")
ANY = WorkloadSpec(Recipe(), command=Command(("x",), "."))
SECOND = "GPU-00000000-0000-0000-0000-0000000000b1"
SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

        def forward(self, inputs, wanted):
            return nn.functional.mse_loss(self.layers(inputs), wanted)

    {before}
    device = torch.device("cuda")
    data = TensorDataset(torch.zeros(9 * {batch}, 1024), torch.zeros(9 * {batch}, 1024))
    batches = iter(DataLoader(data, batch_size={batch}, num_workers={workers}))
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, wanted = (one.to(device) for one in next(batches))
    for step in range(8):
        {within}
        loss = model(inputs, wanted)
        inputs, wanted = (one.to(device) for one in next(batches))  # while the GPU works, as nanoGPT does
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PARAMETERS = 4 * (2 * 1024 * 4096 + 4096 + 1024)


@dataclass
class Lab:
    """Runs a script on a machine that is played, as a search tries a command."""

    folder: Path
    nvml: FakeMachine
    set_environment: Callable[[str, str], None]

    def run(
        self,
        machine: Machine | None = None,
        *,
        is_real: bool = True,
        batch: int = 256,
        workers: int = 0,
        before: str = "",
        within: str = "",
        uuids: Sequence[str] = (),
        limit_bytes: int | None = None,
        others_bytes: int = 0,
        environment: dict[str, str] | None = None,
        functions: str = "",
    ) -> list[ChildEvent]:
        """Every event of one trial: of the script, or of a workload file's three functions."""
        machine = machine or Machine()
        script = textwrap.dedent(SCRIPT)
        within = textwrap.indent(textwrap.dedent(within).strip(), "    ").strip()
        for name, value in {"batch": batch, "workers": workers, "before": before, "within": within}.items():
            script = script.replace(f"{{{name}}}", str(value))
        (self.folder / "train.py").write_text(script)
        self.nvml.show(machine.driver())
        for name, value in {
            ENVIRONMENT: machine.text(),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "standin_site")] * is_real + [str(ROOT)]),
            **{name: value for name, value in self.nvml.environment.items() if name != "PATH"},
            **(environment or {}),
        }.items():
            self.set_environment(name, value)
        workload = WorkloadSpec(Recipe(), command=Command((sys.executable, "train.py"), str(self.folder)))
        if functions:
            (self.folder / "workload.py").write_text(functions)
            workload = WorkloadSpec(Recipe(), file=str(self.folder / "workload.py"))
        seen = tuple(uuids) or tuple(card.uuid for card in machine.cards)
        request = TrialRequest(
            workload, GPU, not is_real, batch, 2, limit_bytes, others_bytes, seen
        )  # fmt: skip
        return list(converse(request, Terms(sys.executable, seen, 60.0), Control()))


@pytest.fixture
def lab(tmp_path: Path, fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, fake_machine, monkeypatch.setenv)


def done(events: list[ChildEvent]) -> TrialDone:
    found = [event for event in events if isinstance(event, TrialDone)]
    assert found, "\n".join(event.text if isinstance(event, Output) else str(event) for event in events)
    return found[-1]


def test_a_run_says_what_a_trace_says(lab: Lab) -> None:
    """With data loaders that are forked once CUDA is in use, and peaks that the program counts anew."""
    measured = done(lab.run(workers=2, within="torch.cuda.memory.reset_peak_memory_stats()"))
    assert (measured.outcome, measured.steps, measured.buckets_unknown) == ("fit", 2, "")
    simulated = done(lab.run(is_real=False))
    assert measured.buckets == simulated.buckets
    assert measured.peak_allocated_bytes == simulated.peak_allocated_bytes
    assert measured.buckets is not None
    assert measured.buckets["batch_data"] == 2 * 256 * 1024 * 4
    assert measured.device_used_bytes == measured.peak_reserved_bytes + 700 * MIB


def test_a_batch_that_does_not_fit_though_the_program_goes_on(lab: Lab) -> None:
    within = """
        if step == 1:
            try:
                torch.zeros(1 << 40, device="cuda")
            except torch.OutOfMemoryError:
                inputs = inputs[:1]
    """
    result = done(lab.run(within=within))
    assert (result.outcome, result.steps) == ("oom", 1)
    assert result.detail.startswith("CUDA out of memory. Tried to allocate 4096.00 GiB;")
    assert result.buckets is not None
    assert result.buckets["optimizer"] == 2 * PARAMETERS
    assert sum(result.buckets.values()) == result.peak_allocated_bytes


def test_what_is_refused_within_a_library_ends_nothing_on_the_gpu_that_was_asked_for(
    lab: Lab, fake_nvml: FakeMachine
) -> None:
    """cuDNN asks for room for each algorithm that it tries, and takes another one if missing."""
    within = "from tests.cuda_standin import installed; installed.try_workspace(1 << 50)"
    machine = Machine([Card(), Card(SECOND, context_bytes=800 * MIB)])
    fake_nvml.show(machine.driver())
    device = choose_device("1", list_gpus(), share=False)
    result = done(
        lab.run(
            machine,
            within=within,
            uuids=SearchConfig(
                workload=WorkloadSpec(Recipe(), command=Command(("x",), ".")), device=device
            ).terms.gpu_uuids,
        )
    )
    assert (result.outcome, result.steps, result.detail) == ("fit", 2, "")
    assert result.device_used_bytes == result.peak_reserved_bytes + 800 * MIB


def test_the_second_rank_beside_neighbours_that_grow(lab: Lab) -> None:
    """Each of its figures is of its own GPU, and of itself."""
    second = Card(SECOND, context_bytes=900 * MIB, others_bytes=GIB, others_later_bytes=4 * GIB)
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    machine = Machine([Card(), second])
    result = done(lab.run(machine, before="torch.cuda.set_device(1)", environment=ranks, others_bytes=GIB))
    assert (result.outcome, result.steps, result.buckets_unknown) == ("fit", 2, "")
    assert result.buckets is not None
    assert result.buckets["parameters"] == PARAMETERS
    assert result.device_used_bytes == result.peak_reserved_bytes + 900 * MIB


# As CUDA starts, within this process


class Heard(Reporter):
    """Keeps what is reported; nobody is at its socket."""

    def __init__(self, folder: Path) -> None:
        self.events: list[ChildEvent] = []
        super().__init__(str(folder))

    def report(self, event: ChildEvent) -> None:
        self.events.append(event)


class Left(BaseException):
    """The process would have ended."""


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[_Real, Heard]]:
    """Begin a trial in this process, which has not used CUDA."""

    def leave(_code: int) -> None:
        raise Left

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("gpumem_tui.run.command_trial.signal.signal", lambda *_: None)

    def begin(**more: Any) -> tuple[_Real, Heard]:
        request = TrialRequest(ANY, GPU, False, 1, 2, **more)
        heard = Heard(tmp_path)
        trial = _Real(heard, request, profile_for(torch.__version__, GPU))
        trial.start()
        return trial, heard

    return begin


@pytest.mark.parametrize(
    ("machine", "terms", "said"),
    [
        (Machine(is_busy=True), {}, "RuntimeError: CUDA error: all CUDA-capable devices are busy"),
        (Machine(), {"gpu_uuids": (SECOND,)}, f"the command uses {Card().uuid}: have it leave CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_goes_wrong_as_cuda_starts_is_one_event(
    begun: Callable[..., tuple[_Real, Heard]], machine: Machine, terms: dict[str, Any], said: str
) -> None:
    with cuda_played(machine) as cuda:
        _, heard = begun(**terms)
        with pytest.raises(Left):
            cuda.allocate(512)
    assert [event.kind for event in heard.events if isinstance(event, Failed)] == ["device"]
    assert said in str(heard.events[-1])


def test_of_several_gpus_the_one_that_is_used(begun: Callable[..., tuple[_Real, Heard]]) -> None:
    """A program that starts its ranks itself tells nobody which is which."""
    machine = Machine([Card(), Card(SECOND)])
    with cuda_played(machine) as cuda:
        trial, _ = begun(limit_bytes=GIB, gpu_uuids=(Card().uuid, SECOND))
        cuda.allocate(64 * MIB, device=1)
        trial.program.called(torch.nn.Identity())
        assert trial.program.peaks() == (64 * MIB, 64 * MIB)
        assert [one.allowed_bytes for one in cuda.allocators] == [None, GIB]
        timeline, unknown = history_of(trial.recorder, failed=False)
        trial.program.stop()
    assert (unknown, timeline and timeline.sizes) == ("", (64 * MIB,))


def test_cuda_that_is_first_used_in_a_thread(begun: Callable[..., tuple[_Real, Heard]]) -> None:
    with cuda_played() as cuda:
        trial, _ = begun()
        first = Thread(target=cuda.allocate, args=(512,))
        first.start()
        first.join()
        result = trial.outcome()
        trial.program.stop()
    assert isinstance(result, TrialDone)
    assert (result.peak_allocated_bytes, result.buckets_unknown) == (512, "")


def test_peaks_are_kept_that_the_program_counts_anew(begun: Callable[..., tuple[_Real, Heard]]) -> None:
    """By whichever of torch's functions: they meet below."""
    with cuda_played() as cuda:
        trial, _ = begun()
        cuda.allocators[0].free(cuda.allocate(4 * MIB))
        torch.cuda.memory.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        assert trial.program.peaks()[0] == 4 * MIB
        trial.program.stop()


def test_an_allocator_without_a_history(begun: Callable[..., tuple[_Real, Heard]]) -> None:
    with cuda_played(Machine(backend="cudaMallocAsync")) as cuda:
        trial, heard = begun()
        cuda.allocate(512)
        result = trial.outcome()
        trial.program.stop()
    assert isinstance(result, TrialDone)
    assert (result.buckets, result.buckets_unknown) == (None, "cudaMallocAsync does not yet support recordHistory.")
    assert not [event for event in heard.events if isinstance(event, Failed)]


def test_a_program_that_ends_the_history_itself(begun: Callable[..., tuple[_Real, Heard]]) -> None:
    with cuda_played() as cuda:
        trial, _ = begun()
        cuda.allocate(512)
        torch.cuda.memory._record_memory_history(None)
        result = trial.outcome()
        trial.program.stop()
    assert isinstance(result, TrialDone)
    assert result.buckets is None
    assert result.buckets_unknown.startswith("the allocator counts 1 allocations and releases, and its history has 0")


def test_after_a_failed_kernel_the_figures_are_those_that_are_known(
    begun: Callable[..., tuple[_Real, Heard]],
) -> None:
    with cuda_played() as cuda:
        trial, heard = begun()
        cuda.allocate(512)
        trial.program.steps = 1
        cuda.is_broken = True
        trial.reporter.on_end()
        trial.program.stop()
    result = done(heard.events)
    assert result.outcome == "fit"
    assert result.device_used_bytes == 2 * MIB + trial.profile.context_bytes
    assert "the driver does not say what the process held" in str(result.notes[-1])


def test_memory_that_a_library_finds_full(begun: Callable[..., tuple[_Real, Heard]]) -> None:
    """It raises an error of its own, which ends the program."""
    with cuda_played() as cuda:
        trial, heard = begun()
        cuda.allocate(512)
        heard.failed("train.py:3: RuntimeError", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"))
        trial.program.stop()
    assert done(heard.events).outcome == "oom"


def test_asking_whether_there_is_a_gpu_leaves_it_to_forked_children(fake_machine: FakeMachine, tmp_path: Path) -> None:
    """`torch.cuda.is_available` would not: its docstring."""
    fake_machine.show(Machine().driver())
    code = """
import os, torch
from gpumem_tui.run import command_trial
from gpumem_tui.run.events import TrialRequest, encode
from tests.cuda_standin import Machine, cuda_played
from tests.search.test_real_trial import ANY, GPU, Heard, Path
folder = Path({folder!r})
request = TrialRequest(ANY, GPU, False, 1, 2)
(folder / "request.json").write_bytes(encode(request))
with cuda_played() as cuda:
    command_trial.take_part(Heard(folder))
    child = os.fork()
    if not child:
        cuda.allocate(512)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""
    environment = {**fake_machine.environment, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code.format(folder=str(tmp_path))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout == "0\n", ran.stderr


def test_the_error_that_leaves_pytorchs_code_is_seen_before_a_program_can_catch_it() -> None:
    """Raised as HANDLE_TH_ERRORS does (torch/csrc/Exceptions.h): by its class and a text."""
    kind: Any = torch.OutOfMemoryError
    plain = kind.__init__
    seen: list[BaseException] = []
    try:
        command_trial._when_made(kind, seen.append)
        with suppress(torch.OutOfMemoryError):
            ctypes.pythonapi.PyErr_SetString(ctypes.py_object(kind), b"CUDA out of memory.")
    finally:
        kind.__init__ = plain
    assert [str(error) for error in seen] == ["CUDA out of memory."]


# The memory of this process, as the driver lists it


@pytest.mark.parametrize(
    ("before", "now", "held"),
    [
        ({}, {7: 5, 8: 6}, 5),
        ({8: 6}, {8: 60, 7: 5}, 5),
        ({8: 6}, {8: 60, 12: 5}, 5),  # pids of the host, which a container numbers otherwise
        ({7: 6}, {7: 60, 12: 5}, 5),  # of which one is this one's within the container
        ({8: 6}, {8: 60, 12: 5, 13: 9}, None),
        ({8: 6}, {8: 60}, None),
        (None, {7: 5}, None),
    ],
)
def test_a_process_is_told_from_its_neighbours(
    before: dict[int, int] | None, now: dict[int, int], held: int | None
) -> None:
    assert own_bytes(before, now, 7) == held


@pytest.mark.parametrize(
    ("later_bytes", "is_measured"), [(GIB, True), (2 * GIB, False), (GIB // 2, False), (GIB // 4, False)]
)
def test_the_devices_figure_counts_only_where_a_context_can_be_what_is_left(
    later_bytes: int, is_measured: bool
) -> None:
    """The driver lists no process here, and a neighbour that leaves meanwhile would make the context smaller."""
    profile = profile_for("2.11.0+cu130", GPU)
    with cuda_played(Machine([Card(others_bytes=GIB, others_later_bytes=later_bytes)])):
        neighbours = Neighbours("", GIB, profile)
        torch.cuda.init()
        beside_bytes = neighbours.beside_allocator_bytes(torch.device("cuda", 0))
    assert beside_bytes == (Card().context_bytes if is_measured else profile.context_bytes)
    assert bool(neighbours.note) is not is_measured


# A trial of a workload file

FUNCTIONS = """
import torch

def build(device):
    model = torch.nn.Linear(1024, 4096, device=device)
    return model, torch.optim.AdamW(model.parameters())

def make_batch(batch_size, device):
    return torch.randn(batch_size, 1024, device=device)

def train_step(model, optimizer, batch):
    for _ in range(2):
        model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_workload_that_fits_and_one_that_does_not(lab: Lab) -> None:
    machine = Machine([Card(others_bytes=GIB, others_later_bytes=3 * GIB)])
    fits, full = (done(lab.run(machine, functions=FUNCTIONS, batch=size)) for size in (64, 1 << 30))
    assert (fits.outcome, fits.steps, fits.buckets_unknown) == ("fit", 2, "")
    assert fits.buckets is not None
    assert fits.buckets["batch_data"] == 64 * 1024 * 4
    assert fits.device_used_bytes == fits.peak_reserved_bytes + 700 * MIB
    assert full.outcome == "oom"
    assert full.detail.startswith("CUDA out of memory.") or "out of memory" in full.detail
