"""Stand-ins by shape: what they make, in bytes that are counted by hand, and who finds them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch

from gpumem_tui.run.session import IMPORT_TORCH
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.simulator.standins.register import STAND_INS, named, offered
from tests.in_process import as_cuda, world
from tests.simulator.simulated_steps import simulated_gpu

HALF, FLOAT, LONG = 2, 4, 8


@contextmanager
def stood_in(name: str = "a100-80gb") -> Iterator[SimulatedGpu]:
    """A simulated GPU with the stand-ins, which are forgotten at the end."""
    gpu = simulated_gpu(name, unlimited=True)
    before = set(sys.modules)
    try:
        with as_cuda(gpu), offered():
            yield gpu
    finally:
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


@pytest.mark.parametrize("packed", [1, 2, 3])
def test_samples_one_after_the_other_have_rows_to_spare(packed: int) -> None:
    """`mha_varlen_bwd`: 128 rows more a sample; gradients of what is packed are one tensor."""
    tokens, samples, heads, width = 2000, 5, 4, 128
    each = tokens * heads * width * HALF
    with stood_in() as gpu:
        flash_attn = importlib.import_module("flash_attn")
        ends = torch.tensor([0, 300, 700, 900, 1500, 2000], dtype=torch.int32).cuda()
        function, given = {
            1: (flash_attn.flash_attn_varlen_qkvpacked_func, [attended(tokens, 3, heads, width)]),
            2: (
                flash_attn.flash_attn_varlen_kvpacked_func,
                [attended(tokens, heads, width), attended(tokens, 2, heads, width)],
            ),
            3: (flash_attn.flash_attn_varlen_func, [attended(tokens, heads, width) for _ in range(3)]),
        }[packed]
        lengths = (ends, 600) if packed == 1 else (ends, ends, 600, 600)
        before = gpu.recorder.allocations
        out = function(*given, *lengths, dropout_p=0.1, causal=True)
        assert made(gpu, before) == [each, tokens * heads * FLOAT, 2 * LONG]
        gradient = torch.ones_like(out, memory_format=torch.contiguous_format)
        before = gpu.recorder.allocations
        out.backward(gradient)
        rows = tokens + 128 * samples
        results = {1: [3 * each], 2: [each, 2 * each], 3: [each] * 3}[packed]
        assert made(gpu, before) == [*results, rows * heads * FLOAT, rows * heads * width * FLOAT]
    assert [one.grad.shape for one in given if one.grad is not None] == [one.shape for one in given]


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_3_makes_what_its_source_makes(causal: bool) -> None:
    """hopper/flash_api.cpp: on an H100 a block of backward has 64 rows, 80 without a mask, and 128 keys (128 wide)."""
    batch, tokens, heads, groups, width = 2, 1000, 8, 2, 128
    with stood_in("h100-80gb") as gpu:
        function = importlib.import_module("flash_attn_interface").flash_attn_func
        query = attended(batch, tokens, heads, width)
        key, value = (attended(batch, tokens, groups, width) for _ in range(2))
        before = gpu.recorder.allocations
        out = function(query, key, value, causal=causal)
        of_queries, of_keys = query.nbytes, key.nbytes
        assert made(gpu, before) == [of_queries, batch * heads * tokens * FLOAT, *([4] if causal else [])]
        gradient = torch.ones_like(out)
        before = gpu.recorder.allocations
        out.backward(gradient)
        rows, keys = (1024, 1024) if causal else (1040, 1024)
        figures, accumulator = batch * heads * rows * FLOAT, batch * groups * keys * width * FLOAT
        blocks = rows // (64 if causal else 80)
        assert made(gpu, before) == [
            of_queries, of_keys, of_keys, figures, figures, figures * width, accumulator, accumulator,
            blocks * batch * heads * 4,
        ]  # fmt: skip


def test_a_sum_in_order_has_an_accumulator_for_each_of_its_parts() -> None:
    """`mha_bwd`, deterministic: 108 processors over 8 heads make 14."""
    with stood_in() as gpu:
        flash_attn = importlib.import_module("flash_attn")
        out = flash_attn.flash_attn_func(*(attended(2, 256, 4, 64) for _ in range(3)), deterministic=True)
        gradient = torch.ones_like(out)
        before = gpu.recorder.allocations
        out.backward(gradient)
        assert 14 * 2 * 256 * 4 * 64 * FLOAT in made(gpu, before)


def test_a_padded_batch_is_unpadded_and_padded_again() -> None:
    batch, tokens, width = 4, 64, 256
    with stood_in() as gpu:
        padding = importlib.import_module("flash_attn.bert_padding")
        mask = torch.ones(batch, tokens, dtype=torch.int64)
        mask[1, 32:] = 0
        states = attended(batch, tokens, width)
        kept, indices, ends, longest, lengths = padding.unpad_input(states, mask.cuda())
        assert (kept.shape, indices.shape, ends.shape, longest) == ((224, width), (224,), (5,), 64)
        assert lengths.shape == (batch,)
        before = gpu.recorder.allocations
        padding.pad_input(kept, indices, batch, tokens).sum().backward()
        assert batch * tokens * width * HALF in made(gpu, before)
    assert states.grad is not None


def test_rows_of_all_ranks_are_gathered() -> None:
    """As trainers import it, OpenRLHF's for one, next to einops' names; backward keeps this rank's rows."""
    with world(2), stood_in() as gpu:
        gather = importlib.import_module("flash_attn.utils.distributed").all_gather
        rows = attended(1024, 8)
        before = gpu.recorder.allocations
        gathered = gather(rows, None)
        gathered.backward(gathered)
        assert made(gpu, before) == [2 * 1024 * 8 * HALF, 1024 * 8 * HALF]
        assert rows.grad is not None
        assert rows.grad.shape == rows.shape
        assert hasattr(importlib.import_module("flash_attn.bert_padding"), "rearrange")


def test_the_package_has_its_losses_norms_and_rotary_embeddings() -> None:
    rows, classes, width = 512, 1000, 256
    with stood_in() as gpu:
        losses = importlib.import_module("flash_attn.losses.cross_entropy")
        labels = torch.zeros(rows, dtype=torch.int64, device="cuda")
        for in_place in (False, True):
            logits = attended(rows, classes) * 2
            before = gpu.recorder.allocations
            loss = losses.CrossEntropyLoss(inplace_backward=in_place)(logits, labels)
            assert made(gpu, before)[:3] == [rows * FLOAT] * 3
            before = gpu.recorder.allocations
            loss.backward()
            gradients = made(gpu, before).count(rows * classes * HALF)
            assert gradients == (1 if in_place else 2), "that of the logits takes their place, the leaf's does not"
        norm = importlib.import_module("flash_attn.ops.triton.layer_norm").RMSNorm(width, device="cuda")
        states = torch.randn(8, 16, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = gpu.recorder.allocations
        out, total = norm(states, residual=states.detach(), prenorm=True)
        assert made(gpu, before) == [128 * width * HALF] * 2 + [128 * FLOAT]
        before = gpu.recorder.allocations
        (out + total).sum().backward()
        assert 8 * 108 * width * FLOAT in made(gpu, before), "a partial gradient of each program"
        rotary = importlib.import_module("flash_attn.layers.rotary").RotaryEmbedding(64, device="cuda")
        packed = torch.randn(2, 16, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
        rotary(packed)
        before = gpu.recorder.allocations
        rotary(packed)
        assert made(gpu, before) == [], "in place, by tables that are there"


def test_libraries_find_the_arguments_that_they_look_for() -> None:
    with stood_in():
        function = importlib.import_module("flash_attn").flash_attn_varlen_func
    names = list(inspect.signature(function).parameters)
    assert names[:7] == ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert {"window_size", "softcap", "deterministic", "block_table"} < set(names)


def test_xformers_attends_by_the_kernel_that_it_would_choose() -> None:
    """fmha/dispatch.py: FlashAttention-2 of 16 bits on an A100, PyTorch's own of 32 bits or with a tensor as bias."""
    batch, tokens, heads, width = 8, 384, 4, 64
    with stood_in() as gpu:
        ops = importlib.import_module("xformers.ops")
        packed = attended(batch, tokens, 3, heads, width)
        query, key, value = ops.unbind(packed, 2)
        before = gpu.recorder.allocations
        out = ops.memory_efficient_attention(query, key, value)
        each, rows = batch * tokens * heads * width * HALF, batch * tokens * heads
        assert made(gpu, before) == [each, rows * FLOAT, 2 * LONG]
        gradient = torch.ones_like(out)
        before = gpu.recorder.allocations
        out.backward(gradient)
        flash = [each, each, each, rows * FLOAT, rows * width * FLOAT]
        assert made(gpu, before) == [*flash, 3 * each], "the parts are stacked after"
        bias = torch.zeros(batch, heads, tokens, tokens, device="cuda", dtype=torch.bfloat16)
        for given in ([one.detach() for one in (query, key, value)], [query.detach().float()] * 3):
            before = gpu.recorder.allocations
            ops.memory_efficient_attention(*given, attn_bias=bias if given[0].dtype == torch.bfloat16 else None)
            assert made(gpu, before)[0] == given[0].nbytes
            assert made(gpu, before)[-1] != 2 * LONG, "no random state on the GPU"


def test_xformers_swiglu_makes_its_product_again_in_backward() -> None:
    """csrc/swiglu/swiglu_packedw.cpp: two halves and the product, of which the halves are saved."""
    rows, width, hidden = 1024, 256, 512
    with stood_in() as gpu:
        block = importlib.import_module("xformers.ops").SwiGLU(width, hidden, bias=False).cuda().bfloat16()
        x = attended(rows, width)
        block(x)
        before = gpu.recorder.allocations
        out = block(x)
        half = rows * hidden * HALF
        assert made(gpu, before) == [half, half, half, out.nbytes]
        gradient = torch.ones_like(out)
        before = gpu.recorder.allocations
        out.backward(gradient)
        large = [size for size in made(gpu, before) if size >= half and size < 1 << 22]
        assert large[:3] == [half, 2 * half, half], "the product's gradient, both halves', and the product"


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


def test_what_imports_torch_by_itself_may_come_before_it() -> None:
    def tops(names: Iterable[str]) -> set[str]:
        return {name.partition(".")[0] for name in names}

    of_python = tops(name for one in STAND_INS for name in one.layer)
    assert of_python <= IMPORT_TORCH <= of_python | tops(name for one in STAND_INS for name in one.compiled)


def test_metadata_is_found_while_it_is_offered_alone() -> None:
    absent = [one for one in STAND_INS if not one.is_installed]
    with offered():
        for one in absent:
            assert importlib.metadata.version(one.package) == one.version
            top = next(iter(one.layer or one.compiled))
            spec = importlib.util.find_spec(top)
            assert spec is not None
            assert one.package in importlib.metadata.packages_distributions()[top]
            tops = [name for name in one.compiled if "." not in name]  # looking for others imports these
            assert all(importlib.util.find_spec(name) is not None for name in tops)
    for one in absent:
        assert importlib.util.find_spec(next(iter(one.layer or one.compiled))) is None
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
