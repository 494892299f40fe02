"""Replacements of the simulated GPU in torch are in the register, and torch is a version it was checked on."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpumem_tui.simulator import torch_internals
from gpumem_tui.simulator.allocator.profile import NEWEST_TORCH
from gpumem_tui.simulator.torch_internals import REGISTER, MissingInTorch, Replacements, entry_of, replace

CHANGES = """
import functools, sys
from types import ModuleType
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
from gpumem_tui.run.libraries import follow_graphs
from gpumem_tui.simulator.cuda.presented import presented_as_cuda
from gpumem_tui.simulator.device.gpu import simulate
from gpumem_tui.simulator.fast.repeats import Repeats
from gpumem_tui.simulator.torch_internals import entry_of
from gpumem_tui.simulator.compiled.following import follow_compiler
from gpumem_tui.simulator.cuda.world import answer_alone
from tests.simulator.simulated_steps import simulated_gpu


def attributes():
    found = {}
    for module in [m for key, m in sys.modules.items() if key.split(".")[0] == "torch" and isinstance(m, ModuleType)]:
        for name, value in list(vars(module).items()):
            found[module.__name__, name, module] = value
            if isinstance(value, type) and value.__module__.startswith("torch") and "._C." not in value.__module__:
                owner = f"{value.__module__}.{value.__qualname__}"
                found.update({(owner, part, value): one for part, one in vars(value).items()})
    return found


def changed(before):
    return [key for key, value in attributes().items() if key in before and value is not before[key]
            and (callable(value) or isinstance(value, (property, staticmethod)))]


before, gpu = attributes(), simulated_gpu()
with simulate(gpu), presented_as_cuda(gpu), Repeats(gpu).watching():
    for_good = [follow_compiler({}), follow_graphs(lambda _: None), answer_alone(0)]
    for owner, name, holder in changed(before):
        c10d = "torch.distributed.distributed_c10d"  # whose functions other modules of torch have bound
        bound = getattr(before[owner, name, holder], "__module__", "") == c10d or owner.startswith("torch.distributed")
        print(f"{owner}.{name}", bool(entry_of(f"{owner}.{name}") or (bound and entry_of(f"{c10d}.{name}"))))
print("after:", *(name for owner, name, _ in changed(before) if owner == "torch.Tensor"))
"""


@pytest.mark.slow
def test_all_that_changes_in_torch_is_in_the_register() -> None:
    done = subprocess.run([sys.executable, "-c", CHANGES], capture_output=True, text=True, timeout=300, check=True)
    *lines, after = done.stdout.splitlines()
    changed = dict(line.split() for line in lines)
    assert len(changed) > 50
    assert {"torch.autograd._engine_run_backward", "torch.Tensor.register_hook", "torch.compile"} <= changed.keys()
    assert [name for name, is_known in changed.items() if is_known != "True"] == []
    assert after == "after:", "what is replaced for the simulation's time is as it was"


def test_nothing_is_replaced_that_the_register_lacks() -> None:
    owner = SimpleNamespace(__name__="torch.somewhere")
    with pytest.raises(LookupError, match=r"torch\.somewhere\.anything is replaced without an entry"):
        replace(owner, "anything", None)
    with Replacements() as replacements, pytest.raises(LookupError):
        replacements.set(owner, "anything", None)
    assert not hasattr(owner, "anything")


def test_a_torch_without_what_is_replaced_is_told_in_one_line() -> None:
    owner = SimpleNamespace(__name__="torch.autograd")
    with pytest.raises(MissingInTorch, match=r"^torch \S+ has no torch\.autograd\._engine_run_backward, which .*GPU$"):
        torch_internals.original(owner, "_engine_run_backward")


def test_an_entry_says_why_and_on_which_versions() -> None:
    for entry in REGISTER:
        assert entry.why
        assert entry.checked_on
    assert entry_of("torch.cuda.memory_allocated") is entry_of("torch.cuda.memory.max_memory_allocated")
    newest = ".".join(map(str, NEWEST_TORCH))
    assert all(newest in entry.checked_on for entry in REGISTER), "of a newer one every result notes this"
