"""The register of what the simulated GPU replaces in torch: what, why, and on which versions that was checked.

Every such replacement is made by the functions of this file, and they make none that the register lacks. The bodies of
the replaced functions stand in the modules that the register names. Of a torch newer than these versions
`profile.newer_than_checked` gives the line that every result carries; of one that lacks what is to be replaced
`MissingInTorch` says so. Standard library only: part of it is used before torch is imported.

Beside these, `step.phases.mark_backward` replaces `torch.autograd.backward`, the probe `Module.__setstate__`, and a
what-if of a command the functions that it changes (`command.changes`, `command.optimizers`, `command.checkpoints`): all
public ones, on torch 2.1 and later.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

CHECKED_ON = ("2.13", "2.14")
"""The versions of torch that the simulator's tests ran with. On others than these an entry says which."""


@dataclass(frozen=True)
class Replaced:
    """Attributes of torch that are replaced together.

    Attributes:
        by: the module that has the bodies.
        names: qualified; a star stands for any.
        why: what would be wrong without.
        checked_on: versions of torch.
    """

    by: str
    names: tuple[str, ...]
    why: str
    checked_on: tuple[str, ...] = CHECKED_ON


_FAKE = "torch._subclasses.fake_tensor.FakeTensor"
_C10D = "torch.distributed.distributed_c10d"

REGISTER = (
    Replaced(
        "simulator.device",
        ("torch.autograd._engine_run_backward",),
        "an exception that leaves the engine's threads through a Python device guard ends the process "
        "(PythonDeviceGuard::exchangeStream): out-of-memory is raised as backward returns instead",
    ),
    Replaced(
        "simulator.device",
        ("torch.storage.UntypedStorage.resize_",),
        "FSDP takes and gives back its buffers so, and no operator sees it",
    ),
    Replaced("simulator.device", (f"{_FAKE}.__format__",), "programs print losses, which fake tensors refuse"),
    Replaced(
        "simulator.device, simulator.transfer",
        ("torch.Tensor.pin_memory", "torch.Tensor.is_pinned"),
        "there is no driver to pin host memory",
    ),
    Replaced(
        "simulator.kernels",
        ("torch._C._conv_determine_backend_memory_format",),
        "knows cuDNN's layouts for CUDA's own device type only",
    ),
    Replaced(
        "simulator.device",
        ("torch.optim.optimizer._foreach_supported_types", "torch.utils._foreach_utils._foreach_supported_types"),
        "optimizers and clipping take all tensors at once by the exact type of a parameter; fake ones are added",
    ),
    Replaced(
        "simulator.autocast",
        ("torch.clear_autocast_cache",),
        "the casts of weights that are cached for the device are dropped when torch drops its own",
    ),
    Replaced(
        "simulator.repeats",
        ("torch.nn.modules.module.Module.__call__", "torch.autograd._engine_run_backward"),
        "calls that do what an earlier one did are recorded again without being run",
    ),
    Replaced(
        "simulator.cuda, simulator.runtime",
        ("torch.cuda.*", "torch.accelerator.*", "torch.Stream", "torch.Event", "torch.Generator"),
        "what programs ask of CUDA is answered by the simulated device",
    ),
    Replaced(
        "simulator.cuda, simulator.runtime",
        ("torch._C._cuda_*", "torch._C._get_accelerator", "torch._C._scatter", "torch._C._host_emptyCache"),
        "the same below `torch.cuda`, which a build without CUDA lacks or answers with an error",
    ),
    Replaced(
        "simulator.cuda",
        ("torch.version.cuda", "torch.backends.cuda.is_built", "torch.backends.cudnn.*"),
        "libraries choose their code by whether torch was built with CUDA and cuDNN",
    ),
    Replaced(
        "simulator.recurrent",
        (
            "torch._use_cudnn_rnn_flatten_weight",
            "torch._cudnn_rnn_flatten_weight",
            "torch.backends.cudnn.rnn.get_cudnn_mode",
        ),
        "recurrent layers put their weights into one buffer, which a build without cuDNN cannot; under autocast torch "
        "2.14 does not cast them as it did",
        checked_on=("2.13",),
    ),
    Replaced(
        "simulator.cuda",
        (f"{_FAKE}.device", f"{_FAKE}.is_cuda", f"{_FAKE}.__repr__", f"{_FAKE}.tolist"),
        "read in C++ or by Python properties, where `CudaNames` does not see the simulated device's own name",
    ),
    Replaced(
        "simulator.cuda",
        (
            "torch.utils._device.DeviceContext.__init__",
            "torch.get_default_device",
            "torch.Tensor.record_stream",
            "torch.Tensor._make_subclass",
            "torch.Tensor._make_wrapper_subclass",
            "torch.Tensor.nested_int_memo",
        ),
        "take a device's name, or a tensor with data, before `CudaNames` sees it",
    ),
    Replaced(
        "simulator.cuda",
        (
            "torch.nn.modules.module.Module._apply",
            "torch.nn.modules.module.Module.to",
            "torch.nn.modules.module.Module.cuda",
        ),
        "parameters stay the same objects as a model goes to CUDA; torch would replace those without data",
    ),
    Replaced(
        "simulator.loading",
        (
            "torch.load",
            "torch.save",
            "torch._guards.detect_fake_mode",
            "torch._guards.active_fake_mode",
            "torch._utils._rebuild_tensor",
            "torch.serialization._package_registry",
            "torch.storage.UntypedStorage.cuda",
        ),
        "under fake tensors `torch.load` drops all data of a file, the program's own included",
    ),
    Replaced(
        "simulator.transfer",
        (
            f"{_FAKE}.numpy",
            f"{_FAKE}.data_ptr",
            f"{_FAKE}.__reduce_ex__",
            "torch.storage.UntypedStorage.device",
            "torch.storage.UntypedStorage.data_ptr",
            "torch.storage.UntypedStorage.is_cuda",
            "torch.set_default_tensor_type",
        ),
        "answered in C++, where fake tensors raise or name their meta device",
    ),
    Replaced(
        "simulator.cuda, simulator.hooks",
        (
            "threading.Thread._bootstrap_inner",
            "torch.autograd.function.BackwardCFunction.apply",
            "torch.autograd._engine_run_backward",
            "torch.autograd.graph.saved_tensors_hooks.__init__",
            "torch.Tensor.register_hook",
            "torch.Tensor.register_post_accumulate_grad_hook",
            "torch.nn.modules.module.Module.register_*backward*_hook",
            "torch.nn.modules.module.register_module_*backward*_hook",
        ),
        "modes are each thread's own, and what a program's function raises in the engine's threads ends the process",
    ),
    Replaced(
        "simulator.cuda",
        (
            "torch.amp.autocast_mode.autocast.__init__",
            "torch.is_autocast_enabled",
            "torch.get_autocast_*dtype",
            "torch.set_autocast_*",
            "torch.amp.autocast_mode.is_autocast_available",
            "torch.amp.is_autocast_available",
        ),
        "read the device type in C++",
    ),
    Replaced(
        "simulator.uncompiled",
        (
            "torch._compile._disable_dynamo",
            "torch._dynamo",
            "torch._dynamo.reset",
            "torch.compile",
            "torch.compiler.cudagraph_mark_step_begin",
            "torch.nn.modules.module.Module.compile",
        ),
        "nothing is compiled here, and the compiler takes as long to load as torch",
    ),
    Replaced(
        "simulator.replicas",
        (
            "torch.nn.parallel.distributed.DistributedDataParallel.__init__",
            "torch.nn.parallel.distributed.DistributedDataParallel.register_comm_hook",
            "torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook",
            "torch.nn.parallel.distributed._verify_param_shape_across_processes",
        ),
        "its reducer expects results that the `fake` process group does not have, and takes one hook only",
    ),
    Replaced(
        "simulator.replicas",
        (
            "torch.distributed.fsdp._optim_utils._map_param_key_to_optim_keys",
            "torch.distributed.fsdp._optim_utils._allgather_state_info",
        ),
        "FSDP1 asks other ranks for the optimizer state of what this one has nothing of",
    ),
    Replaced(
        "simulator.world, simulator.collectives",
        (
            *(f"{_C10D}.{name}" for name in ("rendezvous", "default_pg_nccl_timeout", "_new_process_group_helper")),
            f"{_C10D}.*_object*",
            *(f"{_C10D}.{name}" for name in ("all_gather", "all_gather_into_tensor", "gather", "scatter")),
            *(f"{_C10D}.{name}" for name in ("all_reduce", "reduce", "reduce_scatter*", "all_to_all_single")),
            *(f"{_C10D}.{name}" for name in ("monitored_barrier", "is_nccl_available", "ProcessGroupNCCL")),
            "torch.distributed.ProcessGroupNCCL",
            "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
        ),
        "the other ranks do not exist: what reads results back would wait, or see what no real run sees",
    ),
    Replaced(
        "command.graphs, command.libraries, command.launchers",
        (
            "torch.optim.lbfgs.LBFGS.step",
            "torch.distributed.launcher.api.launch_agent",
            "torch.multiprocessing.spawn.start_processes",
        ),
        "a command runs as rank 0 alone, captures graphs without CUDA, and has losses without values",
    ),
)


class MissingInTorch(RuntimeError):
    """This version of torch lacks what the simulated GPU replaces; one line."""


class Replacements(ExitStack):
    """Attributes of torch that are others within the context."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add one that is missing."""
        _entry_of(owner, name)
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a function by one that gets it as its first argument."""
        before = original(owner, name)

        @functools.wraps(before)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(before, *args, **kwargs)

        self.set(owner, name, wrapped)


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute, or add one that is missing, for as long as the process lives."""
    _entry_of(owner, name)
    setattr(owner, name, value)


def extend(owner: Any, name: str, value: Any) -> None:
    """Add to a list, which others may have bound, for as long as the process lives."""
    original(owner, name).append(value)


def replace_everywhere(owner: ModuleType, name: str, value: Any) -> None:
    """Replace a module's function wherever torch's own modules have bound it by now."""
    before = original(owner, name)
    for module in [module for key, module in sys.modules.items() if key.startswith("torch.")]:
        if vars(module).get(name) is before:
            setattr(module, name, value)


def original(owner: Any, name: str) -> Any:
    """What is to be replaced.

    Raises:
        MissingInTorch: there is no such thing.
    """
    entry = _entry_of(owner, name)
    try:
        return getattr(owner, name)
    except AttributeError:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        raise MissingInTorch(
            f"torch {version} has no {qualified(owner, name)}, which the simulated GPU replaces as it is in torch "
            f"{', '.join(entry.checked_on)}: train under that version, or search on a real GPU"
        ) from None


def qualified(owner: Any, name: str) -> str:
    """An attribute's name in the register."""
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    return f"{owner.__name__}.{name}"


@functools.cache
def entry_of(name: str) -> Replaced | None:
    """The entry that a qualified name is in; None for none."""
    return next((entry for entry in REGISTER if any(fnmatchcase(name, one) for one in entry.names)), None)


def _entry_of(owner: Any, name: str) -> Replaced:
    found = entry_of(qualified(owner, name))
    if found is None:
        raise LookupError(f"{qualified(owner, name)} is replaced without an entry in {__name__}.REGISTER")
    return found
