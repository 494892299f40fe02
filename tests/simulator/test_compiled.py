"""The memory that torch.compile leaves, by its own compiler, where it can be counted by hand."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.catalog.loader import find_gpu
from tests.sharing import made_once

PYTHONS = [path for path in os.environ.get("GPUMEM_TUI_PYTHONS", "").split(os.pathsep) if path]
"""Interpreters with other versions of torch, as those of `tests/command/test_torch_versions.py`."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Inductor writes kernels for triton, which is not here"),
]

PROGRAMS = """
import json
import pickle
import sys
import typing
from dataclasses import replace
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.compiled.following import follow_compiler
from gpumem_tui.simulator.cuda.presented import presented_as_cuda
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.simulator.fast.uncompiled import leave_compiler_unloaded
from gpumem_tui.text import minor_of
from tests.in_process import world

leave_compiler_unloaded(torch)
notes = {}
SIDE = 1024
follow_compiler(notes)
found = {"torch": minor_of(torch.__version__)}


def kept(name, function, *inputs, **options):
    held = {}
    for kind, called in (("eager", function), ("compiled", torch.compile(function, **options))):
        called(*inputs).sum().backward() if name != "inference" else called(*inputs)
        before = torch.cuda.memory_allocated()
        result = called(*inputs)
        held[kind] = torch.cuda.memory_allocated() - before
        del result
    found[name] = held


def matrix(dtype=torch.float32):
    return torch.randn(SIDE, SIDE, device="cuda", dtype=dtype, requires_grad=True)


def chain(x):
    return (x.sin().exp() * 2).tanh().sigmoid()


alone = torch.compiler.disable(chain)  # before the compiler is there
torch._dynamo.config.cache_size_limit = 77


def asks_for_cuda(x):
    assert x.is_cuda and x.device.type == "cuda"
    return (x.sin() + torch.ones(SIDE, device="cuda")).exp()


made_before = torch.autocast("cuda", torch.bfloat16)  # as accelerate keeps it, around forward


def under_autocast(x):
    with made_before:
        return chain(x @ x)


def asks_for_autocast(x):
    return chain(x) if not torch.is_autocast_enabled() else x


def makes_numbers(x):
    return chain(x * x.new_tensor(0.5) + torch.tensor(2.0, device="cuda"))


class Ran(nn.Module):
    def forward(self, x):
        return checkpoint(chain, x, use_reentrant=False).cos().sin()


class Attends(nn.Module):
    def forward(self, x):
        return checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False).sin()


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIDE, 2 * SIDE, bias=False), nn.Linear(2 * SIDE, SIDE, bias=False)

    def forward(self, x):
        return self.down(chain(self.up(x)))


class Loops:
    def __str__(self):
        return "" if typing.Optional[type("Kind", (), {})] else "a loop of the standard library's, of no tensors"


def broken(x):
    x = x.sin().exp()
    print(end="", flush=True)
    print(Loops(), end="")
    torch._dynamo.graph_break()
    return x.tanh().sigmoid()


@torch.library.custom_op("ours::widened", mutates_args=())
def widened(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return (wide + wide.sin()).float()


@torch.library.custom_op("ours::widened_backward", mutates_args=())
def widened_backward(gradient: torch.Tensor) -> torch.Tensor:
    @torch.compile
    def narrow(wide):
        wide = wide * wide.new_tensor(0.5)
        return (wide.double().cos() @ torch.ones(SIDE, SIDE, device="cuda", dtype=torch.double)).float()

    return narrow(gradient)


widened.register_fake(torch.empty_like)
widened_backward.register_fake(torch.empty_like)
widened.register_autograd(lambda _, gradient: widened_backward(gradient.contiguous()))


def highest(function, x):  # next to its input, and of backward next to its result
    function(x).sum().backward()  # cuBLAS takes its workspaces
    x.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function(x)
    forward = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result.backward(torch.ones_like(result))
    return forward, torch.cuda.max_memory_allocated() - held


gpu = pickle.loads(bytes.fromhex(sys.argv[1]))  # an interpreter with torch alone cannot read the catalog
gpu = SimulatedGpu(gpu, profile_for(torch.__version__, gpu))
with simulate(gpu), presented_as_cuda(gpu):
    import torch._dynamo.eval_frame  # as libraries do, before anything is compiled
    found["backward"] = [highest(chain, matrix())[1]]
    with torch._dynamo.compiled_autograd._enable(torch.compile):
        found["backward"] += [highest(chain, matrix())[1]]
    found["said of backward"] = list(notes)
    torch._dynamo.reset()
    notes.clear()
    kept("chain", chain, matrix())
    kept("cross-entropy", lambda x, t: F.cross_entropy(x * 2, t), matrix(), torch.zeros(SIDE, device="cuda", dtype=int))
    kept("norm", lambda x, w: F.rms_norm(x, (SIDE,), w) * 2, matrix(), torch.ones(SIDE, device="cuda"))
    kept("by another backend", chain, matrix(), backend="aot_eager")
    kept("asks for cuda", asks_for_cuda, matrix())
    kept("asks for autocast", asks_for_autocast, matrix())
    kept("makes numbers", makes_numbers, matrix())
    kept("under autocast", under_autocast, matrix())
    linear = nn.Linear(SIDE, SIDE).cuda()
    found["is a view"] = torch.compile(lambda x: x + linear(x))(matrix()[None])._is_view()
    ran = Ran()
    kept("checkpoint", ran, matrix())
    kept("attention again", Attends(), torch.randn(1, 16, 1024, 64, device="cuda", requires_grad=True))
    with world(2):
        mesh = init_device_mesh("cuda", (2,))
        cut = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        kept("tensor parallel", parallelize_module(Cut().cuda(), mesh, cut), matrix())
        assert mesh.device_type == "cuda"
    found["of one graph each"] = list(notes)
    with world(2):
        kept("data parallel", DistributedDataParallel(nn.Sequential(Cut(), Cut()).cuda(), [0]), matrix())
    module = nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU()).cuda()
    module.compile()
    kept("module", module, matrix())
    kept("broken", broken, matrix())
    odd = torch.ones(SIDE, SIDE + 1, device="cuda", dtype=torch.bfloat16)
    x = matrix(torch.bfloat16)
    kept("padded", lambda x, w: x @ w, x, odd)
    rows = [torch.randn(1, 1, 4096, 64, device="cuda", requires_grad=True) for _ in range(3)]
    from torch.nn.attention.flex_attention import flex_attention
    kept("flex attention", lambda q, k, v: flex_attention(q, k, v), *rows)

    def attended(q, k, v):
        with torch.autocast("cuda", torch.bfloat16):
            return flex_attention(q, k, v)

    kept("flex attention under autocast", attended, *rows)
    found["padding"] = [note for note in notes if "padded" in note]
    reserved = {}
    for mode in ("default", "reduce-overhead"):
        called = torch.compile(lambda x: (x @ x).sin() @ x, mode=mode)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            called(x).sum().backward()
        (x @ x).sum().backward()  # takes cuBLAS's workspaces again, which graphs give back
        plain = [torch.empty_like(x) for _ in range(8)]
        del plain
        reserved[mode] = torch.cuda.memory_reserved() - before
    found["reserved"] = reserved
    kept("left alone", lambda x: alone(x), matrix())
    kept("of graphs alone", chain, matrix(), backend="cudagraphs")
    twice = lambda x: widened(x * 2)
    found["operators of its own"] = [highest(one, matrix()) for one in (twice, torch.compile(twice))]
    found["ordered"], newest, settings = {}, gpu.profile, torch._inductor.config
    for name, version, one in (("2.6", (2, 6), lambda x: x.sin() + 1), ("2.5", (2, 5), lambda x: x.cos() + 1)):
        gpu.profile = replace(newest, version=version)
        hear = lambda _: found["ordered"].update({name: settings.reorder_for_peak_memory})
        with settings.patch(post_grad_custom_pre_pass=hear):
            torch.compile(one)(x)
    gpu.profile = newest
    found["limit"] = torch._dynamo.config.cache_size_limit
    known, torch.__version__ = torch.__version__, "2.99.0"
    kept("of an unknown version", chain, matrix())
    found["notes"], torch.__version__ = list(notes), known
    with torch._dynamo.config.patch(compiled_autograd=True):
        kept("compiled autograd", chain, matrix())
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.compile(lambda x: broken(x), fullgraph=True)(matrix())
    found["left by errors"] = torch.cuda.memory_allocated() - before
    found["estimates"] = [note for note in notes if note not in found["notes"]]
    (matrix() @ matrix()).sum().backward()
    before = torch.cuda.memory_allocated()
    called = torch.compile(lambda x: (x @ x).sin(), mode="reduce-overhead")
    result = called(matrix(torch.float64).detach())
    found["workspaces given back"] = before + result.nbytes - torch.cuda.memory_allocated()
    del result
print(json.dumps(found))
"""
MATRIX = 4 * 1024 * 1024


@pytest.fixture(
    scope="module", params=[sys.executable, *(pytest.param(path, marks=pytest.mark.versions) for path in PYTHONS)]
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The memory that forward leaves by program, eager and compiled: its result, and values kept for backward."""
    python = [sys.executable, *PYTHONS].index(request.param)
    return made_once(tmp_path_factory, f"compiled{python}", lambda: _found_by(request.param))


def _found_by(python: str) -> dict[str, Any]:
    command = [python, "-c", PROGRAMS, pickle.dumps(find_gpu("a100-80gb")).hex()]
    paths = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=paths)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_a_chain_of_elementwise_operators_keeps_its_input_only(found: dict[str, Any]) -> None:
    assert found["chain"] == {"eager": 3 * MATRIX, "compiled": MATRIX}, "eager keeps what exp, tanh and sigmoid gave"


def test_a_loss_keeps_two_numbers_a_row(found: dict[str, Any]) -> None:
    """The logits' largest value and the sum of their exponentials, of which backward makes the rest again."""
    assert found["cross-entropy"]["compiled"] < 4 * 4 * 1024 < MATRIX < found["cross-entropy"]["eager"]


def test_a_norm_keeps_one_number_a_row(found: dict[str, Any]) -> None:
    assert found["norm"]["compiled"] == MATRIX + 4 * 1024


def test_a_backend_without_kernels_keeps_as_eager_does(found: dict[str, Any]) -> None:
    assert found["by another backend"]["compiled"] == found["by another backend"]["eager"] == 3 * MATRIX


def test_the_device_is_called_cuda_in_compiled_code(found: dict[str, Any]) -> None:
    assert found["asks for cuda"]["compiled"] <= 2 * MATRIX


def test_the_state_of_autocast_breaks_no_graph(found: dict[str, Any]) -> None:
    """Questions are replaced around compiled code, which is not guarded by them."""
    assert found["asks for autocast"]["compiled"] == MATRIX


def test_numbers_that_become_tensors_on_the_gpu_break_no_graph(found: dict[str, Any]) -> None:
    """As scales of products in 8 bits do: Dynamo asked the simulated device for the tensor, which has no data."""
    assert found["makes numbers"]["compiled"] <= MATRIX + 2 * 512


def test_an_autocast_that_was_made_outside_of_a_graph_is_entered_in_it(found: dict[str, Any]) -> None:
    """In bf16 a product, and its copies of both sides for backward."""
    assert found["under autocast"]["compiled"] < found["under autocast"]["eager"]
    assert not any("estimate" in note for note in found["of one graph each"])


def test_what_a_kernel_writes_in_place_is_no_view(found: dict[str, Any]) -> None:
    """Else the next compiled layer is guarded by it, and compiled once more."""
    assert not found["is a view"]


def test_a_checkpoint_is_compiled_too(found: dict[str, Any]) -> None:
    assert found["checkpoint"]["compiled"] == MATRIX
    said, counted = (note for note in found["of one graph each"] if "while it compiles" not in note)
    assert "1 checkpoint within a graph" in said
    ends = "graphs compiled, traced by the compiler's own buffers; no frame ran eager"
    assert counted == f"torch.compile: {14 if compiles_backwards(found) else 12} {ends}"


def test_a_checkpoint_that_keeps_the_state_of_random_numbers_is_compiled(found: dict[str, Any]) -> None:
    """As attention's does, which may drop some: the state is no memory of the device."""
    assert found["attention again"] == {"eager": 2 * MATRIX, "compiled": MATRIX}, "the sine's input is made again, too"


def test_a_network_cut_between_gpus_is_compiled_in_one_graph(found: dict[str, Any]) -> None:
    """This GPU's half is of the size of the input: of it eager keeps what four operators take or give."""
    assert found["tensor parallel"] == {"eager": 5 * MATRIX, "compiled": 3 * MATRIX}
    assert not any("estimate" in note or "graph break" in note for note in found["of one graph each"])


def test_replicas_that_split_graphs_by_buckets_are_compiled(found: dict[str, Any]) -> None:
    """Each of the two halves is compiled by itself, in parts of a bucket; what is kept is as of one graph."""
    assert found["data parallel"] == {"eager": 2 * 9 * MATRIX, "compiled": 2 * 5 * MATRIX}


def test_products_of_odd_sizes_are_padded_and_that_is_said(found: dict[str, Any]) -> None:
    assert found["padded"]["compiled"] >= found["padded"]["eager"]
    assert ["1,025" in note and "less" in note for note in found["padding"]] == [True]


def test_cuda_graphs_take_a_pool_that_nothing_else_uses(found: dict[str, Any]) -> None:
    """Eight matrices after the steps lie where the buffers of these were, but for those of graphs."""
    assert found["reserved"]["reduce-overhead"] > found["reserved"]["default"]
    assert any("CUDA graphs" in note and "estimate" in note for note in found["notes"])


def test_cuda_graphs_leave_no_workspace(found: dict[str, Any]) -> None:
    """An H200 held one of 32 MiB, of the backward's graph, and none of the forward thread next to it."""
    assert found["workspaces given back"] >= 2 * 4 * 1024 * 1024


def test_flex_attention_is_cast_as_other_attention_is(found: dict[str, Any]) -> None:
    """Under autocast it works on rows of half the size, as CUDA's kernel of it casts them, and they are kept."""
    under = found["flex attention under autocast"]["compiled"]
    assert found["flex attention"]["compiled"] // 2 <= under < 4 * 1024 * 1024


def test_flex_attention_keeps_no_scores(found: dict[str, Any]) -> None:
    assert found["flex attention"]["compiled"] < 2 * 1024 * 1024 < 4 * 4096 * 4096
    assert not any("traced as eager" in note and "torch 2.99" not in note for note in found["notes"])


def test_what_a_program_keeps_from_the_compiler_runs_eager(found: dict[str, Any]) -> None:
    assert found["left alone"]["compiled"] == found["left alone"]["eager"] == 3 * MATRIX


def test_a_setting_made_before_the_compiler_is_loaded_holds(found: dict[str, Any]) -> None:
    assert found["limit"] == 77


def test_a_backend_of_cuda_graphs_alone_is_followed(found: dict[str, Any]) -> None:
    assert found["of graphs alone"]["compiled"] > 0
    assert not any("backend" in note for note in found["notes"])


def test_an_unknown_version_is_traced_as_eager(found: dict[str, Any]) -> None:
    assert found["of an unknown version"]["compiled"] == found["of an unknown version"]["eager"]
    assert any("an estimate" in note and "torch 2.99 was not tried" in note for note in found["notes"])


def test_what_an_operator_of_the_program_takes_within_itself_is_traced(found: dict[str, Any]) -> None:
    """Forward: twice the input, and as doubles a copy, its sine, their sum. Backward: ones, and three that its own
    compiled function makes: a cosine, a matrix of ones, their product."""
    seven = pytest.approx((1 + 3 * 2) * MATRIX, abs=MATRIX // 8)  # a block keeps a rest of less than 1 MiB
    assert found["operators of its own"] == 2 * [[seven, seven]]


def test_kernels_are_ordered_for_a_low_peak_since_torch_2_6(found: dict[str, Any]) -> None:
    """As torchao's compiled Llama of 1 B shows, of torch 2.4: in tests/published, with it 2.5 % less than measured."""
    assert found["ordered"] == {"2.6": True, "2.5": False}


def test_a_graph_break_is_said(found: dict[str, Any]) -> None:
    """Loops in the standard library are not compiled either, without a note."""
    assert any("graph breaks; no frame ran eager" in note for note in found["notes"])
    assert found["broken"]["compiled"] < found["broken"]["eager"]


def compiles_backwards(found: dict[str, Any]) -> bool:
    """Return whether torch follows a backward where a mode is on: since 2.8."""
    return bool(found["torch"] >= [2, 8])


def test_a_backward_is_compiled_as_well(found: dict[str, Any]) -> None:
    """Next to the gradient that is given: eager two that follow one another, compiled one, of the input."""
    said = "\n".join(found["said of backward"])
    if not compiles_backwards(found):
        assert found["backward"] == [3 * MATRIX, 3 * MATRIX]
        assert "compiled autograd is not followed, as torch 2." in said
        return
    assert found["backward"] == [3 * MATRIX, 2 * MATRIX]
    assert "torch.compile: 2 graphs compiled, traced by the compiler's own buffers; no frame ran eager" in said
    rest = MATRIX // 8  # a block keeps a rest of less than 1 MiB
    assert found["compiled autograd"] == pytest.approx({"eager": 3 * MATRIX, "compiled": MATRIX}, abs=rest)
    assert not any("compiled autograd" in note for note in found["estimates"])


def test_nothing_is_kept_of_what_a_graph_break_forbids(found: dict[str, Any]) -> None:
    """The compiler's error refers to the frames that it left, and these to their tensors."""
    assert found["left by errors"] == 0
    assert any("traced as eager" in note and "stopped with Unsupported" in note for note in found["estimates"])
