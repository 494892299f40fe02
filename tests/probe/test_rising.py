"""A process whose memory rises from step to step has a few of them recorded, so that its post-mortem names the line."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import GIB, MIB
from gpumem_tui.probe.probe import Probe
from gpumem_tui.probe.rising import Rising
from gpumem_tui.probe.wire import UNASKED, KeptPlace, LookAnswer
from gpumem_tui.watch.postmortem import case_lines, open_case
from gpumem_tui.watch.reader import Watcher
from tests.probe.watched import run
from tests.watch.rings import RECORD

KEEPS = """
import sys
import pytest, torch
from torch import nn
from gpumem_tui.probe import probe
from tests.probe.allocating import allocating
probe.INTERVAL_S, probe.SAMPLE_SHARE = 0.0, float("inf")

MESSAGE = (
    "CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 111.48 GiB is "
    "free. Including non-PyTorch memory, this process has 8.61 GiB memory in use. 8.00 GiB allowed; Of the allocated "
    "memory 7.90 GiB is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch but unallocated."
)
steps, keeps = int(sys.argv[1]), sys.argv[2] == "keeps"
kept = []
with allocating(pytest.MonkeyPatch()):
    model = nn.Linear(64, 4096)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        logits = model(torch.randn(512, 64))
        logits.pow(2).mean().backward()
        if keeps:
            kept.append(logits.detach().float() * 2)
        if step == steps - 1:
            raise torch.OutOfMemoryError(MESSAGE)
        optimizer.step()
        optimizer.zero_grad()
"""
LINE = 1 + next(number for number, line in enumerate(KEEPS.splitlines()) if "kept.append" in line)


@pytest.mark.parametrize("steps", [9, 14])
def test_the_line_that_keeps_is_named(steps: int, tmp_path: Path) -> None:
    """Also where memory runs out while it is being recorded: six samples rise, then two whole steps are enough."""
    script = tmp_path / "keeps.py"
    script.write_text(KEEPS)
    done = run([script, str(steps), "keeps"], tmp_path / "published")
    [process] = Watcher([tmp_path / "published"]).processes()
    assert done.published[0].last.errors == 0
    case = open_case(process)
    assert case is not None
    assert [(one.source, one.bytes) for one in case.post_mortem.kept] == [(f"keeps.py:{LINE}", 8 * MIB)]
    lines = case_lines(case)
    assert lines[1] == f"memory grew 8.0 MiB a step, made at keeps.py:{LINE} and never released: fix that first"
    assert lines[2].startswith(f"the failed request: about 0.24 GiB on cuda:0 (NVIDIA H200) at keeps.py:{LINE + 2}, 7.")
    assert lines[3].startswith("the process limits itself to 8.00 GiB (torch.cuda.set_per_process_memory_fraction)")
    assert lines[3].endswith("; the device had 111.48 GiB free")
    assert any(line.endswith("8.00 GiB  = the process's own limit") for line in lines)


def test_steps_that_keep_nothing_take_the_place_of_earlier_ones_that_did() -> None:
    answer = LookAnswer(request=UNASKED, step=9, step_s=0.1, method="", devices=(), unavailable={})
    place = KeptPlace(device=0, operator="", module="", source="train.py:11", bytes=MIB, allocations=1)
    probe = Probe("call")
    for kept, known in (((place,), (place,)), (None, (place,)), ((), ())):
        probe._answer(replace(answer, kept=kept))
        assert probe._look_around().kept == known


def _due(size_at: Callable[[int], float], samples: int = 60, **more: Any) -> int:
    """After how many samples, seven steps apart, a recording is due; 0 for never."""
    rising = Rising()
    for number in range(samples):
        held = round(16 * GIB + size_at(number))
        if rising.is_due([replace(RECORD, step=1 + 7 * number, allocated_bytes=held, **more)], {0: 80 * GIB}):
            return number + 1
    return 0


def test_when_steps_are_recorded() -> None:
    noise = random.Random(1)
    assert _due(lambda number: 100 * MIB * number) == 6
    assert _due(lambda number: 10 * GIB * number) == 4, "there is no time to wait for six"
    assert _due(lambda number: 5 * MIB * number) == 0, "less than a MiB a step"
    assert _due(lambda number: GIB * min(number, 4)) == 0, "warms up"
    assert _due(lambda number: GIB * (number > 20) + 50 * MIB * number * (number > 20)) == 27
    assert sum(_due(lambda _: noise.uniform(0, 4) * GIB) > 0 for _ in range(20)) <= 1
    assert _due(lambda number: 100 * MIB * number, has_allocator=False) == 0


def test_it_is_not_recorded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("gpumem_tui.probe.rising.time.monotonic", lambda: now_s)
    rising, at_s = Rising(), []
    for number in range(1200):
        now_s += 0.5
        if rising.is_due(
            [replace(RECORD, step=1 + number, allocated_bytes=17 * GIB + number * 5 * MIB)], {0: 80 * GIB}
        ):
            at_s.append(now_s - 1000)
    assert at_s == [3.0, 63.0, 183.0, 423.0]
