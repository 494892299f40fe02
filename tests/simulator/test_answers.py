"""A remembered answer of an operator equals its new answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.simulator.device.answers import Answers
from gpumem_tui.simulator.device.gpu import simulate
from gpumem_tui.workload.standard import CatalogWorkload
from tests.in_process import timeline_of
from tests.pairs import slow_beyond
from tests.simulator.simulated_steps import on, simulated_gpu

Made = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...] | None
Operator = Callable[[torch.Tensor], Made]

OPERATORS: dict[str, Operator] = {
    "a new tensor": lambda x: x + 1,
    "of another type": lambda x: x > 0,
    "a softmax": lambda x: F.softmax(x, -1),
    "in place": lambda x: x.mul_(2),
    "a view": lambda x: x[1:, ::2],
    "another view of that tensor": lambda x: x.t(),
    "a view cut in pieces": lambda x: x.split(1),
    "one that states it is none": lambda x: torch.ops.aten._unsafe_view(x, [3, 8]),
    "copied when it must be": lambda x: x.t().reshape(-1),
    "several results": lambda x: torch.sort(x),
    "several at once": lambda x: torch._foreach_sqrt([x, x]),
    "several in place": lambda x: torch._foreach_add_([x], 1.0),
    "no strides as usual": lambda x: x.expand(2, 6, 4).permute(2, 0, 1) * 2,
    "into one that is there": lambda x: torch.add(x, x, out=x),
}


def _looks(made: Made, given: torch.Tensor) -> list[object]:
    """Type, shape, strides and whose storage it is, for every tensor of a result."""
    tensors = [made] if isinstance(made, torch.Tensor) else made or ()
    storage = given.untyped_storage()._cdata
    return [
        type(made).__name__,
        *(
            (
                t.dtype,
                t.shape,
                t.stride(),
                t.storage_offset(),
                t.device,
                t.untyped_storage()._cdata == storage,
                t is given,
            )
            for t in tensors
        ),
    ]


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_a_second_answer_is_like_the_first(operator: Operator) -> None:
    with on() as (device, memory):
        looks, taken = [], []
        for _ in range(3):
            given = torch.empty(6, 4, device=device)
            before = memory.memory_allocated()
            made = operator(given)
            looks.append(_looks(made, given))
            taken.append(memory.memory_allocated() - before)
            del given, made
    assert looks == [looks[0]] * 3
    assert len(set(taken)) == 1


def test_views_made_in_inference_mode_are_what_they_look_at() -> None:
    def answers(device: str | torch.device) -> list[object]:
        found: list[object] = []
        weight = torch.zeros(6, 4, device=device)
        for _ in range(3):
            with torch.inference_mode():
                inferred = weight * 2
                weight[:3].add_(1)
                found += [weight[:3].is_inference(), inferred[:3].is_inference(), weight[:3]._version]
            with torch.no_grad():
                found += [weight[:3].is_inference(), inferred[:3].is_inference(), weight._version]
        return found

    with on() as (device, _):
        assert answers(device) == answers("cpu")


def test_what_differs_is_answered_anew() -> None:
    with on() as (device, _):
        whole = torch.ones(4, dtype=torch.int64, device=device)
        assert [(whole * 2).dtype, (whole * 2.0).dtype, (whole * True).dtype] == [
            torch.int64,
            torch.float32,
            torch.int64,
        ]
        square = torch.empty(4, 4, device=device)
        assert (square.T * 1).stride() == (1, 4)
        assert (square * 1).stride() == (4, 1)
        assert torch.empty(4, device=device).to(torch.float16).dtype == torch.float16
        assert torch.empty(4, device=device).to(torch.bfloat16).dtype == torch.bfloat16
        with torch.inference_mode():
            assert (square * 1).is_inference()
        assert not (square * 1).is_inference()


def test_resizing_is_followed_every_time() -> None:
    with on() as (device, memory):
        for _ in range(2):
            tensor = torch.empty(4, device=device)
            tensor.resize_(1024)
            assert memory.memory_allocated() == 4096
            del tensor


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.norm(self.layers(images)), 0.1)


def _convolutions() -> Timeline:
    gpu = simulated_gpu(unlimited=True)
    with simulate(gpu) as device:
        network = _Convolutions().to(device)
        optimizer = torch.optim.SGD(network.parameters(), momentum=0.9)
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            network(torch.empty(2, 4, 16, 16, device=device).to(memory_format=memory_format)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del network, optimizer
        return gpu.finish()


def _catalog_model(recipe: Recipe) -> Timeline:
    workload = CatalogWorkload(find_model("gpt2").overridden(layers=3), recipe)
    return timeline_of(workload, 1, 2, recipe)


RUNS: dict[str, Callable[[], Timeline]] = {
    "convolutions": _convolutions,
    "gpt2": lambda: _catalog_model(Recipe()),
    "gpt2 in bf16 with recompute": lambda: _catalog_model(Recipe(precision="amp-bf16", recompute="full")),
}


@pytest.mark.parametrize("run", slow_beyond(1, RUNS.values()), ids=RUNS)
def test_a_run_is_the_same_where_nothing_is_remembered(
    run: Callable[[], Timeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = run()
    monkeypatch.setattr(Answers, "key", lambda *_: None)
    assert remembered == run()
