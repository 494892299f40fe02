"""Calls that are answered from memory leave the same allocations behind as calls that run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.simulator.fast.repeats import Repeats
from gpumem_tui.step import Phase
from tests.pairs import pairwise, slow_beyond

Loop = Callable[["Training"], None]


class Counted(nn.Module):
    """A block that counts how often it really runs."""

    runs = 0

    def __init__(self, *, with_loss: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 64)
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.table.weight
        self.with_loss = with_loss

    def forward(
        self, tokens: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        type(self).runs += 1
        found = self.table(tokens)
        found = found + self.narrow(
            functional.dropout(functional.gelu(self.wide(self.norm(found))), 0.1, self.training)
        )
        scores: torch.Tensor = self.head(found)
        if wanted is None:
            return scores
        return scores, functional.cross_entropy(scores.view(-1, 512), wanted.view(-1))


@dataclass
class Training:
    """A model on the simulated GPU, and its parts of a training loop."""

    device: torch.device
    with_loss: bool = True
    autocast: bool = False
    samples: list[torch.Tensor] = field(default_factory=list)
    marks: Callable[[int, Phase], None] = lambda _step, _phase: None

    def __post_init__(self) -> None:
        self.model = Counted(with_loss=self.with_loss).to(self.device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())

    def batch(self, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(512, (size, 129))
        return tokens[:, :-1].to(self.device), tokens[:, 1:].to(self.device)

    def loss(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if self.autocast else nullcontext():
            if self.with_loss:
                found: torch.Tensor = self.model(tokens, wanted)[1]
                return found
            scores = self.model(tokens)
            return functional.cross_entropy(scores.reshape(-1, 512), wanted.reshape(-1))

    def evaluate(self, times: int) -> None:
        self.model.eval()
        with torch.no_grad():
            for _ in range(times):
                self.loss(*self.batch()).item()
        self.model.train()

    def accumulate(self, times: int, size: int = 4) -> None:
        tokens, wanted = self.batch(size)
        for _ in range(times):
            loss = self.loss(tokens, wanted) / times
            tokens, wanted = self.batch(size)  # fetched while the GPU is busy
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _evaluation_and_accumulation(training: Training) -> None:
    for _ in range(3):
        training.evaluate(6)
        training.accumulate(6)


def _graph_is_dropped(training: Training) -> None:
    for _ in range(6):
        training.loss(*training.batch())
    training.accumulate(5)


def _two_calls_in_one_backward(training: Training) -> None:
    for _ in range(6):
        (training.loss(*training.batch()) + training.loss(*training.batch())).backward()
    training.accumulate(5)


def _sizes_change(training: Training) -> None:
    for size in (2, 4, 2, 4, 2, 2, 2, 8):
        training.accumulate(4, size)


def _everything_is_kept(training: Training) -> None:
    for _ in range(6):
        training.samples.append(training.loss(*training.batch()))


def _model_is_replaced_while_its_loss_lives(training: Training) -> None:
    for fold in range(3):
        training.model = Counted(with_loss=training.with_loss).to(training.device)
        training.model.narrow.requires_grad_(fold == 0)
        training.optimizer = torch.optim.SGD(training.model.parameters())
        for _ in range(5):
            loss = training.loss(*training.batch())
            if fold < 2:  # else the graph is as forward left it
                loss.backward()
        training.optimizer.step()


def _leaf_within_the_graph(training: Training) -> None:
    """Do as PEFT's `enable_input_require_grads`: what a frozen table gives, and its gradient, live as the graph."""
    training.model.head.weight = nn.Parameter(training.model.head.weight.detach().clone())
    training.model.table.requires_grad_(False)
    training.model.table.register_forward_hook(lambda _module, _args, found: found.requires_grad_(True))
    for _ in range(2):
        training.accumulate(8)
        for _ in range(8):  # the graph is gone before the next call
            training.loss(*training.batch(2)).backward()


def _losses_are_kept(training: Training) -> None:
    """Keep a number of each micro-batch, so that each finds more memory held than the last."""
    for _ in range(12):
        loss = training.loss(*training.batch())
        loss.backward()
        training.samples.append(loss.detach().clone())
        del loss  # it lives no longer than the model
    training.optimizer.zero_grad(set_to_none=True)


def _gradients_go_as_the_graph_does(training: Training) -> None:
    """Make steps in a function that ends with `zero_grad`, as timm's epochs do: its loss goes right after them."""
    for _ in range(6):
        training.accumulate(1)


def _alone_and_in_pairs(training: Training) -> None:
    _losses_are_kept(training)
    for _ in range(4):
        (training.loss(*training.batch()) + training.loss(*training.batch())).backward()
    training.optimizer.zero_grad(set_to_none=True)


LOOPS: list[Loop] = [
    _evaluation_and_accumulation, _graph_is_dropped, _two_calls_in_one_backward, _sizes_change, _everything_is_kept,
    _leaf_within_the_graph, _losses_are_kept, _gradients_go_as_the_graph_does,
]  # fmt: skip


def _run(
    loop: Loop, limit_bytes: int | None, answers: bool, with_loss: bool = True, autocast: bool = False
) -> tuple[SimulatedGpu, int]:
    gpu = find_gpu("a100-40gb")
    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu), limit_bytes, unlimited=limit_bytes is None)
    Counted.runs = 0
    torch.manual_seed(0)
    with simulate(simulated) as device, Repeats(simulated).watching() if answers else nullcontext():
        loop(Training(device, with_loss, autocast, marks=simulated.mark))
    return simulated, Counted.runs


@pytest.mark.parametrize(
    ("loop", "with_loss", "autocast"), slow_beyond(8, pairwise(LOOPS, (False, True), (False, True)))
)
def test_the_same_events_with_and_without(loop: Loop, with_loss: bool, autocast: bool) -> None:
    ran, often = _run(loop, None, answers=False, with_loss=with_loss, autocast=autocast)
    answered, seldom = _run(loop, None, answers=True, with_loss=with_loss, autocast=autocast)
    assert seldom <= often
    expected, found = ran.finish(), answered.finish()
    assert found.sizes == expected.sizes
    assert found.events == expected.events
    assert found.buckets == expected.buckets


@pytest.mark.parametrize("loop", [_leaf_within_the_graph, _losses_are_kept], ids=lambda loop: loop.__name__.strip("_"))
def test_what_a_program_keeps_of_each_call_keeps_nothing_from_being_answered(loop: Loop) -> None:
    _, often = _run(loop, None, answers=False)
    _, seldom = _run(loop, None, answers=True)
    assert seldom < often / 2


def test_calls_that_share_a_backward_run_once_they_have_been_seen_to() -> None:
    _, alone = _run(_losses_are_kept, None, answers=True)
    _, runs = _run(_alone_and_in_pairs, None, answers=True)
    assert runs - alone >= 4 * 2 - 1  # all of the pairs but for the very first call


@pytest.mark.parametrize("with_loss", [False, True], ids=["loss outside", "loss inside"])
def test_parameters_live_as_long_as_the_graph_of_a_call(with_loss: bool) -> None:
    def live_bytes(answers: bool) -> list[int]:
        """Return what is live whenever something is made: a graph that goes releases in an order of its own."""
        simulated, _ = _run(_model_is_replaced_while_its_loss_lives, None, answers, with_loss)
        timeline, live, found = simulated.finish(), 0, []
        for event in timeline.events:
            size_bytes = timeline.sizes[abs(event) - 1]
            assert isinstance(size_bytes, int)
            found += [live] if event > 0 else []
            live += size_bytes if event > 0 else -size_bytes
        return found

    assert live_bytes(answers=True) == live_bytes(answers=False)


@pytest.mark.parametrize("with_loss", [False, True], ids=["loss outside", "loss inside"])
def test_the_allocator_ends_in_the_same_state(with_loss: bool) -> None:
    ran, often = _run(_evaluation_and_accumulation, GIB, answers=False, with_loss=with_loss)
    answered, seldom = _run(_evaluation_and_accumulation, GIB, answers=True, with_loss=with_loss)
    assert seldom < often / 2
    assert answered.allocator.stats == ran.allocator.stats


def _long_loops(training: Training) -> None:
    for step in (1, 2, 3):
        training.marks(step, Phase.FORWARD)
        training.evaluate(20)
        for _ in range(20):
            training.marks(step, Phase.FORWARD)
            loss = training.loss(*training.batch())
            training.marks(step, Phase.BACKWARD)
            loss.backward()
        training.marks(step, Phase.OPTIMIZER)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("is_exact", [False, True], ids=["by events", "by blocks"])
@pytest.mark.parametrize("with_loss", [False, True], ids=["loss outside", "loss inside"])
def test_rounds_that_are_left_out_change_no_figure(with_loss: bool, is_exact: bool) -> None:
    simulated, _ = _run(_long_loops, None, answers=True, with_loss=with_loss)
    whole, folded = simulated.finish(), simulated.finish_folded(is_exact=is_exact)
    assert len(folded.events) < len(whole.events) / 2
    assert len(folded.marks) < len(whole.marks) / 2
    for settings in (AllocatorSettings(), AllocatorSettings(expandable_segments=True)):
        expected, found = replay(whole, settings=settings), replay(folded, settings=settings)
        assert found.phases == expected.phases
        assert (found.peak_allocated_bytes, found.breakdown) == (expected.peak_allocated_bytes, expected.breakdown)
        assert found.peak_reserved_bytes == expected.peak_reserved_bytes
        assert folded.held_after(found.peak_event) == whole.held_after(expected.peak_event)


def test_rounds_after_which_more_is_held_stay() -> None:
    def loop(training: Training) -> None:
        for _ in range(20):
            training.samples.append(training.loss(*training.batch()))  # held, and so is its graph

    simulated, _ = _run(loop, None, answers=True)
    assert simulated.finish_folded(is_exact=False) == simulated.finish()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_what_is_done_at_once_leaves_the_allocator_as_if_it_had_run(autocast: bool) -> None:
    found: list[tuple[object, list[tuple[int, int]]]] = []

    def loop(training: Training) -> None:
        training.evaluate(9)
        module = torch.get_device_module(training.device)
        module.reset_peak_memory_stats()
        training.evaluate(5)
        found.append((module.memory_stats(), []))
        training.accumulate(9)
        kept = training.batch(3)
        training.evaluate(9)
        del kept

    for answers in (False, True):
        simulated, _ = _run(loop, None, answers=answers, autocast=autocast)
        free = [(block.address, block.size_bytes) for block in simulated.allocator.cached_blocks()]
        found.append((simulated.allocator.stats, free))
        found.append((simulated.finish(), []))
    assert found[:3] == found[3:]


def test_out_of_memory_in_a_call_that_is_not_run() -> None:
    def loop(training: Training) -> None:
        training.evaluate(6)
        kept = []
        with torch.no_grad():
            training.model.eval()
            while True:
                kept.append(training.model(torch.zeros(64, 128, dtype=torch.long, device=training.device)))

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        _run(loop, GIB, answers=True)
