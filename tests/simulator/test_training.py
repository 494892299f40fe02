"""Common parts of training loops, each with its effect on memory on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, TensorDataset

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.profile import Profile, profile_for
from gpumem_tui.simulator.device.attention import Attention
from tests.simulator.simulated_steps import on

WIDTH = 1024
WEIGHT_BYTES = WIDTH * WIDTH * 4
ROWS = 4096
ROW_BYTES = ROWS * WIDTH * 4
aten = torch.ops.aten


def block(device: torch.device) -> nn.Module:
    """Keeps four activations: the input, both GELU inputs, and the second layer's."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()]
    return nn.Sequential(*layers).to(device)


# Checkpointing


def kept_bytes(run: Callable[[nn.Module, Tensor], Tensor]) -> int:
    """Memory that forward keeps beyond its output, once a backward has made the workspaces; backward must work."""
    with on() as (device, memory):
        layers = block(device)
        for measured in (False, True):
            inputs = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
            before: int = memory.memory_allocated()
            output = run(layers, inputs)
            kept: int = memory.memory_allocated() - before - ROW_BYTES
            output.sum().backward()
            assert inputs.grad is not None
            layers.zero_grad()
            del output, inputs
            if measured:
                return kept
    raise AssertionError


def test_without_checkpointing_everything_is_kept() -> None:
    assert kept_bytes(lambda layers, x: layers(x)) == 3 * ROW_BYTES


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_forms_of_checkpointing_keep_the_input_only(reentrant: bool) -> None:
    kept = kept_bytes(lambda layers, x: checkpoint(layers, x, use_reentrant=reentrant))
    assert kept == 0


@pytest.mark.parametrize(
    ("saved", "kept"),
    [([], 0), ([aten.mm.default], 2 * ROW_BYTES), ([aten.mm.default, aten.gelu.default], 3 * ROW_BYTES)],
)
def test_selective_checkpointing_keeps_the_operators_it_is_told(saved: list[Any], kept: int) -> None:
    """GELU's second result is the block's output, which its own copy in the cache outlives."""
    contexts = partial(create_selective_checkpoint_contexts, saved)
    found = kept_bytes(lambda layers, x: checkpoint(layers, x, use_reentrant=False, context_fn=contexts))
    assert found == kept


def test_a_policy_decides_operator_by_operator() -> None:
    def every_second_product(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op is not aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    counts = {False: 0, True: 0}
    contexts = partial(create_selective_checkpoint_contexts, every_second_product)
    found = kept_bytes(lambda layers, x: checkpoint(layers, x, use_reentrant=False, context_fn=contexts))
    assert found == ROW_BYTES


# Layout


def test_channels_last_is_kept_by_what_follows() -> None:
    with on() as (device, memory):
        convolution = nn.Conv2d(64, 64, 3, padding=1, bias=False, device=device)
        convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        norm = nn.BatchNorm2d(64).to(device)
        images = torch.randn(8, 64, 32, 32, device=device).to(memory_format=torch.channels_last)
        output = norm(convolution(images)).relu()
        assert output.is_contiguous(memory_format=torch.channels_last)
        before = memory.memory_allocated()
        assert output.contiguous(memory_format=torch.channels_last) is output
        assert memory.memory_allocated() == before
        output.sum().backward()
        gradient = convolution.weight.grad
        assert gradient is not None
        assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_the_other_layout_is_a_copy() -> None:
    with on() as (device, memory):
        images = torch.randn(8, 64, 32, 32, device=device)
        before = memory.memory_allocated()
        copied = images.to(memory_format=torch.channels_last)
        assert memory.memory_allocated() - before == copied.numel() * 4


# Gradients


def test_gradients_that_are_zeroed_stay_and_those_set_to_none_go() -> None:
    with on() as (device, memory):
        layers = block(device)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        layers(torch.randn(ROWS, WIDTH, device=device)).sum().backward()
        held = memory.memory_allocated()
        optimizer.zero_grad(set_to_none=False)
        assert memory.memory_allocated() == held
        optimizer.zero_grad(set_to_none=True)
        assert held - memory.memory_allocated() == 2 * WEIGHT_BYTES


def test_zeroing_takes_no_scratch_and_a_next_backward_adds_in_place() -> None:
    """Accumulation: the new gradient exists next to the sum until it is added, one weight at a time."""
    peaks = []
    with on() as (device, memory):
        layers = block(device)
        for _ in range(3):
            memory.reset_peak_memory_stats()
            layers(torch.randn(ROWS, WIDTH, device=device)).sum().backward()
            peaks.append((memory.max_memory_allocated(), memory.memory_allocated()))
    first, *later = peaks
    assert {held for _, held in peaks} == {first[1]}, "one gradient a weight, however many micro-batches"
    assert len(set(later)) == 1
    assert later[0][0] - first[0] == 2 * WEIGHT_BYTES


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_norm_takes_norms_only(foreach: bool) -> None:
    with on() as (device, memory):
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, device=device)) for _ in range(6)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        before = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        norm = nn.utils.clip_grad_norm_(weights, 1.0, foreach=foreach)
        assert norm.device == device
        assert memory.max_memory_allocated() - before < MIB // 8


def test_a_grad_scaler_unscales_in_place_and_steps() -> None:
    with on() as (device, memory):
        layers = block(device)
        optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
        scaler = torch.amp.GradScaler(device.type)
        for _ in range(2):
            with torch.autocast(device.type, dtype=torch.float16):
                loss = layers(torch.randn(ROWS, WIDTH, device=device)).float().mean()
            scaler.scale(loss).backward()
            before = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            scaler.unscale_(optimizer)
            assert memory.max_memory_allocated() - before < MIB // 8
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert all(len(state) == 3 for state in optimizer.state.values()), "no step was skipped"


# Optimizers


@pytest.mark.parametrize(
    ("implementation", "copies"),
    [({"foreach": True}, 6), ({"foreach": False}, 3), ({"fused": True}, 0)],
    ids=["foreach", "for-loop", "fused"],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adams_scratch_by_implementation(kind: type[Any], implementation: dict[str, bool], copies: int) -> None:
    """In the loop: a square root and its quotient, and the quotient of the weight before, which a name still holds."""
    with on() as (device, memory):
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, device=device)) for _ in range(6)]
        optimizer = kind(weights, **implementation)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            before = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            optimizer.step()
        assert memory.memory_allocated() == before, "the second step makes no state"
        assert memory.max_memory_allocated() - before == pytest.approx(copies * WEIGHT_BYTES, abs=8192)


@pytest.mark.parametrize("implementation", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_sgd_with_momentum_updates_in_place(implementation: dict[str, bool]) -> None:
    with on() as (device, memory):
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, device=device)) for _ in range(6)]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, **implementation)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            before = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            optimizer.step()
        assert memory.max_memory_allocated() == before


# Attention on small chips


def _by(capability: tuple[int, int]) -> Profile:
    """A profile of an architecture under a torch that does not take cuDNN's kernel first."""
    return replace(profile_for("2.8.0", find_gpu("a100-80gb")), compute_capability=capability)


@pytest.mark.parametrize(
    ("capability", "width", "dropout", "kernel"),
    [
        ((8, 0), 224, 0.0, "flash"),
        ((8, 6), 192, 0.0, "flash"),
        ((8, 6), 200, 0.0, "efficient"),
        ((8, 9), 224, 0.0, "efficient"),
        ((8, 9), 256, 0.0, "flash"),
        ((8, 9), 256, 0.1, "efficient"),
        ((12, 0), 208, 0.0, "efficient"),
        ((9, 0), 208, 0.0, "flash"),
    ],
)
def test_wide_heads_are_not_trained_by_flash_on_small_chips(
    capability: tuple[int, int], width: int, dropout: float, kernel: str
) -> None:
    query = torch.empty(1, 4, 16, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert Attention(query, query, query, dropout_p=dropout).kernel(_by(capability)) == kernel
    with torch.no_grad():
        assert Attention(query, query, query, dropout_p=dropout).kernel(_by(capability)) == "flash"


def test_causal_attention_over_another_length_is_not_flashs() -> None:
    query = torch.empty(1, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(1, 4, 32, 64, dtype=torch.bfloat16, device="meta")
    assert Attention(query, key, key, is_causal=True).kernel(_by((8, 0))) == "efficient"
    assert Attention(query, key, key).kernel(_by((8, 0))) == "flash"


# Data


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_may_pin_what_it_loads(workers: int) -> None:
    with on() as (device, memory):
        data = TensorDataset(torch.arange(64.0).reshape(8, 8))
        loader = DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)
        before = memory.memory_allocated()
        batches = [batch.to(device, non_blocking=True) for (batch,) in loader]
        assert [batch.shape for batch in batches] == [(4, 8), (4, 8)]
        assert memory.memory_allocated() - before == 2 * 512
        assert F.relu(batches[0]).device == device
