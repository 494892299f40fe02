"""Which bucket an allocation is in, as only the whole run can tell."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder
from gpumem_tui.simulator.device.gpu import simulate
from gpumem_tui.step import Phase
from tests import in_process
from tests.simulator.simulated_steps import MLP, simulated_gpu, trained


def _buckets(recorder: TimelineRecorder, failed: bool = False) -> list[Bucket]:
    return [ALLOCATED_BUCKETS[index] for index in recorder.finish(failed).buckets]


def test_what_a_forward_leaves_to_the_next_forward_is_an_activation() -> None:
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    scratch, logits = recorder.allocate(512), recorder.allocate(512)
    recorder.release(scratch)
    recorder.mark(1, Phase.BACKWARD)
    recorder.mark(1, Phase.FORWARD)
    recorder.allocate(512)
    recorder.release(logits)
    assert _buckets(recorder)[:2] == [Bucket.TEMPORARY, Bucket.ACTIVATIONS]


def test_a_run_that_survives_an_out_of_memory_counts_to_its_end() -> None:
    recorder = TimelineRecorder()
    recorder.allocate(512)
    recorder.cut()
    recorder.allocate(512)
    assert recorder.finish().events == (1, 2)
    assert recorder.finish(failed=True).events == (1,)


class _OwnOptimizers:
    """A workload whose step has an optimizer that `build` does not give."""

    name = "own optimizers"

    def build(self, device: torch.device) -> tuple[nn.Module, None]:
        model = nn.Linear(1024, 1024, bias=False, device=device)
        self.optimizer = torch.optim.Adam(model.parameters())
        return model, None

    def make_batch(self, batch_size: int, device: torch.device) -> torch.Tensor:
        return torch.ones(batch_size, 1024, device=device)

    def train_step(self, model: nn.Module, optimizer: object, batch: object) -> None:
        model(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_the_state_of_an_optimizer_that_only_the_step_knows_is_optimizer_state() -> None:
    workload, gpu = _OwnOptimizers(), simulated_gpu()
    with in_process.trained(workload, 1, 2, gpu):
        timeline = gpu.finish()
        held = Counter[Bucket]()
        for found in timeline.held_after(len(timeline.events) - 1):
            held[found.bucket] += found.size_bytes
        del workload.optimizer
    weight_bytes = 1024 * 1024 * 4
    assert (held[Bucket.OPTIMIZER], held[Bucket.OTHER]) == (2 * weight_bytes, 0)


def test_a_step_fills_every_bucket_of_allocated_memory() -> None:
    """Whoever adds a bucket to `Bucket` adds what fills it: tags of a step, or the rule for what is not tagged."""
    gpu = simulated_gpu(unlimited=True)
    with simulate(gpu) as device:
        kept = torch.empty(1024, device=device)  # before the model is built, and never released
    timeline = trained(MLP, Recipe(), batch_size=2, gpu=gpu).finish()
    filled = {ALLOCATED_BUCKETS[index] for index, size in zip(timeline.buckets, timeline.sizes, strict=True) if size}
    assert filled == set(ALLOCATED_BUCKETS)
    del kept
