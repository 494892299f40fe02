"""Gradients are summed in place where PyTorch's engine does so: what it does on the CPU is the measure."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.simulator.device.gpu import backend, simulate
from tests.simulator.simulated_steps import simulated_gpu

_SIDE = 512
_BYTES = _SIDE * _SIDE * 4


def _several_uses(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    return (w * 2 + w * 3 + w * 4).sum()


def _two_gradients_of_one_formula(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    return (w * w).sum()


def _one_gradient_for_two(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    other = w + w * 3
    return ((other + w) * 2).sum()


def _a_view_waits(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    return (w.view(-1) * 2).sum() + (w.t() * 3).sum() + (w * 4).sum()


def _residual_blocks(x: torch.Tensor) -> torch.Tensor:
    w = torch.relu(x * 1.0)
    for _ in range(3):
        w = torch.relu(torch.sigmoid(w * 2) * 3 + w)
    return (w * 2).sum()


def _a_leaf_used_twice(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + x * 3).sum()


def _formulas_that_add(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    summed: torch.Tensor = (torch.logaddexp(w, w * 2) + torch.special.xlogy(w, w)).sum()
    return summed


def _gathered(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    rows = torch.zeros(_SIDE, 1, dtype=torch.int64, device=x.device)
    return w.gather(1, rows).sum() + w.max(dim=-1)[0].sum() + (w[rows[:, 0]] * 2).sum()


def _gradient_seen_by_a_hook(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    kept: list[torch.Tensor] = []
    first, second = w.clone(), w.clone()
    for copy in (first, second):
        copy.register_hook(kept.append)
    return (first * 2 + second * 3).sum()


def _hook_that_adds(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    w.register_hook(lambda gradient: gradient + 1.0)
    return (w * 2 + w * 3).sum()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 5

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + gradient * 3


def _own_function(x: torch.Tensor) -> torch.Tensor:
    w = x * 1.0
    summed: torch.Tensor = (_Sum.apply(w) + w * 2).sum()  # type: ignore[no-untyped-call]
    return summed


_PROGRAMS = [
    _several_uses, _two_gradients_of_one_formula, _one_gradient_for_two, _a_view_waits, _residual_blocks,
    _a_leaf_used_twice,
    _formulas_that_add, _gathered, _gradient_seen_by_a_hook, _hook_that_adds, _own_function,
]  # fmt: skip


def _taken_on_the_cpu(program: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """The large allocations of backward in order, by the CPU allocator's own events."""
    loss = program(torch.ones(_SIDE, _SIDE, requires_grad=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss.backward()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return [size for size in sizes if size >= _BYTES // 2]


def _taken_on_the_simulated_gpu(program: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    with simulate(simulated_gpu()) as device:
        loss = program(torch.ones(_SIDE, _SIDE, device=device, requires_grad=True))
        recorder = backend._gpu.recorder
        before = len(recorder.finish().sizes)
        loss.backward()
        return [size for size in recorder.finish().sizes[before:] if size >= _BYTES // 2]


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_backward_takes_what_the_engine_takes_without_a_mode(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _taken_on_the_simulated_gpu(program) == _taken_on_the_cpu(program)


def test_gradients_accumulate_in_place_over_micro_batches() -> None:
    def accumulated(x: torch.Tensor) -> torch.Tensor:
        (x * 2).sum().backward()
        return (x * 3).sum()

    assert _taken_on_the_simulated_gpu(accumulated) == _taken_on_the_cpu(accumulated) == [_BYTES]


def test_a_loss_with_logits_goes_on_in_its_own_result() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(x * 1.0, torch.ones_like(x))

    assert _taken_on_the_simulated_gpu(loss) == _taken_on_the_cpu(loss)


def test_gradients_that_a_program_drops_at_once_go_in_its_own_order() -> None:
    gpu = simulated_gpu()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(30)  # autograd's thread gets the interpreter only where this one waits
    try:
        with simulate(gpu) as device:
            layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
            gradients = torch.autograd.grad(layers(torch.randn(8, 64, device=device)).sum(), tuple(layers.parameters()))
            numbers = [gpu.memory.allocation_of(gradient) for gradient in gradients]
            start = gpu.recorder.position
            del gradients
            timeline = gpu.finish()
    finally:
        sys.setswitchinterval(interval)
    assert [-event for event in timeline.events[start:]] == numbers[::-1]
