"""A forked process compiles to the result of this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Inductor writes kernels for triton, which is not here"),
]

_NETWORK = """
import json
import os
import sys
import torch
from torch import nn
from torch.nn import functional as F
from gpumem_tui.simulator.compiled.following import follow_compiler, forget
from gpumem_tui.simulator.cuda.presented import presented_as_cuda
from gpumem_tui.simulator.device.gpu import simulate
from tests.simulator.simulated_steps import simulated_gpu

forks, fork = [], os.fork
follow_compiler({})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(64), nn.Linear(64, 192)
        self.up, self.out = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        query, key, value = self.heads(self.norm(x)).split(64, 2)
        x = x + F.dropout((query @ key.transpose(1, 2)).softmax(-1), 0.1) @ value
        return x + F.dropout(self.out(F.gelu(self.up(x))), 0.1)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.blocks = nn.Embedding(500, 64), nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, rows):
        return F.cross_entropy(self.blocks(self.names(rows)).view(-1, 64) @ self.names.weight.t(), rows.view(-1))

"""
_BESIDE = """


def traced(processors, fork):
    os.sched_getaffinity, os.fork = lambda _: set(range(processors)), fork
    forget()
    gpu = simulated_gpu()
    with simulate(gpu), presented_as_cuda(gpu):
        network = Network().cuda()
        called = torch.compile(network)
        for _ in range(2):
            called(torch.ones(4, 128, dtype=torch.long, device="cuda")).backward()
        reserved, timeline = torch.cuda.max_memory_reserved(), gpu.finish()
    places = [str(timeline.site_table[site]) for site in timeline.sites]
    return [timeline.events, timeline.sizes, timeline.buckets, places, reserved]


def forked():
    forks.append(fork())
    return forks[-1]


def dies():
    return fork() or os._exit(1)


def refuses():
    raise BlockingIOError("Resource temporarily unavailable")


ways = {"alone": (1, forked), "next to": (2, forked), "dies": (2, dies), "refused": (2, refuses)}
found = {way: (traced(*how), len(forks)) for way, how in ways.items()}
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
print(json.dumps([[way, *value] for way, value in found.items()] + [left]))
"""


def test_a_backward_compiled_in_a_fork_is_what_it_is_without(tmp_path: Path) -> None:
    """Also one that dies, and one that there may not be."""
    program = tmp_path / "program.py"
    program.write_text(_NETWORK + _BESIDE)
    *found, left = _run(program)
    traces = {way: trace for way, trace, _ in found}
    assert [count for _, _, count in found] == [0, 1, 1, 1], "a fork where there are two processors"
    assert len(traces["alone"][0]) > 100
    assert any("fused=('program.py" in place for place in traces["alone"][3])
    for trace in traces.values():
        assert trace == traces["alone"]
    assert left is None, "no process is left"


_AHEAD = """
from gpumem_tui.simulator.compiled.wrapper import Wrapper

written, of = [], Wrapper.of
Wrapper.of = lambda lowering: written.append(lowering) or of(lowering)
processors, rows, tells = json.loads(sys.argv[1])


class Telling(Network):
    def forward(self, rows):
        os.write(told, b"called")
        return super().forward(rows)


os.sched_getaffinity = lambda _: set(range(processors))
told = os.open("told", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
gpu = simulated_gpu()
with simulate(gpu), presented_as_cuda(gpu):
    network = (Telling if tells else Network)().cuda()
    called = torch.compile(network)
    called.eval()
    with torch.no_grad():
        called(torch.ones(4, 128, dtype=torch.long, device="cuda"))
    called.train()
    for _ in range(2):
        called(torch.ones(rows, 128, dtype=torch.long, device="cuda")).backward()
    reserved, timeline = torch.cuda.max_memory_reserved(), gpu.finish()
places = [str(timeline.site_table[site]) for site in timeline.sites]
trace = [timeline.events, timeline.sizes, timeline.buckets, places, reserved, os.path.getsize("told")]
print(json.dumps([trace, len(written)]))
"""


@pytest.mark.parametrize(
    ("rows", "tells", "written"),
    [pytest.param(4, False, 1, id="as-evaluated"), pytest.param(5, False, None, id="other"), (4, True, None)],
)
def test_what_training_calls_is_compiled_while_a_program_evaluates(
    rows: int, tells: bool, written: int | None, tmp_path: Path
) -> None:
    """Other sizes are compiled here; no part of the program, which writes a file as it is called, runs twice."""
    program = tmp_path / "program.py"
    program.write_text(_NETWORK + _AHEAD)
    alone, by_one = _run(program, json.dumps([1, rows, tells]))
    ahead, by_two = _run(program, json.dumps([2, rows, tells]))
    assert len(alone[0]) > 100
    assert ahead == alone
    assert (by_one, by_two) == (3, written) if written else by_one >= by_two


def _run(program: Path, *words: str) -> Any:
    """Return what a program prints last."""
    here = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(program), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=here, cwd=program.parent
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
