"""Workload files written for a test, and real trials of them in child processes on a simulated GPU."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.run.children import Child
from gpumem_tui.run.events import ChildEvent, Failed, Sample, TrialDone, TrialRequest
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.workload.line import line_of
from gpumem_tui.workload.spec import WorkloadSpec

SOUND = """
import os, signal, subprocess, sys, time
import torch
from torch import nn

def build(device):
    model = nn.Linear(8, 8, device=device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def make_batch(batch_size, device):
    return torch.randn(batch_size, 1024, 8, device=device)

def train_step(model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
A100 = Device(find_gpu("a100-80gb"), simulated=True)


def workload(folder: Path, faults: str = "") -> WorkloadSpec:
    """A workload file that trains a small layer, with some of its functions defined anew by `faults`."""
    path = folder / "workload.py"
    path.write_text(SOUND + textwrap.dedent(faults))
    return WorkloadSpec(Recipe(), file=str(path))


def config(spec: WorkloadSpec, *, python: str = sys.executable, timeout_s: float = 60.0) -> SearchConfig:
    """A guided search on a simulated A100."""
    return SearchConfig(spec, A100, python=python, timeout_s=timeout_s)


class Trial:
    """One trial of one sample in a child process, from its start to its end."""

    def __init__(self, spec: WorkloadSpec, steps: int = 2, timeout_s: float = 60.0) -> None:
        self.events: list[ChildEvent] = []
        self.timeout_s = timeout_s
        line = line_of(spec, sys.executable)
        self.child = Child(TrialRequest(spec, A100.gpu, True, 1, steps), line.filled(1), line.cwd, ())

    def run(self, wait: Callable[[], None] = lambda: None, held: Callable[[], bool] = lambda: False) -> Trial:
        """Read its events to the end, then end it. Silence counts from the first step on: imports take their time.

        Raises:
            ChildDied: it did not finish its work.
        """
        try:
            for event in self.child.events(wait, self.timeout_s, lambda: held() or not self.has_begun):
                self.events.append(event)
        finally:
            self.pid = self.child.pid
            self.child.end()
        return self

    @property
    def has_begun(self) -> bool:
        """Whether the first step has."""
        return any(isinstance(event, Sample) for event in self.events)

    @property
    def step(self) -> int:
        """How many steps it has made."""
        return max((event.step for event in self.events if isinstance(event, Sample)), default=0)

    @property
    def failure(self) -> Failed:
        """Its last report, which is why there is no outcome."""
        assert isinstance(self.events[-1], Failed)
        return self.events[-1]

    @property
    def result(self) -> TrialDone:
        """Its last report."""
        assert isinstance(self.events[-1], TrialDone)
        return self.events[-1]
