"""Apex's optimizers and normalizations, stood in for: what they keep and take, in bytes that are counted by hand."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

from gpumem_tui.simulator.standins.register import named
from tests.simulator.test_standins import FLOAT, HALF, made, stood_in

ROWS, WIDTH = 4096, 2048


@pytest.mark.parametrize(
    ("name", "dtype", "kept"),
    [
        ("FusedAdam", torch.bfloat16, 2 * FLOAT),
        ("FusedAdam", torch.float32, 2 * FLOAT),
        ("FusedLAMB", torch.float16, 2 * HALF),
        ("FusedSGD", torch.float32, FLOAT),
        ("FusedNovoGrad", torch.float16, HALF),
        ("FusedAdagrad", torch.float32, FLOAT),
    ],
)
def test_state_is_kept_in_its_type(name: str, dtype: torch.dtype, kept: int) -> None:
    with stood_in() as gpu:
        optimizers = importlib.import_module("apex.optimizers")
        weight = torch.nn.Parameter(torch.randn(ROWS, WIDTH, device="cuda").to(dtype))
        optimizer = getattr(optimizers, name)([weight], lr=0.1)
        for step in range(2):
            weight.grad = torch.ones_like(weight)
            before, first = gpu.allocator.stats.allocated_bytes, gpu.recorder.allocations
            optimizer.step()
            if not step:
                grown = gpu.allocator.stats.allocated_bytes - before
        later = made(gpu, first)
        optimizer.zero_grad()
        assert weight.grad is None
    flags = 2 * 512  # of NovoGrad, which keeps its norms in the group
    assert kept * ROWS * WIDTH <= grown <= kept * ROWS * WIDTH + flags
    assert all(size < ROWS * WIDTH for size in later), "a later step takes nothing of the size of a weight"
    assert named("apex").note in gpu.notes


def test_masters_are_kept_where_they_are_asked_for() -> None:
    with stood_in() as gpu:
        fused_adam = importlib.import_module("apex.optimizers").FusedAdam
        weight = torch.nn.Parameter(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.float16))
        with pytest.raises(RuntimeError, match="only supported with the capturable version"):
            fused_adam([weight], master_weights=True)
        before = gpu.allocator.stats.allocated_bytes
        optimizer = fused_adam([weight], capturable=True, master_weights=True)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        grown = gpu.allocator.stats.allocated_bytes - before - weight.grad.nbytes
    assert 0 <= grown - 3 * FLOAT * ROWS * WIDTH <= 8 * 512


def test_lamb_takes_norms_by_block_and_by_tensor() -> None:
    with stood_in() as gpu:
        optimizer_of = importlib.import_module("apex.optimizers").FusedLAMB
        weight = torch.nn.Parameter(torch.randn(ROWS, WIDTH, device="cuda"))
        optimizer = optimizer_of([weight])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        before = gpu.recorder.allocations
        optimizer.step()
        sizes = made(gpu, before)
    blocks, each = 320 * FLOAT, math.ceil(ROWS * WIDTH / 65536) * FLOAT
    of_all = [blocks, FLOAT]
    by_tensor = [blocks, each, FLOAT, FLOAT]
    assert sizes == [FLOAT, FLOAT, *of_all, *of_all, *by_tensor, *by_tensor]


@pytest.mark.parametrize("keeps_output", [False, True])
@pytest.mark.parametrize(("name", "statistics", "parameters"), [("FusedLayerNorm", 2, 2), ("FusedRMSNorm", 1, 1)])
def test_a_normalization_keeps_its_input_or_its_output(
    name: str, statistics: int, parameters: int, keeps_output: bool
) -> None:
    with stood_in() as gpu:
        norm = getattr(importlib.import_module("apex.normalization"), name)(WIDTH, memory_efficient=keeps_output).cuda()
        values = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        norm.to(torch.bfloat16)
        before, first = gpu.allocator.stats.allocated_bytes, gpu.recorder.allocations
        scaled = values * 2
        out = norm(scaled)
        del scaled
        kept = gpu.allocator.stats.allocated_bytes - before
        assert made(gpu, first) == [*2 * [ROWS * WIDTH * HALF], *statistics * [ROWS * FLOAT]]
        gradient = torch.ones_like(out)
        first = gpu.recorder.allocations
        out.backward(gradient)
        sizes = [size for size in made(gpu, first) if size != ROWS * FLOAT]  # gradients of the statistics, as zeros
    kept_tensors = 1 if keeps_output else 2
    kept_statistics = 1 if keeps_output else statistics
    assert kept == kept_tensors * ROWS * WIDTH * HALF + kept_statistics * ROWS * FLOAT
    scratch = parameters * [16 * WIDTH * FLOAT]
    assert sizes[: 1 + 2 * parameters] == [ROWS * WIDTH * HALF, *parameters * [WIDTH * HALF], *scratch]
    assert values.grad is not None


def test_autocast_casts_what_is_normalized_and_mixed_ones_give_the_weights_type() -> None:
    with stood_in():
        normalization = importlib.import_module("apex.normalization")
        values = torch.randn(ROWS, WIDTH, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert normalization.FusedLayerNorm(WIDTH).cuda()(values).dtype == torch.bfloat16
        assert normalization.MixedFusedRMSNorm(WIDTH).cuda()(values.bfloat16()).dtype == torch.float32
        assert normalization.FusedLayerNorm(WIDTH)(torch.randn(2, WIDTH)).is_cpu


def test_what_apex_no_longer_has_says_what_to_use() -> None:
    with stood_in(), pytest.raises(ImportError, match=r"use torch.autocast and torch.amp.GradScaler"):
        importlib.import_module("apex.amp")


@pytest.mark.parametrize(
    "asks",
    [
        "try:\n    import apex\nexcept ImportError:\n    apex = None\nfound = apex is not None\n",
        "import importlib.util\nfound = importlib.util.find_spec('apex') is not None\n",
    ],
)
def test_a_library_that_goes_on_without_it_does_so(asks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own import of it is stood in for; a library's, which takes it where it is there, is not."""
    libraries = tmp_path / "site-packages"
    libraries.mkdir()
    for folder, name in ((libraries, "asking_library"), (tmp_path, "asking_program")):
        (folder / f"{name}.py").write_text(asks)
        monkeypatch.syspath_prepend(str(folder))
    with stood_in():
        assert not importlib.import_module("asking_library").found
        assert importlib.import_module("asking_program").found
