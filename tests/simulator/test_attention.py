"""Which attention kernel CUDA would run, and what each keeps for backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.allocator.profile import Profile, profile_for
from gpumem_tui.simulator.device.attention import Attention, Kernel
from tests.simulator.simulated_steps import CUBLAS_WORKSPACE_BYTES, on

T4, V100, A100, H100 = (7, 5), (7, 0), (8, 0), (9, 0)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BATCH, HEADS, TOKENS, WIDTH = 2, 4, 128, 64
ROW_BYTES = BATCH * HEADS * TOKENS * 4
"""An fp32 figure a query row, as logsumexp is."""


def chosen(
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int = 64,
    value_width: int | None = None,
    mask: bool = False,
    grouped: bool = False,
) -> Kernel:
    query = torch.empty(1, 4, 16, width, dtype=dtype, device="meta")
    key = torch.empty(1, 2 if grouped else 4, 16, width, dtype=dtype, device="meta")
    value = torch.empty(1, 2 if grouped else 4, 16, value_width or width, dtype=dtype, device="meta")
    attn_mask = torch.empty(16, 16, dtype=torch.bool, device="meta") if mask else None
    profile = replace(profile_for("2.13.0", find_gpu("a100-80gb")), compute_capability=capability)
    return Attention(query, key, value, attn_mask, enable_gqa=grouped).kernel(profile)


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "kernel"),
    [
        (A100, BF16, 64, "flash"),
        (A100, FP16, 64, "flash"),
        (H100, BF16, 256, "cudnn"),
        (H100, BF16, 264, "efficient"),
        (A100, BF16, 257, "math"),
        (A100, BF16, 264, "efficient"),
        (A100, BF16, 50, "flash"),
        (A100, FP32, 64, "efficient"),
        (A100, FP32, 62, "math"),
        (A100, FP64, 64, "math"),
        (T4, FP16, 64, "efficient"),
        (T4, FP16, 60, "math"),
        (T4, FP32, 62, "efficient"),
        (T4, BF16, 64, "math"),
        (V100, FP16, 64, "efficient"),
    ],
)
def test_the_kernel_by_architecture_type_and_head(
    capability: tuple[int, int], dtype: torch.dtype, width: int, kernel: Kernel
) -> None:
    assert chosen(capability, dtype, width) == kernel


def test_masks_other_head_sizes_and_groups_leave_the_fused_kernels() -> None:
    assert chosen(A100, BF16, mask=True) == "efficient"
    assert chosen(A100, BF16, value_width=32) == "efficient"
    assert chosen(A100, BF16, grouped=True) == "flash"
    assert chosen(A100, FP32, grouped=True) == "math"


def test_what_the_user_disabled_is_not_chosen() -> None:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert chosen(A100, BF16) == "efficient"
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen(A100, BF16) == "math"
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match=r"No available kernel: torch\.float32 attention with a head size of 64"),
    ):
        chosen(A100, FP32)


def kept_bytes(backend: SDPBackend, *, causal: bool = False, mask: bool = False) -> int:
    """The memory that one call keeps: its output and backward's needs besides the inputs."""
    with on() as (device, memory):
        query, key, value = (
            torch.randn(BATCH, HEADS, TOKENS, WIDTH, device=device, dtype=BF16, requires_grad=True) for _ in range(3)
        )
        attn_mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device) if mask else None
        before: int = memory.memory_allocated()
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=causal)
        kept: int = memory.memory_allocated() - before
        output.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
        return kept


@pytest.mark.parametrize(
    ("backend", "state_bytes"),
    [
        (SDPBackend.FLASH_ATTENTION, 2 * 512),
        (SDPBackend.CUDNN_ATTENTION, 2 * 512),
        (SDPBackend.EFFICIENT_ATTENTION, 0),  # on the host
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_fused_kernels_keep_the_output_logsumexp_and_a_random_state(
    backend: SDPBackend, state_bytes: int, causal: bool
) -> None:
    output_bytes = BATCH * HEADS * TOKENS * WIDTH * 2
    assert kept_bytes(backend, causal=causal) == output_bytes + ROW_BYTES + state_bytes


def of(torch_version: str, gpu: str = "h200-141gb") -> Profile:
    return profile_for(torch_version, find_gpu(gpu))


def picked(profile: Profile, mask: torch.Tensor | None = None, **given: object) -> Kernel:
    """The kernel for heads in bf16, 64 wide, keys of as many tokens."""
    query = torch.empty(2, 4, 128, 64, dtype=BF16, device="meta", requires_grad=True)
    return Attention(query, query, query, mask, **given).kernel(profile)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("torch_version", "gpu", "kernel"),
    [
        ("2.8.0", "h200-141gb", "flash"),  # where it was asked for
        ("2.9.1", "h200-141gb", "cudnn"),  # newer than 9.9
        ("2.10.0+cu128", "h200-141gb", "flash"),  # newer than 9.15
        ("2.10.0+cu130", "h200-141gb", "cudnn"),
        ("2.11.0+cu128", "h200-141gb", "flash"),
        ("2.11.0+cu130", "h200-141gb", "cudnn"),
        ("2.13.0+cpu", "h200-141gb", "cudnn"),
        ("2.11.0+cu130", "b200-180gb", "cudnn"),
        ("2.11.0+cu130", "a100-80gb", "flash"),
        ("2.11.0+cu130", "rtx-pro-6000-96gb", "flash"),
    ],
)
def test_cudnn_comes_first_by_architecture_and_version(torch_version: str, gpu: str, kernel: Kernel) -> None:
    assert picked(of(torch_version, gpu)) == kernel


def test_cudnn_comes_last_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert picked(of("2.11.0+cu130")) == "flash"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert picked(of("2.11.0+cu130", "a100-80gb")) == "cudnn"


def test_what_cudnn_does_not_serve_goes_to_the_next() -> None:
    new, newest = of("2.11.0+cu130"), of("2.13.0")
    single = torch.empty(2, 4, 1, 64, dtype=BF16, device="meta")
    query, wide = (torch.empty(2, 4, 128, width, dtype=BF16, device="meta") for width in (64, 264))
    bias = torch.empty(2, 4, 128, 128, dtype=BF16, device="meta")
    assert picked(new, bias) == "cudnn"
    assert picked(new, bias.requires_grad_()) == "efficient"
    assert Attention(query, single, single).kernel(new) == "flash"
    assert Attention(wide, wide, wide).kernel(new) == "efficient"
    assert [picked(profile, dropout_p=0.1) for profile in (new, newest)] == ["cudnn", "flash"]
    assert picked(newest, dropout_p=0.125) == "cudnn"
    try:
        torch.use_deterministic_algorithms(True)
        assert picked(new) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_fused_kernel_reads_a_bias_by_columns() -> None:
    """T5's: an embedding of positions whose heads were its last dimension (an H200 kept all scores: 8.73 GiB)."""
    bias = torch.empty(1, 128, 128, 4, dtype=BF16, device="meta").permute(0, 3, 1, 2)
    assert picked(of("2.11.0+cu130"), bias) == "math"
    assert picked(of("2.11.0+cu130"), bias.contiguous()) == "cudnn"


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_a_boolean_mask_becomes_a_bias_of_the_querys_type(backend: SDPBackend) -> None:
    assert kept_bytes(backend, mask=True) - kept_bytes(backend) == TOKENS * TOKENS * 2


def test_the_math_kernel_keeps_the_scores() -> None:
    kept = kept_bytes(SDPBackend.MATH)
    assert kept - CUBLAS_WORKSPACE_BYTES >= BATCH * HEADS * TOKENS * TOKENS * 4


def test_a_head_that_flash_must_pad_gives_a_result_of_its_own_width() -> None:
    with on() as (device, _):
        query = torch.randn(1, 2, 16, 50, device=device, dtype=BF16, requires_grad=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = F.scaled_dot_product_attention(query, query, query)
        assert output.shape == query.shape
        output.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape


@pytest.mark.parametrize("dtype", [torch.bool, FP16, FP32])
def test_the_math_kernel_adds_its_mask_in_place(dtype: torch.dtype) -> None:
    """`attn.add_(*attn_mask)`: scores stay in their type, and there is one tensor of them until the softmax."""
    with on() as (device, _), sdpa_kernel(SDPBackend.MATH):
        gpu = torch.get_device_module(device)._gpu
        query = torch.randn(BATCH, HEADS, TOKENS, WIDTH, dtype=FP16, device=device, requires_grad=True)
        mask = torch.zeros(TOKENS, TOKENS, dtype=dtype, device=device)
        made = []
        for given in (None, mask):
            before = gpu.recorder.allocations
            result = F.scaled_dot_product_attention(query, query, query, attn_mask=given)
            scores = BATCH * HEADS * TOKENS * TOKENS * 4
            sizes = [gpu.recorder.size_bytes(number) for number in range(before + 1, gpu.recorder.allocations + 1)]
            made.append(sizes.count(scores))
        assert made[0] == made[1] > 0
        result.sum().backward()
        assert query.grad is not None
