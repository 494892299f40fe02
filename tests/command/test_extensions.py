"""Packages that are compiled for CUDA, in programs that are followed on the simulated GPU: stood in for, or refused."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import time

import pytest

from tests.command.running import Project, needs

LLAMA = """
    import sys
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=512, attn_implementation=sys.argv[1],
    )
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).cuda()
    assert model.config._attn_implementation == sys.argv[1]
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        ids = torch.randint(0, 512, (8, 512))
        mask = torch.ones_like(ids)
        if "padded" in sys.argv:
            mask[1:, 256:] = 0
        loss = model(input_ids=ids.cuda(), attention_mask=mask.cuda(), labels=ids.cuda()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

DINO = """
    import sys
    import torch
    from torch import nn
    from xformers.ops import SwiGLU, fmha, index_select_cat, memory_efficient_attention, scaled_index_add, unbind

    WIDTH, HEADS = 256, 4

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp = SwiGLU(WIDTH, 512)

        def attend(self, x, bias):
            qkv = self.qkv(x).reshape(x.shape[0], x.shape[1], 3, HEADS, WIDTH // HEADS)
            query, key, value = unbind(qkv, 2)
            return self.out(memory_efficient_attention(query, key, value, attn_bias=bias).reshape(x.shape))

        def forward(self, crops):
            lengths = [crop.shape[1] for crop in crops for _ in range(crop.shape[0])]
            bias = fmha.BlockDiagonalMask.from_seqlens(lengths)
            bias._batch_sizes = [crop.shape[0] for crop in crops]
            x = torch.cat([crop.reshape(1, -1, WIDTH) for crop in crops], dim=1)
            x = x + self.attend(self.first(x), bias)
            crops = bias.split(x + self.mlp(self.second(x)))
            drawn = [torch.randperm(len(crop), device="cuda")[: max(1, len(crop) // 2)] for crop in crops]
            kept = index_select_cat([crop.flatten(1) for crop in crops], drawn)
            parts = kept.split([len(one) * crop.shape[1] * WIDTH for one, crop in zip(drawn, crops)])
            return [
                scaled_index_add(crop * 1, one, part.view(len(one), *crop.shape[1:]))
                for crop, one, part in zip(crops, drawn, parts)
            ]

    blocks = nn.ModuleList(Block() for _ in range(3)).cuda()
    optimizer = torch.optim.AdamW(blocks.parameters())
    for step in range(4):
        crops = [torch.randn(4, 257, WIDTH, device="cuda"), torch.randn(16, 50, WIDTH, device="cuda")]
        with torch.autocast("cuda", torch.bfloat16, enabled="amp" in sys.argv):
            for block in blocks:
                crops = block(crops)
        loss = sum(crop.float().square().mean() for crop in crops)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")

FLASH = """
    import importlib.util, sys
    import torch
    from flash_attn import flash_attn_func
    print("found", importlib.util.find_spec("flash_attn_2_cuda") is not None, flash_attn_func.__module__)

    projection = torch.nn.Linear(256, 768, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(projection.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16)
        query, key, value = projection(x).view(8, 512, 3, 4, 64).unbind(2)
        out = flash_attn_func(query, key, value, causal=True)
        optimizer.zero_grad()
        out.float().square().mean().backward()
        optimizer.step()
"""


def test_a_package_that_is_not_installed_is_stood_in_for(project: Project) -> None:
    project.write("train.py", FLASH.replace("import importlib.util", "import flash_attn, importlib.util"))
    body = project.predict("python", "train.py").json
    assert any(
        "flash-attn is not run: its kernels are stood in for by shape" in note for note in body["traced"]["notes"]
    )
    refused = project.predict("python", "train.py", gpu="t4-16gb")
    assert refused.code != 0
    assert "train.py:12: RuntimeError: FlashAttention only supports Ampere GPUs or newer" in refused.complaint


@pytest.mark.scripts
@needs("transformers")
def test_transformers_trains_with_flash_attention_as_with_torchs_own(project: Project) -> None:
    """PyTorch's own flash attention has the same kernels, and is counted apart."""
    project.write("train.py", LLAMA)
    packed = project.predict("python", "train.py", "flash_attention_2").json["traced"]
    own = project.predict("python", "train.py", "sdpa").json["traced"]
    persistent = ("parameters", "gradients", "optimizer")
    assert [packed["buckets"][name] for name in persistent] == [own["buckets"][name] for name in persistent]
    assert abs(packed["peak_allocated_bytes"] / own["peak_allocated_bytes"] - 1) < 0.01
    padded = project.predict("python", "train.py", "flash_attention_2", "padded").json["traced"]
    assert any("flash-attn is not run" in note for note in padded["notes"])
    assert abs(padded["peak_allocated_bytes"] / own["peak_allocated_bytes"] - 1) < 0.1


@pytest.mark.parametrize(("gpu", "precision"), [("a100-80gb", "amp"), ("h100-80gb", "amp"), ("t4-16gb", "fp32")])
def test_a_block_of_dinov2_trains_with_xformers(project: Project, gpu: str, precision: str) -> None:
    """By FlashAttention-2, by FlashAttention-3 and by PyTorch's own kernel, as xformers chooses."""
    project.write("train.py", DINO)
    traced = project.predict("python", "train.py", precision, gpu=gpu).json["traced"]
    said = [note for note in traced["notes"] if "xformers is not run: its kernels are stood in for by shape" in note]
    assert said
    assert ("it is not installed here" in said[0]) == (importlib.util.find_spec("xformers") is None)
    values = 3 * (4 * 256 * 256 + 8 * 256 + 3 * 512 * 256 + 2 * 512 + 256)
    assert traced["parameters"] == values
    assert traced["buckets"]["parameters"] == pytest.approx(4 * values, rel=0.02)
    assert traced["buckets"]["optimizer"] == pytest.approx(8 * values, rel=0.02)


LOADING = """
    import torch
    from torch.utils.cpp_extension import load, load_inline

    open("op.cpp", "w").write("torch::Tensor f(torch::Tensor x);")
    open("op.cu", "w").write("__global__ void k(float* p) { p[0] = 1; }")
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        %s
    except RuntimeError:
        %s
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8).cuda()).sum().backward()
        optimizer.step()
"""
CALLS = (
    'load(name="my_ext", sources=["op.cpp", "op.cu"], is_python_module=False)',
    'load(name="my_ext", sources="op.cpp", with_cuda=True)',
    'load_inline("my_ext", "torch::Tensor f(torch::Tensor x);", "__global__ void k() {}", functions=["f"])',
)


@pytest.mark.parametrize("call", CALLS)
def test_an_extension_of_cuda_sources_is_refused_before_a_compiler_starts(
    project: Project, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(project.folder / "built"))
    project.write("train.py", LOADING % (call, "raise"))
    began = time.perf_counter()
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint.startswith("gpumem-tui: train.py:10: the extension my_ext is compiled for CUDA (")
    assert done.complaint.endswith("or run on a real GPU with --gpu 0")
    assert list(project.folder.rglob("lock")) + list(project.folder.rglob("*.o")) == []
    assert time.perf_counter() - began < 60, "a compiler was started"


def test_a_program_that_goes_on_without_its_extension_says_so(project: Project) -> None:
    project.write("train.py", LOADING % (CALLS[0], "print('falls back')"))
    body = project.predict("python", "train.py").json
    said = "train.py:10: the program went on without its extension my_ext"
    assert any(note.startswith(said) for note in body["traced"]["notes"])
    assert "; without my_ext, compiled for CUDA. " in body["answer"]


COMPILED = """
    #include <Python.h>
    static PyObject* forward(PyObject* self, PyObject* x) {
        PyErr_SetString(PyExc_RuntimeError, MESSAGE);
        return NULL;
    }
    static PyMethodDef methods[] = {{"forward", forward, METH_O, ""}, {NULL, NULL, 0, NULL}};
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "splat_kernels", "", -1, methods};
    PyMODINIT_FUNC PyInit_splat_kernels(void) { return PyModule_Create(&module); }
"""
CALLING = """
    import torch
    import splat_kernels

    x = torch.randn(4, 8, device="cuda")
    y = splat_kernels.forward(
        x,
    )
"""
SAID = {
    "Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor). If you're using": "address of a tensor",
    "x must be a CUDA tensor": "x must be a CUDA tensor",
    "The tensor has a non-zero number of elements, but its data is not allocated yet.": "address of a tensor",
    "Expected all positions to be positive": "",
}


@needs_compiler
@pytest.mark.parametrize("words", SAID)
def test_machine_code_that_wants_a_tensor_of_cuda_is_named(project: Project, words: str) -> None:
    """Machine code of a GPU's that was built beforehand, as `setup.py` of such packages does."""
    source = project.write("kernels.c", COMPILED.replace("MESSAGE", f'"{words}"'))
    built = project.folder / "splat_kernels.so"
    headers = sysconfig.get_path("include")
    subprocess.run(["gcc", "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(built)], check=True)
    project.write("train.py", CALLING)
    complaint = project.predict("python", "train.py").complaint
    if SAID[words]:
        assert complaint.startswith(
            "gpumem-tui: train.py:6: splat_kernels.forward is compiled code that works on the GPU"
        )
        assert SAID[words] in complaint
        assert complaint.endswith("or run on a real GPU with --gpu 0")
    else:
        assert complaint == f"gpumem-tui: train.py:6: RuntimeError: {words}"


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("import flash_attn.something_not_there\n", "flash_attn.something_not_there"),
        ("from transformer_engine.pytorch import GroupedLinear\n", "transformer_engine.pytorch.GroupedLinear"),
        ("import apex.optimizers as ours; ours.FusedNothing\n", "apex.optimizers.FusedNothing"),
    ],
)
def test_a_piece_that_a_stand_in_lacks_is_named_with_it(project: Project, program: str, missing: str) -> None:
    """Be it imported before torch or after it."""
    project.write("train.py", program)
    complaint = project.predict("python", "train.py").complaint
    package = missing.partition(".")[0].replace("_", "-")  # as pip names it
    assert complaint.startswith(f"gpumem-tui: train.py:1: {package} is compiled for CUDA, and ")
    assert f"has no {missing}; without a GPU" in complaint
    assert complaint.endswith("or run on a real GPU with --gpu 0")


MISSING = {
    "ImportError('libcudart.so.12: cannot open shared object file', name='splat._C')": "splat._C is compiled for CUDA",
    "OSError('libtorch_cuda.so: cannot open shared object file')": "whose libtorch_cuda.so is not here",
    "ModuleNotFoundError(\"No module named 'gsplat'\", name='gsplat')": "it is compiled for CUDA",
}


@pytest.mark.parametrize("error", MISSING)
def test_a_module_that_lacks_cuda_is_named_as_it_is_imported(project: Project, error: str) -> None:
    project.write("train.py", f"import torch\nraise {error}\n")
    complaint = project.predict("python", "train.py").complaint
    assert complaint.startswith("gpumem-tui: train.py:2: ")
    assert MISSING[error] in complaint
    assert complaint.endswith("or run on a real GPU with --gpu 0")


def test_a_package_whose_compiled_part_is_missing_is_named(project: Project) -> None:
    project.write("splatting/csrc/forward.cu", "__global__ void k() {}")
    project.write("splatting/__init__.py", "_C = None\ndef render(x):\n    return _C.forward(x)\n")
    project.write("train.py", "import torch, splatting\nsplatting.render(torch.ones(1, device='cuda'))\n")
    complaint = project.predict("python", "train.py").complaint
    assert "its package is compiled for CUDA (splatting/csrc/forward.cu)" in complaint
    assert complaint.startswith("gpumem-tui: splatting/__init__.py:3: ")


@pytest.mark.scripts
@needs("deepspeed")
def test_an_operator_that_deepspeed_would_compile_is_refused(project: Project) -> None:
    project.write(
        "train.py",
        "import torch\nfrom deepspeed.ops.op_builder import FusedLambBuilder\nFusedLambBuilder().load()\n",
    )
    complaint = project.predict("python", "train.py").complaint
    assert complaint.startswith(
        "gpumem-tui: train.py:3: DeepSpeed's operator fused_lamb is compiled for CUDA (fused_lamb"
    )
