"""Texts that are generated token by token leave what they would have if each call of the model had run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.simulator.fast.repeats import Repeats

WIDTH, HEADS, WORDS, TEXTS, PROMPT, NEW = 64, 4, 2048, 16, 24, 44
SEGMENT_BYTES = 2 << 20
Cache = list[tuple[torch.Tensor, torch.Tensor]]


class KeptKeys:
    """A cache that grows in place, as transformers' does."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.seen = 0

    def update(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = key if self.keys is None else torch.cat([self.keys, key], 2)
        self.values = value if self.values is None else torch.cat([self.values, value], 2)
        self.seen += key.shape[2]
        return self.keys, self.values


class Model(nn.Module):
    """Blocks of attention, without a cache, with one that they change, or with one that they give back."""

    runs = 0

    def __init__(self, depth: int = 2, *, scores_are_kept: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.scores_are_kept = scores_are_kept

    def forward(
        self,
        tokens: torch.Tensor,
        cache: list[KeptKeys] | None = None,
        past: Cache | None = None,
        is_returned: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Cache]:
        type(self).runs += 1
        states, made = self.table(tokens), []
        for position, (projection, wide) in enumerate(zip(self.projections, self.wide, strict=True)):
            query, key, value = (
                part.view(*part.shape[:2], HEADS, -1).transpose(1, 2) for part in projection(states).split(WIDTH, 2)
            )
            if cache is not None:
                key, value = cache[position].update(key, value)
            if past is not None:
                key, value = torch.cat([past[position][0], key], 2), torch.cat([past[position][1], value], 2)
            made.append((key, value))
            if self.scores_are_kept:
                mixed = torch.softmax(query @ key.transpose(2, 3), -1) @ value
            else:
                mixed = functional.scaled_dot_product_attention(query, key, value)
            states = states + mixed.transpose(1, 2).reshape(states.shape)
            states = states + wide(states)
        logits = self.head(states)
        return (logits, made) if is_returned else logits


def _next(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax(logits[:, -1], -1), 1)


def _without_cache(model: Model, tokens: torch.Tensor, new: int) -> torch.Tensor:
    for _ in range(new):
        tokens = torch.cat([tokens, _next(model(tokens))], 1)
    return tokens


def _with_object(model: Model, tokens: torch.Tensor, new: int) -> torch.Tensor:
    cache = [KeptKeys() for _ in model.projections]
    part = tokens
    for _ in range(new):
        part = _next(model(part, cache=cache))
        tokens = torch.cat([tokens, part], 1)
    assert cache[0].seen == tokens.shape[1] - 1
    return tokens


def _handed_on(model: Model, tokens: torch.Tensor, new: int) -> torch.Tensor:
    part, past = tokens, None
    for _ in range(new):
        logits, past = model(part, past=past, is_returned=True)
        part = _next(logits)
        tokens = torch.cat([tokens, part], 1)
    return tokens


def _until_the_end(model: Model, tokens: torch.Tensor, new: int) -> torch.Tensor:
    longest = tokens.shape[1] + new
    done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    while tokens.shape[1] < longest and not done.all():
        part = _next(model(tokens))
        done |= part[:, 0] == 2
        tokens = torch.cat([tokens, part], 1)
    return tokens


Loop = Callable[[Model, torch.Tensor, int], torch.Tensor]


@dataclass
class Result:
    length: int
    peaks: list[tuple[int, int]]
    held: int
    runs: int


def _generate(loop: Loop, *, answers: bool, scores_are_kept: bool) -> Result:
    gpu = SimulatedGpu(find_gpu("a100-80gb"), profile_for("2.13", find_gpu("a100-80gb")))
    Model.runs, peaks, length = 0, [], 0
    with simulate(gpu) as device, Repeats(gpu).watching() if answers else nullcontext(), torch.no_grad():
        model = Model(scores_are_kept=scores_are_kept).to(device).eval()
        for _ in range(2):
            length = loop(model, torch.randint(WORDS, (TEXTS, PROMPT)).to(device), NEW).shape[1]
            peaks.append((gpu.allocator.stats.peaks[0], gpu.allocator.stats.reserved_bytes))
        return Result(length, peaks, gpu.allocator.stats.allocated_bytes, Model.runs)


LOOPS = [pytest.param(_without_cache, marks=pytest.mark.slow), _with_object, _handed_on, _until_the_end]


@pytest.mark.parametrize(
    "scores_are_kept", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fused", "scores"]
)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__.strip("_"))
def test_answered_calls_hold_what_run_ones_hold(loop: Loop, scores_are_kept: bool) -> None:
    run = _generate(loop, answers=False, scores_are_kept=scores_are_kept)
    answered = _generate(loop, answers=True, scores_are_kept=scores_are_kept)
    assert run.runs == 2 * NEW
    assert answered.runs < 20
    assert answered.length == run.length == PROMPT + NEW
    assert answered.held == run.held
    for (allocated, reserved), (of_run, reserved_of_run) in zip(answered.peaks, run.peaks, strict=True):
        assert allocated == of_run
        assert abs(reserved - reserved_of_run) <= 2 * SEGMENT_BYTES, "blocks of one size are not made at each length"
