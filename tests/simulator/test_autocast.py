"""Mixed precision on the simulated GPU is CUDA's: which operation runs in which type, and what casts cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.simulator.simulated_steps import CUBLAS_WORKSPACE_BYTES, on

HALF = torch.bfloat16
Operation = Callable[[Tensor], Tensor]

LOWERED: dict[str, Operation] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
}
RAISED: dict[str, Operation] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "sum": torch.sum,
    "norm": lambda x: x.norm(),
    "pow": lambda x: x.pow(2),
    "exp": torch.exp,
}
KEPT: dict[str, Operation] = {
    "add": lambda x: x + x,
    "gelu": F.gelu,
    "relu": F.relu,
    "mean": torch.mean,
    "embedding": lambda x: F.embedding(torch.zeros(2, dtype=torch.long, device=x.device), x),
}


def every(operations: dict[str, Operation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", operations.values(), ids=operations.keys())


@every(LOWERED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_run_in_the_lower_precision(operation: Operation, dtype: torch.dtype) -> None:
    with on() as (device, _), torch.autocast(device.type, dtype=dtype):
        assert operation(torch.randn(8, 8, device=device)).dtype == dtype


@every(RAISED)
def test_losses_and_normalization_run_in_fp32(operation: Operation) -> None:
    with on() as (device, _), torch.autocast(device.type, dtype=HALF):
        assert operation(torch.randn(8, 8, device=device, dtype=HALF)).dtype == torch.float32


@every(KEPT)
def test_the_rest_keeps_its_type(operation: Operation) -> None:
    with on() as (device, _), torch.autocast(device.type, dtype=HALF):
        for dtype in (HALF, torch.float32):
            assert operation(torch.randn(8, 8, device=device, dtype=dtype)).dtype == dtype


def test_mixed_types_are_promoted_to_the_wider() -> None:
    with on() as (device, _), torch.autocast(device.type, dtype=HALF):
        full, half = torch.randn(4, device=device), torch.randn(4, device=device, dtype=HALF)
        assert torch.cat([full, half]).dtype == torch.float32
        assert torch.dot(full, half).dtype == torch.float32
        assert torch.dot(half, half).dtype == HALF


def test_doubles_and_integers_are_left_alone() -> None:
    with on() as (device, _), torch.autocast(device.type, dtype=HALF):
        double = torch.randn(4, 4, device=device, dtype=torch.float64)
        assert (double @ double).dtype == torch.float64
        assert torch.arange(4, device=device).add(1).dtype == torch.int64


def test_nothing_is_cast_outside_of_the_context() -> None:
    with on() as (device, _):
        tensor = torch.randn(4, 4, device=device)
        with torch.autocast(device.type, dtype=HALF):
            pass
        assert (tensor @ tensor).dtype == torch.float32
        with torch.autocast(device.type, dtype=HALF), torch.autocast(device.type, enabled=False):
            assert (tensor @ tensor).dtype == torch.float32


def test_a_weight_is_cast_once_a_context_and_the_copy_lives_until_its_exit() -> None:
    with on() as (device, memory):
        layer = nn.Linear(1024, 1024, bias=False, device=device)
        inputs = torch.randn(1, 1024, device=device, dtype=HALF)
        before = memory.memory_allocated()
        with torch.autocast(device.type, dtype=HALF):
            with torch.no_grad():
                layer(inputs)
            once = memory.memory_allocated()
            with torch.no_grad():
                layer(inputs)
            assert memory.memory_allocated() == once
            assert once - before == 2 * layer.weight.numel() + CUBLAS_WORKSPACE_BYTES
        assert memory.memory_allocated() == before + CUBLAS_WORKSPACE_BYTES


def test_the_cache_can_be_turned_off() -> None:
    with on() as (device, memory):
        layer = nn.Linear(1024, 1024, bias=False, device=device)
        inputs = torch.randn(1, 1024, device=device, dtype=HALF)
        before = memory.memory_allocated()
        with torch.autocast(device.type, dtype=HALF, cache_enabled=False), torch.no_grad():
            layer(inputs)
            assert memory.memory_allocated() - before == CUBLAS_WORKSPACE_BYTES


def test_gradients_arrive_at_the_fp32_weights() -> None:
    with on() as (device, _):
        layer = nn.Linear(8, 8, device=device)
        with torch.autocast(device.type, dtype=HALF):
            loss = (layer(torch.randn(4, 8, device=device)) + layer(torch.randn(4, 8, device=device))).sum()
        loss.backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype == torch.float32
            assert parameter.grad.device.type == "simgpu"


def test_a_gradient_scaler_steps_the_optimizer() -> None:
    with on() as (device, _):
        layer = nn.Linear(8, 8, device=device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device.type)
        with torch.autocast(device.type, dtype=torch.float16):
            loss = layer(torch.randn(4, 8, device=device)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert set(optimizer.state) == set(layer.parameters()), "the step was not skipped"
