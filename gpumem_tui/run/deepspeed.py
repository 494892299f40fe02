"""DeepSpeed on the simulated GPU: its own kernels, and the names of what its ZeRO keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gpumem_tui.importing import after_import
from gpumem_tui.memory import Bucket
from gpumem_tui.step import GATHERED, REDUCE_BUCKETS
from gpumem_tui.step.walking import tensors_in
from gpumem_tui.workload.extensions import CUDA_SOURCES, CompiledForCuda

_Name = Callable[[Bucket, Iterable[Any], str], None]


def follow_deepspeed(note: Callable[[str], None], name: _Name) -> None:
    """Follow DeepSpeed once the program imports it.

    Args:
        note: called with a line to be known of the result.
        name: called with a bucket, tensors, and the part of the bucket that they are.
    """
    _answer_kernels(note)
    _name_what_zero_keeps(name)


_KERNELS = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    "cpu_adam": ("create_adam", "adam_update", "adam_rollback", "destroy_adam"),
    "cpu_lion": ("create_lion", "lion_update", "destroy_lion"),
    "cpu_adagrad": ("create_adagrad", "adagrad_update", "destroy_adagrad"),
}
"""By extension its functions that update the tensors they are given in place and take no device memory
(deepspeed/ops/csrc, 0.19: `multi_tensor_apply.cuh` passes its lists as arguments of the kernel)."""


def _answer_kernels(note: Callable[[str], None]) -> None:
    """Have DeepSpeed's optimizers find the kernels that it would compile with CUDA's compiler, which is not there."""

    def do_nothing(*_: object, **__: object) -> None:
        note("DeepSpeed's optimizer kernels are neither compiled nor run: they update in place")

    def follow(module: Any) -> None:
        load = module.OpBuilder.load

        @functools.wraps(load)
        def answered(builder: Any, *args: Any, **kwargs: Any) -> Any:
            functions = _KERNELS.get(builder.name)
            if functions is None:
                sources = [source for source in builder.sources() if str(source).endswith(CUDA_SOURCES)]
                if sources:
                    raise CompiledForCuda(f"DeepSpeed's operator {builder.name}", sources)
                return load(builder, *args, **kwargs)
            return SimpleNamespace(**dict.fromkeys(functions, do_nothing))

        module.OpBuilder.load = answered

    after_import("deepspeed.ops.op_builder.builder", follow)


# ZeRO's buffers

MASTER_WEIGHTS = "fp32 master weights"
GRADIENT_PARTITIONS = "gradient partitions"
OFFLOAD_BUFFERS = "offload buffers"

_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
_STANDING = (
    (Bucket.PARAMETERS, "", ("bit16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer")),
    (Bucket.OPTIMIZER, MASTER_WEIGHTS, _MASTERS),
    (Bucket.GRADIENTS, GRADIENT_PARTITIONS, ("averaged_gradients", "grad_partitions_flat_buffer")),
    (Bucket.TEMPORARY, OFFLOAD_BUFFERS, ("temp_grad_buffer_for_gpu_offload",)),
)
"""Attributes of `DeepSpeedZeroOptimizer` and `DeepSpeedZeroOptimizer_Stage3` of DeepSpeed 0.19 (runtime/zero/)."""


def _name_what_zero_keeps(name: _Name) -> None:
    """Have what DeepSpeed's ZeRO keeps be named as it comes and goes.

    Args:
        name: called with a bucket, tensors, and the part of the bucket that they are.
    """

    def standing(optimizer: Any) -> None:
        held = vars(optimizer)
        for bucket, part, attributes in _STANDING:
            name(bucket, tensors_in([held.get(attribute) for attribute in attributes]), part)
        masters = tensors_in([held.get(attribute) for attribute in _MASTERS])
        name(Bucket.GRADIENTS, [master.grad for master in masters if master.grad is not None], GRADIENT_PARTITIONS)

    def arrived(optimizer: Any, parameter: torch.Tensor, *_: Any) -> None:
        """Name a gradient that backward has made, before it goes to a bucket, and the buckets that are live then."""
        buckets = vars(optimizer).get("ipg_buckets", {})
        name(Bucket.TEMPORARY, tensors_in([bucket.buffer for bucket in buckets.values()]), REDUCE_BUCKETS)
        if parameter.grad is not None:
            name(Bucket.GRADIENTS, [parameter.grad], "")

    def fetched(_: Any, __: Any, module: nn.Module, *___: Any, **____: Any) -> None:
        name(Bucket.TEMPORARY, module._parameters.values(), GATHERED)

    def reduced(flat: Any, *_: Any, **__: Any) -> None:
        name(Bucket.TEMPORARY, [flat], REDUCE_BUCKETS)

    def zero(optimizer: Any) -> None:
        _call_after(optimizer, "__init__", lambda _, self, *__, **___: standing(self))
        _call_after(optimizer, "allreduce_bucket", reduced)
        _call_before(optimizer, "step", lambda self, *_, **__: standing(self))
        _call_before(optimizer, "reduce_independent_p_g_buckets_and_remove_grads", arrived)

    after_import("deepspeed.runtime.zero.stage_1_and_2", lambda module: zero(module.DeepSpeedZeroOptimizer))
    after_import("deepspeed.runtime.zero.stage3", lambda module: zero(module.DeepSpeedZeroOptimizer_Stage3))
    after_import(
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        lambda module: _call_after(module.PartitionedParameterCoordinator, "fetch_sub_module", fetched),
    )


def _call_before(owner: Any, method: str, call: Callable[..., None]) -> None:
    wrapped = getattr(owner, method)

    @functools.wraps(wrapped)
    def called(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return wrapped(*args, **kwargs)

    setattr(owner, method, called)


def _call_after(owner: Any, method: str, call: Callable[..., None]) -> None:
    """Have `call` get what a method returned, and what it was called with."""
    wrapped = getattr(owner, method)

    @functools.wraps(wrapped)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        call(result, *args, **kwargs)
        return result

    setattr(owner, method, called)
