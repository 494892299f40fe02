"""Operators that CUDA runs in its own way: kernels and shapes of its own, and what autograd's engine does in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import _meta_registrations, nn
from torch._library.custom_ops import OPDEFS
from torch._prims_common import suggest_memory_format
from torch.autograd.graph import _engine_run_backward

from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.device.base import DEVICE_TYPE, Call, library
from gpumem_tui.simulator.torch_internals import original, replace_everywhere
from gpumem_tui.step.phases import MarkedEngine
from gpumem_tui.step.sites import callers
from gpumem_tui.text import minor_of

_ONE_KERNEL = ("silu_backward", "mish_backward")
"""ops with both a composite and a CUDA kernel of their own (native_functions.yaml, `CompositeImplicitAutograd` next to
`CUDA`), as far as training meets them. Composed, they would ask for intermediate results that CUDA never holds."""

_FUSED_STEPS = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
"""Optimizer steps in one kernel, which change their arguments and give nothing; torch lacks shape functions of some."""


def register(read: Callable[[torch.Tensor], Any]) -> None:
    """Keep these ops whole on the simulated device, and have shape functions take it for CUDA. Call once per process.

    Args:
        read: gives the value of a tensor of one element where no mode is asked for it, as in ``torch.tensor([x])``.
    """
    aten = library("aten")
    for name in _ONE_KERNEL:
        aten.impl(name, _whole(getattr(torch.ops.aten, name).default), "AutogradPrivateUse1")
    known = set(torch._C._dispatch_get_all_op_names())
    steps = [overload for name in _FUSED_STEPS for overload in (name, f"{name}.tensor_lr")]
    for overload, shape in {**dict.fromkeys(steps, _in_place), **_SHAPES}.items():
        name = f"aten::{overload}"
        if name in known and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            aten.impl(overload, shape, "Meta")
    aten.impl("_local_scalar_dense", read, "PrivateUse1")
    aten.impl("ctc_loss.Tensor", _ctc_loss, "AutogradPrivateUse1")
    hint = original(_meta_registrations, "device_hint")
    replace_everywhere(_meta_registrations, "device_hint", lambda tensor: _as_cuda(hint(tensor)))


def _as_cuda(device_type: str) -> str:
    """Return the device type by which shape functions choose layouts, such as cuSOLVER's of singular vectors."""
    return "cuda" if device_type == DEVICE_TYPE else device_type


def convolution_layout(images: torch.Tensor, weight: torch.Tensor, _backend: object) -> torch.memory_format:
    """Return cuDNN's layout (`cudnn_conv_suggest_memory_format`): channels last if an argument is, but for float64."""
    for layout, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        suggested = layout in (suggest_memory_format(images), suggest_memory_format(weight))
        if suggested and weight.dim() == dimensions and torch.float64 not in (images.dtype, weight.dtype):
            return layout
    return torch.contiguous_format


def _in_place(*_: Any, **__: Any) -> None:
    """Return nothing, as operators do that only change their arguments."""


def _ctc_loss(
    log_probabilities: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor, wanted: torch.Tensor, *args: Any
) -> Any:
    """Do as `ctc_loss` (LossCTC.cpp): lengths of the host are lists, which are not divided by where a mode is on."""
    if inputs.is_cpu and wanted.is_cpu:
        return torch.ops.aten.ctc_loss.IntList(log_probabilities, targets, inputs.tolist(), wanted.tolist(), *args)
    return torch.ops.aten.ctc_loss.Tensor.decompose(log_probabilities, targets, inputs, wanted, *args)


def _like_second(_gradient: torch.Tensor, log_probabilities: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the gradient of the log probabilities: `ctc_loss_backward` in aten/src/ATen/native/cuda/LossCTC.cu."""
    return torch.empty_like(log_probabilities, memory_format=torch.contiguous_format)


_GRU_WORKSPACE, _GRU_GATES = 5, 3
"""Values per hidden unit that a GRU cell keeps for backward, and its gates (aten/src/ATen/native/cuda/RNN.cu)."""


def _gru_cell(
    _input_gates: torch.Tensor, _hidden_gates: torch.Tensor, hidden: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new hidden state and the cell's workspace."""
    rows, units = hidden.shape
    made = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return made, hidden.new_empty(rows, units * _GRU_WORKSPACE)


def _gru_cell_backward(gradient: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Return gradients of the input's and the hidden state's gates, of the hidden state, and of both biases."""
    rows, units = gradient.shape
    gates = [workspace.new_empty(rows, units * _GRU_GATES) for _ in range(2)]
    biases = [workspace.new_empty(units * _GRU_GATES) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient, memory_format=torch.contiguous_format), *biases)


def _per_channel(images: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return statistics of each channel, in float32 of 16-bit images (ATen's native/cuda/Normalization.cu)."""
    dtype = torch.float32 if images.dtype in (torch.float16, torch.bfloat16) else images.dtype
    return tuple(images.new_empty(images.shape[1], dtype=dtype) for _ in range(count))


def _statistics(images: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Return mean and inverse deviation, of one rank's batch or of all: `SyncBatchNorm`'s forward."""
    return _per_channel(images, 2)


def _like_first(images: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(images)


def _reduced(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Return sums over the batch for the gradient of the images, and the gradients of weight and bias.

    Arguments are (gradient, images, mean, inverse deviation, weight, and whether each of the three is wanted).
    """
    _, images, _, _, weight, for_images, *for_parameters = args
    sums = _per_channel(images, 2) if for_images else (None, None)
    dtype = weight.dtype if weight is not None else None
    return (*sums, *(images.new_empty(images.shape[1], dtype=dtype) if wanted else None for wanted in for_parameters))


_SHAPES: dict[str, Callable[..., Any]] = {
    "_ctc_loss_backward": _like_second,
    "_ctc_loss_backward.Tensor": _like_second,
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _statistics,
    "batch_norm_elemt": _like_first,
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": _like_first,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""Results of CUDA's kernels for which torch has no shape function."""


def _grouped_product(args: Sequence[Any], _profile: Profile) -> torch.Tensor:
    """Return the result of `_grouped_mm`: (matrix, matrix, offsets or none, bias, result's type).

    CUDA multiplies what is not bfloat16 group by group, which torch's own shape function refuses; rows begin at whole
    16 bytes (`_grouped_mm_fallback` and `create_grouped_gemm_output_tensor` in aten/src/ATen/native/GroupedMMUtils.h).
    """
    left, right, offsets = (*args, None)[:3]
    dtype = (args[4] if len(args) > 4 else None) or left.dtype
    rows, columns = left.shape[-2], right.shape[-1]
    padded = -(-columns // (16 // dtype.itemsize)) * (16 // dtype.itemsize)
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 else offsets.shape[0]
        return torch.empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype, device="meta")
    return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device="meta")


GIVEN: dict[Any, Callable[[Sequence[Any], Profile], Any]] = {}
"""Operators of which torch's own shape function gives something else than CUDA."""

if hasattr(torch.ops.aten, "_grouped_mm"):  # since torch 2.8
    GIVEN[torch.ops.aten._grouped_mm.default] = _grouped_product


MADE: Mapping[Any, Callable[[Sequence[Any], Any], Any]] = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default: lambda _, result: result[:2],
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: (
        lambda args, result: (*result[6:8], *result[: 2 if args[4] else 1])
    ),
    torch.ops.aten.native_dropout.default: lambda _, result: result[::-1],
    torch.ops.aten._pack_padded_sequence.default: lambda _, result: result[:1],
}
"""By operator what of its results CUDA allocates, in its order, where that is not all as they come.

The efficient kernel leaves its random state on the host; cuDNN's has it first, and makes no logsumexp where no gradient
needs one (aten/src/ATen/native/transformers/cuda/attention.cu, cudnn/MHA.cpp). Dropout makes its mask first
(cuda/Dropout.cu, `dropout_cuda`). How many sequences of a batch still run at a step stays on the host.
"""


_WITHOUT_BODIES = ("aten", "prims", "gpumem_tui")
"""Namespaces of torch's own operators, and of ours, which stand for one kernel each."""


class Refused(Exception):
    """A library refuses what the program asks of it on a GPU.

    Attributes:
        error: what it raises.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


bodies: dict[str, Callable[..., Any]] = {}
"""Operators that run on CUDA although a library does not register them with torch, by name; of an overload,
``name.overload``."""


@lru_cache(None)
def may_have_body(func: Any) -> bool:
    """Return whether an operator may be a function of Python's: whether it is a library's or a program's own."""
    return func.namespace not in _WITHOUT_BODIES


def body_of(func: Any) -> Callable[..., Any] | None:
    """Return the function of Python that CUDA runs for an operator by `torch.library.custom_op`, or one of `bodies`."""
    name = func.name()
    made = OPDEFS.get(name)
    if made:
        body: Callable[..., Any] | None = made._backend_fns.get("cuda") or made._backend_fns.get(None)
        return body
    return bodies.get(name)


def _whole(op: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run


# In-place work of the autograd engine. Where a mode is active, the engine and some of its backward formulas leave
# their arguments alone (`isTensorSubclassLike`). On a GPU they write into a tensor that nobody else holds, so less is
# allocated.

Evaluation = tuple[int, int]
"""One backward formula at work: the backward pass and the sequence number of its node."""

_aten: Any = torch.ops.aten
_ADD: Any = _aten.add.Tensor
_INTO_ZEROS: Mapping[Any, Any] = {
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
}
"""Formulas that fill zeros of their own: `value_selecting_reduction_backward` (max, min, sort, topk, …) and
`index_backward` (torch/csrc/autograd/FunctionsManual.cpp), `gather_backward` (TensorAdvancedIndexing.cpp)."""

_INTO_OWN_RESULT: Mapping[str, Mapping[Any, Any]] = {
    "BinaryCrossEntropyWithLogitsBackward0": {
        _aten.sub.Tensor: _aten.sub_.Tensor,
        _aten.mul.Tensor: _aten.mul_.Tensor,
    }
}
"""Formulas that continue in their first result, by the name of their node: `binary_cross_entropy_with_logits_backward`
(FunctionsManual.cpp)."""

_STARTS_BACKWARD = frozenset((_engine_run_backward.__code__, MarkedEngine.run_backward.__code__))
"""The last Python code before the engine's own."""

IN_PLACE = frozenset((_ADD, *_INTO_ZEROS, *(func for table in _INTO_OWN_RESULT.values() for func in table)))
"""Operators that a GPU may run in place in backward: see `in_place`."""


def evaluation() -> Evaluation | None:
    """Return the backward formula that is at work, None outside of backward."""
    backward = torch._C._current_graph_task_id()
    if backward == -1:
        return None
    node = torch._C._current_autograd_node()
    return backward, node._sequence_nr() if node is not None else -1


def in_place(call: Call, made_in: Callable[[torch.Tensor], Evaluation | None]) -> Any:
    """Return the operator that a GPU would run instead of one of `IN_PLACE`: its in-place form, or itself.

    Args:
        call: of such an operator.
        made_in: the formula that made a tensor's storage.
    """
    func, args, caller = call.func, call.args, call.caller
    if torch.is_grad_enabled():
        return func
    if caller is not None and caller.f_code not in _STARTS_BACKWARD:
        return func
    now = evaluation()
    if now is None:
        return func
    is_own = made_in(args[0]) == now  # then nothing outside of the formula holds it
    if func is _ADD:
        # `InputBuffer::accumulate`: a gradient that waits in the engine was made by another formula than the one at
        # work, or by this one if it gives two to one node.
        if (is_own and not _gives_twice()) or not _is_accumulated(call):
            return func
        return _aten.add_.Tensor
    twin = _INTO_ZEROS.get(func) or _INTO_OWN_RESULT.get(torch._C._current_autograd_node().name(), {}).get(func)
    return twin if twin is not None and is_own else func


def _gives_twice() -> bool:
    """Return whether the formula at work has two gradients for one argument, as that of ``x * x``."""
    node = torch._C._current_autograd_node()
    edges = [edge for edge in node.next_functions if edge[0] is not None] if node is not None else []
    return len(set(edges)) < len(edges)


def _is_accumulated(call: Call) -> bool:
    """Return `can_accumulate_inplace` (torch/csrc/autograd/input_buffer.cpp) of two gradients of one shape."""
    waiting, arrived = call.args
    return (
        isinstance(arrived, torch.Tensor)
        and waiting.shape == arrived.shape
        and waiting.dtype == arrived.dtype
        and _is_dense(waiting)
        and _is_held_once(call)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie side by side without gaps or overlaps, in any order of dimensions."""
    run = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != run:
                return False
            run *= size
    return True


def _references(args: tuple[Any, ...]) -> int:
    return sys.getrefcount(args[0])


_MORE = int(minor_of(torch.__version__) >= (2, 10))  # since then a tensor counts the Python object that represents it
_TENSOR_REFERENCES, _STORAGE_REFERENCES, _PYTHON_REFERENCES = 4, 1 + _MORE, _references((object(),)) + 1 + _MORE
"""References to a tensor that the engine alone holds, as seen here: the others are its way to Python."""


def _is_held_once(call: Call) -> bool:
    args, storage = call.args, call.args[0].untyped_storage()
    by_us = sum(one is args[0] for one in call.shown)
    return (
        args[0]._use_count() <= _TENSOR_REFERENCES
        and torch._C._storage_Use_Count(storage._cdata) <= _STORAGE_REFERENCES
        and _references(args) <= _PYTHON_REFERENCES + by_us
    )


_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_OF_LINEAR = tuple(str(Path(nn.__file__).parent / name) for name in ("modules/linear.py", "functional.py"))


def adds_bias(args: Sequence[Any], caller: FrameType | None) -> bool:
    """Return whether a sum is of a linear layer's product and its bias, which on a GPU is in place.

    This is the case of an input that is not contiguous (aten/src/ATen/native/Linear.cpp, `linear`); where a Python mode
    is active, torch makes another tensor of the product's size.
    """
    if len(args) != 2 or not isinstance(args[1], torch.Tensor) or args[1].dim() != 1 or args[0].dim() < 3:
        return False
    places = (frame.f_code.co_filename for frame in callers(caller))
    return next((place for place in places if not place.startswith(_OURS)), "") in _OF_LINEAR
