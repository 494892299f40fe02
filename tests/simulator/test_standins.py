"""Stand-ins by shape: what they make, in bytes that are counted by hand, and who finds them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.simulator.standins.register import STAND_INS, named, offered
from tests.in_process import as_cuda
from tests.simulator.simulated_steps import simulated_gpu

HALF, FLOAT, LONG = 2, 4, 8


@contextmanager
def stood_in(name: str = "a100-80gb") -> Iterator[SimulatedGpu]:
    """A simulated GPU with the stand-ins, which are forgotten at the end."""
    gpu = simulated_gpu(name, unlimited=True)
    before = set(sys.modules)
    with as_cuda(gpu), offered():
        yield gpu
    tops = {name.partition(".")[0] for one in STAND_INS for name in (*one.layer, *one.compiled)}
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in tops:
            del sys.modules[module]


def made(gpu: SimulatedGpu, before: int = 0) -> list[int]:
    """The sizes of all allocations after the first `before`."""
    return list(gpu.finish().sizes[before:])


def attended(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("width", [64, 60])
def test_flash_attention_makes_what_its_source_makes(width: int) -> None:
    batch, tokens, heads, groups = 64, 300, 8, 2
    with stood_in() as gpu:
        flash_attn = importlib.import_module("flash_attn")
        query, key, value = (
            attended(batch, tokens, heads, width),
            *(attended(batch, tokens, groups, width) for _ in range(2)),
        )
        before = gpu.recorder.allocations
        out = flash_attn.flash_attn_func(query, key, value, causal=True)
        forward = made(gpu, before)
        gradient = torch.ones_like(out, memory_format=torch.contiguous_format)
        before = gpu.recorder.allocations
        out.backward(gradient)
        backward = made(gpu, before)
    assert out.shape == query.shape
    assert query.grad is not None
    rows = batch * tokens
    of_queries, of_keys = rows * heads * 64 * HALF, rows * groups * 64 * HALF
    pads = [of_queries, of_keys, of_keys] if width < 64 else []
    assert forward == [*pads, of_queries, rows * heads * FLOAT, 2 * LONG]
    padded_rows = batch * 384
    scratch = [padded_rows * heads * FLOAT, padded_rows * heads * 64 * FLOAT, of_queries, of_queries]
    results = [of_queries, of_keys, of_keys]
    assert backward[: len(results) + len(pads[:1]) + 4] == [*results, *pads[:1], *scratch]
    assert named("flash-attn").note in gpu.notes


def test_few_queries_split_their_keys() -> None:
    """`num_splits_heuristic`: 1 × 4 heads × 2 blocks of rows on 216 halves of processors, 16 blocks of 128 keys."""
    with stood_in() as gpu:
        flash_attn = importlib.import_module("flash_attn")
        query, key, value = (attended(1, tokens, 4, 128) for tokens in (128, 2048, 2048))
        before = gpu.recorder.allocations
        flash_attn.flash_attn_func(query, key, value)
        rows = 128 * 4
        assert made(gpu, before) == [
            rows * 128 * HALF, rows * FLOAT, 16 * rows * FLOAT, 16 * rows * 128 * FLOAT, 2 * LONG
        ]  # fmt: skip


def test_what_real_kernels_refuse_is_refused() -> None:
    with stood_in():
        flash_attn = importlib.import_module("flash_attn")
        with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
            flash_attn.flash_attn_func(*(torch.randn(1, 8, 2, 64, device="cuda") for _ in range(3)))
        with pytest.raises(RuntimeError, match="must be on CUDA device"):
            flash_attn.flash_attn_func(*(torch.randn(1, 8, 2, 64, dtype=torch.float16) for _ in range(3)))
    with stood_in("t4-16gb"):
        flash_attn = importlib.import_module("flash_attn")
        with pytest.raises(RuntimeError, match="Ampere"):
            flash_attn.flash_attn_func(*(attended(1, 8, 2, 64) for _ in range(3)))


def test_metadata_is_found_while_it_is_offered_alone() -> None:
    absent = [one for one in STAND_INS if not one.is_installed]
    with offered():
        for one in absent:
            assert importlib.metadata.version(one.package) == one.version
            top = next(iter(one.layer))
            spec = importlib.util.find_spec(top)
            assert spec is not None
            assert one.package in importlib.metadata.packages_distributions()[top]
            assert all(importlib.util.find_spec(name) is not None for name in one.compiled)
    for one in absent:
        assert importlib.util.find_spec(next(iter(one.layer))) is None
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(one.package)


def test_every_name_of_the_register_is_there() -> None:
    with stood_in():
        for one in STAND_INS:
            for name, words in {**one.compiled, **({} if one.is_installed else one.layer)}.items():
                module = importlib.import_module(name)
                missing = [word for word in words.split() if not hasattr(module, word.partition("=")[0])]
                assert missing == [], name


def test_the_package_itself_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A Python part that is installed is used; what it imports of machine code is stood in for."""
    package = tmp_path / "flash_attn"  # type: ignore[operator]
    package.mkdir()
    (package / "__init__.py").write_text("import flash_attn_2_cuda\nowner = 'installed'\n")
    code = (
        "import sys\n"
        "from gpumem_tui.simulator.standins.register import offered\n"
        "with offered():\n"
        "    import flash_attn, flash_attn_2_cuda\n"
        "print(flash_attn.owner, flash_attn_2_cuda.fwd.__module__)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["installed", "gpumem_tui.simulator.standins.flash_attn"]
