"""The probe's cost for a training step of about 1 ms, at its own rate. `pytest -m bench -s -n 0 tests/bench -k probe`.

Two ways: the time spent in the hook, and blocks with and without it in turn. The latter is what a user would measure,
and on a machine that does anything else its noise is larger than what it looks for: only the former is asserted.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_hooks

pytestmark = pytest.mark.bench

_BLOCKS = 20
_BLOCK_S = 1.0
_MOST_SHARE = 0.005


def _main() -> None:
    """In a process of its own, for hooks stay."""
    from gpumem_tui.probe.probe import Probe

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    for _ in range(200):
        step()
    Probe("call").install()
    started = time.perf_counter()
    step()
    first_s = time.perf_counter() - started
    hooks: dict[int, Any] = optimizer_hooks._global_optimizer_post_hooks
    (number,) = hooks
    hook = hooks.pop(number)
    nothing, spent = Timed(lambda *args: None), Timed(hook)
    watched, unwatched, shares = [], [], []
    for _ in range(_BLOCKS):
        passed_s, steps = _block(step)
        unwatched.append(passed_s / steps)
        hooks[number] = hook
        passed_s, steps = _block(step)
        watched.append(passed_s / steps)
        hooks[number] = nothing
        _block(step)
        hooks[number] = spent
        spent.seconds.clear()
        passed_s, steps = _block(step)
        shares.append((sum(spent.seconds) - steps * nothing.median_s) / passed_s)
        del hooks[number]
    ratio = statistics.median(one / other for one, other in zip(watched, unwatched, strict=True))
    print(f"step of {statistics.median(unwatched) * 1e3:.2f} ms, {len(list(model.parameters()))} parameters")
    print(f"with the probe ÷ without, {_BLOCKS} pairs of {_BLOCK_S:.0f} s: median {ratio:.4f}")
    print(f"hook when nothing is due: {(spent.median_s - nothing.median_s) * 1e6:.2f} µs")
    print(f"step with the first sample, for which modules are searched: {first_s * 1e3:.1f} ms")
    print(f"share of the time spent in the hook: {statistics.median(shares):.4%}")
    print(f"threads: {threading.active_count()}")
    assert statistics.median(shares) <= _MOST_SHARE
    assert threading.active_count() == 1


class Timed:
    """Calls a hook, and keeps how long each call took, the taking of the time included."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> None:
        started = time.perf_counter()
        self._hook(*args)
        self.seconds.append(time.perf_counter() - started)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def _block(step: Callable[[], None]) -> tuple[float, int]:
    """How long a block took, in seconds, and how many steps it had."""
    steps = 0
    started = time.perf_counter()
    while (passed := time.perf_counter() - started) < _BLOCK_S:
        step()
        steps += 1
    return passed, steps


def test_probe_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(tmp_path / "published"))
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    _main()
