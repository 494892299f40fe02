"""The buffers that a compiled program's kernels write: where each comes from, and how many are there at once."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Inductor writes kernels for triton, which is not here"),
]

_KERNELS = """
import json
import torch
from torch import nn
from torch._inductor.codegen.simd import SIMDScheduling
from torch.nn import functional as F
from gpumem_tui.simulator.compiled.following import follow_compiler, forget
from gpumem_tui.simulator.cuda.presented import presented_as_cuda
from gpumem_tui.simulator.device.gpu import simulate
from tests.simulator.simulated_steps import simulated_gpu

by_their_code = SIMDScheduling.codegen_node_schedule
follow_compiler({})


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.norm = nn.Embedding(500, 128), nn.LayerNorm(128)
        self.up, self.out = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, rows):
        x = self.names(rows)
        scores = F.dropout((x @ x.transpose(1, 2)).softmax(-1), 0.1)
        x = x + F.dropout(self.out(F.gelu(self.up(self.norm(scores @ x)))), 0.1)
        x = x + x.cumsum(1) + x.sort(1).values + x.roll(1, 1)
        return F.cross_entropy(x.view(-1, 128) @ self.names.weight.t(), rows.view(-1))


def windows(x):
    return sum(x[..., place : place + x.shape[-1] - 8] for place in range(8)).softmax(-1)


def looped(length):
    forget()
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(64, length, device="cuda")
    return torch.compile(windows)(x).nbytes, torch.cuda.max_memory_allocated() - x.nbytes


def took(network, length):
    forget()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    called, found = torch.compile(network), []
    for _ in range(2):
        loss = called(torch.ones(4, length, dtype=torch.long, device="cuda"))
        found += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        loss.backward()
        del loss
        found += [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    network.zero_grad()
    return found


gpu = simulated_gpu()
with simulate(gpu), presented_as_cuda(gpu):
    network = Network().cuda()
    took(network, 16)  # cuBLAS takes its workspace
    found = []
    for codegen in (SIMDScheduling.codegen_node_schedule, by_their_code):
        SIMDScheduling.codegen_node_schedule = codegen
        found.append([*(took(network, length) for length in (256, 2048)), *map(looped, (256, 4096))])
    print(json.dumps(found))
"""


def test_kernels_found_by_their_accesses_take_what_their_code_takes() -> None:
    """Short rows are reduced at once, long ones by loops, which keep what the second reads of the first's."""
    done = subprocess.run([sys.executable, "-c", _KERNELS], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    by_accesses, by_their_code = json.loads(done.stdout.splitlines()[-1])
    assert by_accesses == by_their_code


_FUSED = """
import torch
from torch.nn import functional as F

layer, out = torch.nn.Linear(256, 512).cuda(), torch.nn.Linear(512, 256).cuda()
optimizer = torch.optim.SGD([*layer.parameters(), *out.parameters()])


@torch.compile
def loss(x, wanted):
    x = layer(x)
    x = F.gelu(x)
    x = F.dropout(x, 0.5)
    x = out(x)
    return F.cross_entropy(x, wanted)


for _ in range(3):
    loss(torch.ones(4096, 256, device="cuda"), torch.zeros(4096, device="cuda", dtype=int)).backward()
    optimizer.step()
"""


def test_a_buffer_has_the_lines_of_its_kernel(tmp_path: Path) -> None:
    """Forward keeps what dropout gives; backward's largest buffer is the gradient of that."""
    script = tmp_path / "train.py"
    script.write_text(_FUSED)
    command = [sys.executable, "-m", "gpumem_tui", "predict", "--gpu", "sim:a100-80gb"]
    ends = ["--", sys.executable, str(script)]
    read = subprocess.run([*command, "--json", *ends], capture_output=True, text=True, check=True)
    held = {(one["bucket"], one["operator"]): one for one in json.loads(read.stdout)["traced"]["composition"]}
    dropped, gradient = held["activations", "aten.native_dropout"], held["temporary", "aten.mm"]
    assert (dropped["source"], dropped["fused_with"]) == ("train.py:13", ["train.py:12"])
    assert (gradient["source"], gradient["bytes"]) == ("train.py:14", 4 * 512 * (4096 + 256)), "and out's weight's"
    lines = subprocess.run([*command, "--by", "source", *ends], capture_output=True, text=True, check=True).stdout
    assert "activations       train.py:13, fused with 12 " in lines


_BLOCK = """
import sys
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(256), nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


"""
_NESTED = (
    _BLOCK
    + """\
model = nn.Sequential(*[Block() for _ in range(2)], nn.Linear(256, 512)).cuda()
called = torch.compile(model)
if sys.argv[1] == "block":
    called = model
    model[0].compile()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    called(torch.ones(4096, 256, device="cuda")).sum().backward()
    optimizer.step()
"""
)


@pytest.mark.parametrize("compiled", ["whole", "block"])
def test_a_buffer_has_the_module_of_its_operator(compiled: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_NESTED)
    command = [sys.executable, "-m", "gpumem_tui", "predict", "--json", "--gpu", "sim:a100-80gb", "--", sys.executable]
    done = subprocess.run([*command, str(script), compiled], capture_output=True, text=True, check=True)
    held = [
        one for one in json.loads(done.stdout)["traced"]["composition"] if one["bucket"] in ("activations", "temporary")
    ]
    modules = {one["module"] for one in held if one["bytes"] >= 4096 * 256 * 4}
    assert {"0.mlp.0", "1.mlp.0"} <= modules
    assert not [name for name in modules if "OptimizedModule" in name or name[:1] not in ("", "0", "1", "2")]


_UPDATE = """
import torch

model = torch.nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)


@torch.compile
def update():
    optimizer.step()


for _ in range(3):
    model(torch.ones(1, 2048, device="cuda")).sum().backward()
    update()
    optimizer.zero_grad()
"""


def test_an_update_that_is_compiled_makes_no_copies(tmp_path: Path) -> None:
    """AdamW's own takes the roots of all parameters; compiled, it is one kernel."""
    script = tmp_path / "train.py"
    traced = {}
    for kind, text in (("compiled", _UPDATE), ("eager", _UPDATE.replace("@torch.compile", ""))):
        script.write_text(text)
        command = [sys.executable, "-m", "gpumem_tui", "predict", "--json", "--gpu", "sim:a100-80gb", "--"]
        done = subprocess.run([*command, sys.executable, str(script)], capture_output=True, text=True, check=True)
        traced[kind] = json.loads(done.stdout)["traced"]
    assert any("1 graph compiled" in note and "no frame ran eager" in note for note in traced["compiled"]["notes"])
    eager, compiled = (one["phases"][-1]["buckets"]["temporary"] for one in reversed(traced.values()))
    assert eager - compiled >= 2048 * 2048 * 4


_TWICE = (
    _BLOCK
    + """\
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        found = 0
        for begins in (x, x * 2):
            for block in self.blocks:
                begins = checkpoint(block, begins, use_reentrant=False)
            found = found + begins.pow(2).mean()
        return found


model = Twice().cuda()
called = torch.compile(model) if sys.argv[1] == "compiled" else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    called(torch.randn(64, 1024, 256, device="cuda")).backward()
    optimizer.step()
"""
)


def test_two_passes_of_checkpoints_in_one_graph_hold_several_at_once(tmp_path: Path) -> None:
    """As measured in pytorch issue 193193, 2.3 times the eager peak; the result notes this."""
    script = tmp_path / "train.py"
    script.write_text(_TWICE)
    command = [sys.executable, "-m", "gpumem_tui", "predict", "--json", "--gpu", "sim:a100-80gb", "--", sys.executable]
    traced = {}
    for kind in ("eager", "compiled"):
        done = subprocess.run([*command, str(script), kind], capture_output=True, text=True, check=True)
        traced[kind] = json.loads(done.stdout)["traced"]
    eager, compiled = (one["peak_allocated_bytes"] for one in traced.values())
    assert compiled > 1.5 * eager
    assert any("12 checkpoints within a graph" in note and "193193" in note for note in traced["compiled"]["notes"])


_PATTERNS = """
import torch
from torch._inductor.fx_passes import fuse_attention, joint_graph
from torch._inductor.pattern_matcher import CallFunction, MultiOutputPattern, PatternExpr, init_once_fakemode


def operators(pattern):
    parts = pattern.outputs if isinstance(pattern, MultiOutputPattern) else ()
    if isinstance(pattern, CallFunction):
        parts = pattern.flat_args_kwargs[0]
        yield from pattern.fns
    for part in parts:
        if isinstance(part, PatternExpr):
            yield from operators(part)


def entries():
    return [one for kept in joint_graph.patterns.patterns.values() for one in kept]


before = set(map(id, entries()))
init_once_fakemode(fuse_attention._sfdp_init)(torch.device("cpu"))
added = [one for one in entries() if id(one) not in before]
print(len(added), sum(torch.ops.aten.bmm.default in operators(one.pattern) for one in added))
"""


def test_every_pattern_of_attention_has_a_product_of_batches() -> None:
    """By that they are made only for graphs that have one (`_attention_of_products`)."""
    done = subprocess.run([sys.executable, "-c", _PATTERNS], capture_output=True, text=True, timeout=600, check=True)
    every, with_products = map(int, done.stdout.split())
    assert every == with_products > 50
