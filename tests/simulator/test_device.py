"""PyTorch on the simulated GPU: what is on it, what that costs, and what happens when it is full."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.simulator.device.shapes import Untraceable
from tests.in_process import as_cuda
from tests.simulator.simulated_steps import CUBLAS_WORKSPACE_BYTES, on, simulated_gpu

KNOWN_KEYS = {
    f"{name}.{pool}.{figure}"
    for name in ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
    for pool in ("all", "small_pool", "large_pool")
    for figure in ("current", "peak", "allocated", "freed")
} | {"num_alloc_retries", "num_ooms"}
"""The part of `torch.cuda.memory_stats`' documented keys that concerns bytes and failures."""


# Tensors and their storages


def test_a_tensor_takes_memory_until_its_last_view_is_gone() -> None:
    with on() as (device, memory):
        tensor = torch.empty(1000, device=device)
        assert tensor.device == torch.device("simgpu", 0)
        assert memory.memory_allocated() == 4096
        view = tensor.view(10, 100)[2:5].T
        assert memory.memory_allocated() == 4096
        del tensor
        assert memory.memory_allocated() == 4096
        del view
        assert memory.memory_allocated() == 0
        assert memory.max_memory_allocated() == 4096


def test_allocations_and_releases_are_recorded_in_the_order_of_the_program() -> None:
    gpu = simulated_gpu()
    with simulate(gpu) as device:
        first = torch.empty(128, device=device)
        second = first * 2
        del first
        third = second.to(torch.float16)
        del second, third
    timeline = gpu.finish()
    assert timeline.events == (1, 2, -1, 3, -2, -3)
    assert timeline.sizes == (512, 512, 256)


def test_operations_in_place_take_nothing() -> None:
    with on() as (device, memory):
        tensor = torch.ones(1000, device=device)
        tensor.add_(1).mul_(tensor).zero_()
        tensor[:10].fill_(3)
        tensor.relu_()
        assert memory.max_memory_allocated() == 4096


def test_a_result_is_made_before_what_it_replaces_is_gone() -> None:
    with on() as (device, memory):
        tensor = torch.ones(1000, device=device)
        tensor = tensor + 1
        assert memory.memory_allocated() == 4096
        assert memory.max_memory_allocated() == 8192


def test_a_resized_storage_takes_its_new_size() -> None:
    with on() as (device, memory):
        tensor = torch.empty(128, device=device)
        tensor.resize_(1024)
        assert memory.memory_allocated() == 4096
        tensor.untyped_storage().resize_(0)
        assert memory.memory_allocated() == 0


def test_the_cpu_keeps_its_values_and_what_is_computed_from_weights_on_the_device_has_none() -> None:
    with on() as (device, memory):
        real = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        assert real.sum().item() == 15
        moved = real.to(device)
        assert memory.memory_allocated() == 512
        assert torch.equal(moved.cpu(), real)
        moved += torch.nn.Linear(3, 3, device=device)(moved).detach()[:2]
        assert moved.cpu().abs().max() < 1e-5
        assert real.sum().item() == 15
        into = torch.full((2, 3), 7.0)
        into.copy_(moved)
        assert into.abs().max() < 1e-5


def _computed(device: torch.device) -> torch.Tensor:
    """Three numbers that a model's weights have made, which nobody knows."""
    made: torch.Tensor = nn.Linear(3, 3, device=device)(torch.ones(3, device=device))
    return made.detach()


def test_unknown_values_read_back_are_nearly_zero_of_their_kind() -> None:
    with on() as (device, _):
        tensor = _computed(device)
        assert tensor.sum().item() == pytest.approx(0.0, abs=1e-5)
        assert tensor.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-5)
        assert (tensor > 0.5).any().item() is False
        assert isinstance(tensor.long().sum().item(), int)
        assert f"loss {tensor.sum():.3f}" == "loss 0.000"
        assert "simgpu" in f"{tensor}"


@pytest.mark.parametrize(
    "convert",
    [
        lambda module, device: module.to(device),
        lambda module, device: module.to(device, torch.bfloat16),
        lambda module, device: module.to(device).bfloat16(),
        lambda module, device: copy.deepcopy(module.to(device)),
    ],
    ids=["to device", "to device and dtype", "to device, then dtype", "deep copy"],
)
def test_a_module_built_on_the_cpu_trains_once_moved(convert: Callable[[nn.Module, torch.device], nn.Module]) -> None:
    with on() as (device, _):
        model = convert(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)), device)
        optimizer = torch.optim.AdamW(model.parameters())
        dtype = next(model.parameters()).dtype
        F.cross_entropy(model(torch.randn(5, 8, dtype=dtype).to(device)), torch.zeros(5).long().to(device)).backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.device.type == "simgpu"
            assert parameter.grad is not None
            assert parameter.grad.dtype == dtype
            assert parameter in optimizer.state


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_a_module_built_on_the_device_changes_its_type(change: Callable[[nn.Module], nn.Module]) -> None:
    with on() as (device, _):
        layer = nn.Linear(8, 16, device=device)
        weight = layer.weight
        layer.weight.sum().backward()
        change(layer)
        assert layer.weight is weight, "an optimizer made before still knows it"
        assert weight.dtype != torch.float32
        assert weight.grad is not None
        assert weight.grad.dtype == weight.dtype


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (lambda tensor: tensor.nonzero(), (3, 1)),
        (lambda tensor: tensor[tensor > 0], (3,)),
        (lambda tensor: tensor.unique(), (3,)),
        (lambda tensor: torch.masked_select(tensor, tensor > 0), (3,)),
    ],
    ids=["nonzero", "mask", "unique", "masked_select"],
)
def test_a_shape_that_depends_on_values_is_the_largest_that_it_can_be(
    operation: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    with on() as (device, _):
        assert operation(_computed(device)).shape == shape


def test_a_shape_that_depends_on_values_without_a_bound_is_refused_by_name() -> None:
    with on() as (device, _), pytest.raises(Untraceable) as caught:
        torch.repeat_interleave(_computed(device).long())
    assert str(caught.value).startswith("aten.repeat_interleave")
    assert "\n" not in str(caught.value)


def test_writing_through_a_mask_needs_no_values() -> None:
    with on() as (device, _):
        tensor = _computed(device)
        tensor[tensor > 0] = 0
        assert torch.where(tensor > 0, tensor, 0).shape == (3,)


def test_a_product_may_be_of_a_wider_type_than_its_factors() -> None:
    """As Liger's loss adds the gradient of a head up in 32 bits: nothing is made next to what is given."""
    with on() as (device, cuda):
        left, right = (torch.ones(64, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
        total = torch.zeros(64, 64, device=device)
        made = torch.addmm(total, left, right, out_dtype=torch.float32)
        assert made.dtype == torch.float32
        before = cuda.memory_allocated()
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        torch.mm(left, right, out_dtype=torch.float32, out=total)
        assert cuda.memory_allocated() == before


# The device's own figures


def test_memory_statistics_have_the_names_that_torch_cuda_has() -> None:
    with on() as (device, memory):
        torch.empty(1000, device=device)
        stats = memory.memory_stats()
        assert stats.keys() <= KNOWN_KEYS
        assert stats["allocated_bytes.all.peak"] == 4096
        assert stats["reserved_bytes.all.current"] == 2 * MIB


def test_the_driver_reports_what_context_and_allocator_leave() -> None:
    with on() as (device, memory):
        free, total = memory.mem_get_info()
        gpu = find_gpu("a100-80gb")
        assert total == gpu.cuda_total_bytes
        assert 0 < total - free < GIB, "the CUDA context"
        torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        assert memory.mem_get_info()[0] == free - 64 * MIB
        assert memory.memory_reserved() == 64 * MIB
        memory.empty_cache()
        assert memory.mem_get_info()[0] == free
        assert memory.max_memory_reserved() == 64 * MIB
        memory.reset_peak_memory_stats()
        assert memory.max_memory_reserved() == 0


def test_the_device_is_the_gpu_it_simulates() -> None:
    with on("t4-16gb") as (device, memory):
        properties = memory.get_device_properties(device)
        assert properties.total_memory == find_gpu("t4-16gb").cuda_total_bytes
        assert (properties.major, properties.minor) == (7, 5)


@pytest.mark.parametrize("module", [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator])
def test_the_device_module_takes_the_keywords_of_torch(module: ModuleType) -> None:
    functions = {
        name: inspect.signature(found)
        for name, found in vars(module).items()
        if inspect.isfunction(found) and not name.startswith("_") and found.__module__.startswith("torch.")
    }
    assert len(functions) > 5
    with as_cuda(simulated_gpu()):
        for name, signature in functions.items():
            keywords = [one.name for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
            try:
                inspect.signature(getattr(module, name)).bind(**dict.fromkeys(keywords))
            except TypeError as error:
                pytest.fail(f"{module.__name__}.{name}: {error}")


def test_figures_without_a_simulated_gpu_are_refused() -> None:
    with on() as (_, memory):
        pass
    with pytest.raises(RuntimeError, match="no simulated GPU is active"):
        memory.memory_allocated()


# Out of memory


def test_out_of_memory_in_forward_leaves_the_process_able_to_go_on() -> None:
    with on() as (device, memory):
        held = torch.empty(70 * GIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 70\.00 GiB") as caught:
            torch.empty(70 * GIB, dtype=torch.uint8, device=device)
        assert str(caught.value).startswith(
            "CUDA out of memory. Tried to allocate 70.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 8.66 "
            "GiB is free. Including non-PyTorch memory, this process has 70.49 GiB memory in use. Of the allocated "
            "memory 70.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
        )
        assert "\n" not in str(caught.value)
        assert memory.memory_stats()["num_ooms"] == 1
        del held
        torch.empty(70 * GIB, dtype=torch.uint8, device=device)


def test_cached_segments_are_released_before_memory_is_out() -> None:
    with on() as (device, memory):
        del_me = torch.empty(30 * GIB, dtype=torch.uint8, device=device)
        del del_me
        assert memory.memory_reserved() == 30 * GIB
        held = torch.empty(70 * GIB, dtype=torch.uint8, device=device)
        assert memory.memory_reserved() == held.numel()
        assert memory.memory_stats()["num_alloc_retries"] == 1


def test_out_of_memory_in_backward_is_raised_where_backward_returns() -> None:
    with on() as (device, memory):
        layer = nn.Linear(64, 2**20, device=device, bias=False)
        output = layer(torch.randn(2**13, 64, device=device))
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.00 GiB"):
            (output * output).sum().backward()
        del output
        assert layer(torch.randn(8, 64, device=device)).shape == (8, 2**20)
        memory.empty_cache()
        layer(torch.randn(8, 64, device=device)).sum().backward()


def test_what_follows_an_out_of_memory_in_backward_is_not_recorded() -> None:
    gpu = simulated_gpu()
    with simulate(gpu) as device:
        layer = nn.Linear(64, 2**20, device=device, bias=False)
        output = layer(torch.randn(2**13, 64, device=device))
        with pytest.raises(torch.OutOfMemoryError):
            (output * output).sum().backward()
        recorded = gpu.finish(failed=True)
        del output
        torch.empty(100, device=device)
    assert gpu.finish(failed=True).events == recorded.events
    assert max(recorded.sizes) == 32 * GIB


def test_a_limit_on_reserved_memory_is_kept() -> None:
    with on(limit_bytes=10 * GIB) as (device, memory):
        torch.empty(9 * GIB, dtype=torch.uint8, device=device)
        memory.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(11 * GIB, dtype=torch.uint8, device=device)


def test_an_unlimited_device_is_never_full() -> None:
    gpu = simulated_gpu(unlimited=True)
    with simulate(gpu) as device:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
        free, total = torch.get_device_module(device).mem_get_info()
    assert gpu.allocator.stats.num_ooms == 0
    assert (free, total) == (0, gpu.gpu.cuda_total_bytes)


def test_a_traced_device_is_full_as_often_as_it_is_to_be_and_then_has_no_end() -> None:
    shape = find_gpu("a100-80gb")
    gpu = SimulatedGpu(shape, profile_for(torch.__version__, shape), unlimited=True, ooms=1)
    with simulate(gpu) as device:
        held = torch.empty(70 * GIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10 * GIB, dtype=torch.uint8, device=device)
        more = torch.empty(10 * GIB, dtype=torch.uint8, device=device)
    assert held.numel() + more.numel() == gpu.allocator.stats.allocated_bytes == 80 * GIB


# Kernels


def test_the_forward_and_the_autograd_thread_have_a_cublas_workspace_each() -> None:
    with on() as (device, memory):
        weight = torch.randn(8, 8, device=device, requires_grad=True)
        before = memory.memory_allocated()
        loss = (weight @ weight).sum()
        after_forward = memory.memory_allocated()
        loss.backward()
        del loss
        weight.grad = None
        assert after_forward - before == CUBLAS_WORKSPACE_BYTES + 512
        assert memory.memory_allocated() - before == 2 * CUBLAS_WORKSPACE_BYTES


def test_dropout_keeps_one_byte_an_element_for_its_mask() -> None:
    with on() as (device, memory):
        inputs = torch.randn(MIB, device=device, requires_grad=True)
        before = memory.memory_allocated()
        output = F.dropout(inputs, 0.1)
        assert memory.memory_allocated() - before == output.numel() * (4 + 1)


@pytest.mark.parametrize("pinned", [True, False])
def test_activations_saved_on_the_host_have_no_data_there(pinned: bool) -> None:
    gpu = simulated_gpu()
    with as_cuda(gpu):
        saved = torch.autograd.graph.save_on_cpu(pin_memory=pinned)
        activations = torch.randn(2**18, device="cuda")
        numbers = torch.arange(2**18, device="cpu")
        packed, indices = saved.pack_hook(activations), saved.pack_hook(numbers.cuda())
        del activations
        assert gpu.allocator.stats.allocated_bytes == 0
        assert type(packed[1]) is torch.Tensor
        assert packed[1].device.type == "cpu"
        assert torch.equal(indices[1], numbers), "from which shapes may follow"
        back = saved.unpack_hook(packed)
        assert gpu.allocator.stats.allocated_bytes == back.nbytes == 2**20


def test_pinned_memory_of_the_host_can_be_copied_to_the_device() -> None:
    gpu = simulated_gpu()
    with simulate(gpu) as device:
        moved = torch.ones(256).pin_memory().to(device, non_blocking=True)
        assert gpu.allocator.stats.allocated_bytes == 1024
        assert moved.device == device


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x,
        lambda x: x[3:, 5:],
        lambda x: x.t(),
        lambda x: x.expand(2, *x.shape),
        lambda x: x.flip(0),
        torch._neg_view,
        lambda x: x[:0],
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int32])
def test_values_copied_to_the_device_are_those_of_that_moment(
    look: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None
) -> None:
    with on() as (device, _):
        array = torch.arange(300.0).reshape(20, 15).numpy()
        source = look(torch.from_numpy(array))
        wanted = source.to(dtype, copy=True)
        moved, into = source.to(device, dtype), torch.empty_like(wanted, device=device).copy_(source)
        array[:] = -1  # through numpy, of which torch hears nothing
        assert torch.equal(moved.cpu(), wanted)
        assert torch.equal(into.cpu(), wanted)


def test_what_is_to_be_worked_out_later_keeps_no_memory_of_the_device() -> None:
    gpu = simulated_gpu()
    with simulate(gpu) as device:
        places = torch.arange(5000, device=device)
        mask = places[:, None] >= places[None]
        others = ~mask
        both = gpu.allocator.stats.requested_bytes
        del mask
        assert both - gpu.allocator.stats.requested_bytes == 5000 * 5000
        assert int(others.sum()) == 5000 * 4999 // 2
