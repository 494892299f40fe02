"""Modules that take long to load are loaded once used, and answer as before until then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.simulator.fast.uncompiled import leave_compiler_unloaded

leave_compiler_unloaded(torch)
gpu = find_gpu("a100-40gb")
with simulate(SimulatedGpu(gpu, profile_for(torch.__version__, gpu), None, unlimited=True)) as device:
    made = torch.empty(2, 3, device=device)
    made.to(torch.float16)
    (made + made.to(torch.float16)).sum()
    normed = torch.nn.functional.layer_norm(made, (3,))
    (made.view(6) + normed.reshape(6)).sum()
assert "torch.distributed.tensor" not in sys.modules, "distributed tensors were loaded"
import torch.fx.experimental.symbolic_shapes as sizes

stood = [sizes]
truths = [(truth,) for truth in (True, False)]
pairs = [(one, other) for (one,) in truths for (other,) in truths]
calls = [
    *((name, values) for name in ("guard_or_false", "guard_or_true", "statically_known_true", "guard_size_oblivious",
                                  "expect_true") for values in truths),
    *((name, values) for name in ("sym_and", "sym_or") for values in (*truths, *pairs, (True, True, False))),
    *((name, (3,)) for name in ("is_symbolic", "is_nested_int", "has_guarding_hint", "guard_int",
                                "has_free_unbacked_symbols")),
    *(("sym_eq", values) for values in ((2, 2), (2, 3), ((2, 3), [2, 3]), (torch.Size((2,)), (2, 1)), ((), ()))),
    *((name, (value,)) for name in ("_iterate_exprs", "_iterate_nodes") for value in (made, [1, made], None)),
    ("compute_unbacked_bindings", (None, made)),
]

def answers(module):
    found = [getattr(module, name)(*values) for name, values in calls[:-1]]
    return [list(one) if hasattr(one, "__next__") else one for one in found]

before = answers(sizes)
import sympy as algebra

expressions = algebra.Basic
assert not isinstance(1, (str, expressions))
assert "sympy.core" not in sys.modules, "sympy was loaded"
assert sizes.compute_unbacked_bindings(None, made) is None  # which is torch's own
assert "sympy.core" in sys.modules, "torch's own was not loaded"
true_one = sys.modules[sizes.__name__]
assert true_one is not stood[0] and stood[0].ShapeEnv is true_one.ShapeEnv
assert true_one is sizes, "a name continues asking what stood for the module"
import sympy.core.numbers

assert isinstance(sympy.Integer(1), expressions) and algebra.Basic is sympy.Basic is not expressions
assert issubclass(type("Own", (sympy.Basic,), {}), sympy.Basic)
assert before == answers(true_one), list(zip(calls, before, answers(true_one)))
assert torch.compile(lambda x: x.view(6) + 1, backend="eager", dynamic=True)(torch.ones(2, 3)).tolist() == [2.0] * 6
"""


@pytest.mark.slow
def test_symbolic_sizes_are_as_torch_has_them_and_loaded_by_their_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


DISTRIBUTED = """
import sys
import torch
from gpumem_tui.simulator.fast.uncompiled import leave_compiler_unloaded

leave_compiler_unloaded(torch)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
weight = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
product = weight @ torch.distributed.tensor.ones(2, 3, device_mesh=weight.device_mesh)
assert type(product) is DTensor and product.placements == (Shard(0),), product
assert product.to_local().tolist() == [[2.0] * 3] * 4
"""


@pytest.mark.slow
def test_distributed_tensors_are_known_as_such_once_they_are_loaded(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DISTRIBUTED, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
