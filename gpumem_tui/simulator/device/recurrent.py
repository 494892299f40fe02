"""LSTM, GRU and plain recurrent layers as cuDNN runs them: one operator for all layers and steps of a sequence.

Follows aten/src/ATen/native/RNN.cpp (when cuDNN is asked), aten/src/ATen/native/cudnn/RNN.cpp (what is allocated) and
aten/src/ATen/cudnn/AutocastRNN.cpp. Backward's needs are in cuDNN's reserve, the size of which is not documented:
see `reserve_bytes` for the assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.backends.cudnn.rnn as cudnn_rnn  # spelt as torch does: in 2.10 the package has something else of that name

from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.rules import GivenBack, Made, Taken
from gpumem_tui.simulator.device.base import DeviceParts, library

_aten: Any = torch.ops.aten
_RUN, _RUN_BACKWARD = _aten._cudnn_rnn.default, _aten._cudnn_rnn_backward.default
_MAKE_DROPOUT_STATE: Any = _aten._cudnn_init_dropout_state.default

NOTE = (
    "recurrent layers: cuDNN's reserve is as measured with cuDNN 6 to 9: of a layer's step and unit 5 values for LSTM, "
    "6 for GRU, 1 more between layers; assumed is 1 for a plain one. Its workspace was measured for an LSTM of 2 layers"
)

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_LSTM = 2
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
"""Values a step and unit that cuDNN keeps for backward, by its number of the layer's kind.

From what was printed of it: 736,000,000 bytes for LSTM and 864,000,000 for GRU in pytorch/pytorch#2895 (by the counts
of parameters 4 layers of 320 units and 123 inputs; both fit 25,000 steps times sequences), 801,177,600 for GRU of 800
units in both directions over 326 x 64 (SeanNaren/deepspeech.pytorch#172), and with cuDNN 8 24,576,016 for LSTM of 768
units over 50 x 64 in float16 (pytorch's benchmarks/dynamo/microbenchmarks/operator_inp_logs/torchbench_train/
tts_angular_training.txt). For plain layers nothing was; one value agrees with the device totals of #2895.
"""

_STATES_KEPT, _RESERVE_TAIL_BYTES = 2, 256
"""States kept for each layer, sequence and unit, and bytes in all. cuDNN 9.19 kept 185,073,920 bytes for an LSTM of 2
layers with dropout, 1,024 units and inputs, 32 sequences of 128 steps on an H200: 11 values a step and unit, 2 more for
    each layer, sequence
and unit, and 256 bytes. With cuDNN 8 it had no such states, and 16 bytes."""

_LIBRARY_WORKSPACE_BYTES = 8 * MIB
"""The least of cuDNN's workspace: OpenCV's tests print 8,389,472 bytes for layers of a few units."""

_STATES_AT_WORK, _WORKSPACE_TAIL_BYTES = 10, 512
"""The same LSTM took a workspace of 203,948,544 bytes in each of three passes: its matrices, as in all that was printed
with older versions, 4 values a step and unit for each layer's gates, and 10 more for each layer, sequence and unit."""

_DROPOUT_STATE_BYTES = 48 * 1024
"""Bytes of random states a multiprocessor, assumed: 1,024 threads, 48 bytes each (`curandStateXORWOW`). RNN.cpp calls
all of them "slightly over 2MB"."""

_BFLOAT16_SINCE = (2, 10), 91300
"""The torch and its cuDNN since which that runs bfloat16, on Ampere and later (pytorch/pytorch#164411)."""


def register(current: Callable[[], DeviceParts]) -> None:
    """Run recurrent layers of the simulated device as cuDNN would. Call once per process.

    Args:
        current: the GPU that is simulated now.
    """
    aten = library("aten")
    for name, mode in _MODES.items():
        for overload in ("input", "data"):
            aten.impl(f"{name}.{overload}", _layer(name, overload, mode, current), "AutogradPrivateUse1")


def _layer(name: str, overload: str, mode: int, current: Callable[[], DeviceParts]) -> Callable[..., Any]:
    op = getattr(getattr(_aten, name), overload)

    def run(values: torch.Tensor, *args: Any) -> Any:
        """Run ``(input, hidden, parameters, has_biases, layers, dropout, train, bidirectional, batch_first)``.

        For packed sequences these are ``(data, batch_sizes, hidden, parameters, …, bidirectional)``.
        """
        gpu = current()
        if not _is_cudnns(values, gpu):
            return op.decompose(values, *args)
        gpu.notes[NOTE] = None
        steps: list[int] = []
        if overload == "data":
            steps, args = args[0].tolist(), (*args[1:], False)
        state, weights, _, layers, dropout, train, bidirectional, batch_first = args
        hidden, cell = state if mode == _LSTM else (state, None)
        units = (hidden if cell is None else cell).shape[-1]
        projected = hidden.shape[-1] if hidden.shape[-1] != units else 0
        count = layers * (1 + bidirectional)
        layout = _layout(weights, count, _GATES[mode], units)
        states = _dropout_state(dropout, train, values, gpu)
        flat = _flat_buffer(weights, layout)
        given, weights, flat = _autocast((values, hidden, cell), weights, flat, layout)
        made = _aten._cudnn_rnn(
            given[0], weights, len(weights) // count, flat, *given[1:], mode, units, projected, layers, batch_first,
            dropout, train, bidirectional, steps, states,
        )  # fmt: skip
        return tuple(made[: 3 if mode == _LSTM else 2])

    return run


def _is_cudnns(values: torch.Tensor, gpu: DeviceParts) -> bool:
    """Return whether cuDNN is asked (`use_cudnn`); under autocast by the types before it casts."""
    if not torch.backends.cudnn.enabled or not values.numel():
        return False
    if values.dtype is torch.bfloat16:
        version, cudnn = _BFLOAT16_SINCE
        brought = gpu.profile.version >= version and gpu.profile.cudnn >= cudnn
        return gpu.gpu.compute_capability >= (8, 0) and brought
    return values.dtype in (torch.float16, torch.float32, torch.float64)


def _dropout_state(dropout: float, train: bool, values: torch.Tensor, gpu: DeviceParts) -> torch.Tensor | None:
    """Return the random states between layers: made once per process and kept (`get_dropout_state`)."""
    if not train or not dropout:
        return gpu.dropout_state
    if gpu.dropout_state is None:
        device = values.device
        torch.empty((), dtype=torch.int64, device=device).random_()
        gpu.dropout_state = _aten._cudnn_init_dropout_state(dropout, train, 0, dtype=torch.uint8, device=device)
        gpu.tag(Bucket.OTHER, [gpu.dropout_state])
    return gpu.dropout_state


# Weights in one buffer


@dataclass(frozen=True)
class _Layout:
    """The place of each weight in cuDNN's one buffer, in elements: matrices first, then biases."""

    offsets: tuple[int, ...]
    elements: int


def _layout(weights: Sequence[torch.Tensor], layers: int, gates: int, units: int) -> _Layout:
    """Lay out a buffer of two biases a gate, though the layer may have none (`CUDNN_RNN_DOUBLE_BIAS`).

    `layers` are counted once for each direction.
    """
    offsets = [0] * len(weights)
    at = 0
    for dimensions in (2, 1):
        for number, weight in enumerate(weights):
            if weight.dim() == dimensions:
                offsets[number], at = at, at + weight.numel()
    has_biases = any(weight.dim() == 1 for weight in weights)
    return _Layout(tuple(offsets), at if has_biases else at + 2 * gates * units * layers)


def answers() -> dict[tuple[Any, str], Any]:
    """Return what replaces what `RNNBase.flatten_parameters` asks of torch, by owner and name."""
    return {
        (torch, "_use_cudnn_rnn_flatten_weight"): lambda: True,
        (torch, "_cudnn_rnn_flatten_weight"): flatten,
        (cudnn_rnn, "get_cudnn_mode"): lambda mode: _MODES[mode.lower()],
    }


def flatten(
    weights: Sequence[torch.Tensor], per_layer: int, _inputs: int, mode: int, units: int, *_: Any
) -> torch.Tensor:
    """Put all weights of a layer into one buffer, each a part of it, as `torch._cudnn_rnn_flatten_weight` does."""
    layout = _layout(weights, len(weights) // per_layer, _GATES[mode], units)
    buffer = torch.zeros(layout.elements, dtype=weights[0].dtype, device=weights[0].device)
    for weight, part in zip(weights, _parts(buffer, weights, layout), strict=True):
        part.copy_(weight)
        weight.set_(part)  # type: ignore[call-overload]
    return buffer


def _parts(buffer: torch.Tensor, weights: Sequence[torch.Tensor], layout: _Layout) -> list[torch.Tensor]:
    found = zip(weights, layout.offsets, strict=True)
    return [buffer[offset : offset + one.numel()].view(one.shape) for one, offset in found]


def _flat_buffer(weights: Sequence[torch.Tensor], layout: _Layout) -> torch.Tensor | None:
    """Return the one tensor that all weights are parts of; None where they lie apart (`try_get_weight_buf`)."""
    first = weights[0]
    storage = first.untyped_storage()
    for weight, offset in zip(weights, layout.offsets, strict=True):
        if weight.untyped_storage()._cdata != storage._cdata or weight.storage_offset() != offset:
            return None
    if storage.nbytes() < layout.elements * first.element_size():
        return None
    return first.detach().as_strided((layout.elements,), (1,), 0)


def _autocast(
    given: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
    flat: torch.Tensor | None,
    layout: _Layout,
) -> tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor], torch.Tensor | None]:
    """Cast to float16, under any type of autocast, the weights in a new buffer (`_cudnn_rnn_cast_reflatten`)."""
    if not torch.is_autocast_enabled(weights[0].device.type):
        return given, weights, flat
    if weights[0].dtype not in (torch.float16, torch.float64):
        flat = torch.zeros(layout.elements, dtype=torch.float16, device=weights[0].device)
        parts = zip(_parts(flat, weights, layout), weights, strict=True)
        weights = [part.detach().copy_(weight) for part, weight in parts]
    cast = [one if one is None or one.dtype is torch.float64 else one.to(torch.float16) for one in given]
    return cast, weights, flat


# The operators' results


@dataclass(frozen=True)
class _Call:
    """The arguments of `_cudnn_rnn` that sizes follow from: from ``mode`` on those of its signature."""

    values: torch.Tensor
    weights: Sequence[torch.Tensor]
    mode: int
    units: int
    projected: int
    layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    steps: Sequence[int]

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def layout(self) -> _Layout:
        return _layout(self.weights, self.layers * self.directions, _GATES[self.mode], self.units)

    @property
    def is_transposed(self) -> bool:
        """Return whether the sequences come first, which cuDNN has second."""
        return self.batch_first and not self.steps

    @property
    def states(self) -> int:
        """Steps and sequences, shorter ones counted to the longest one's end: cuDNN asks for no more than that."""
        return len(self.steps) * self.steps[0] if self.steps else math.prod(self.values.shape[:2])

    @property
    def workspace_bytes(self) -> int:
        """Bytes that cuDNN works with, see `_STATES_AT_WORK`."""
        matrices = sum(weight.numel() for weight in self.weights if weight.dim() == 2)
        at_work = _GATES[self.mode] * self.states + _STATES_AT_WORK * self.sequences
        values = matrices + self.layers * self.directions * self.units * at_work
        return max(_LIBRARY_WORKSPACE_BYTES, values * self.values.element_size()) + _WORKSPACE_TAIL_BYTES

    @property
    def sequences(self) -> int:
        return self.steps[0] if self.steps else self.values.shape[0 if self.batch_first else 1]

    def in_order(self, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of a shape, which is in memory as cuDNN has it."""
        if self.is_transposed:
            return _like(self.values, (shape[1], shape[0], *shape[2:])).transpose(0, 1)
        return _like(self.values, shape)


def reserve_bytes(call: _Call) -> int:
    """Return what cuDNN keeps of a forward for backward, as far as measurements tell: see `_KEPT`.

    Besides the values of each layer its output, but for the last one's; an assumption is the value before a projection.
    """
    kept = _KEPT[call.mode] * call.units
    if call.projected:
        kept += call.units
    values = call.layers * kept + (call.layers - 1) * (call.projected or call.units)
    at_ends = call.sequences * call.layers * call.units * _STATES_KEPT
    every = call.directions * (call.states * values + at_ends)
    return every * call.values.element_size() + _RESERVE_TAIL_BYTES


def _run(args: Sequence[Any], _profile: Profile) -> tuple[torch.Tensor | None, ...]:
    """Return tensors of the shapes of `_cudnn_rnn`'s results: output, states, cells, reserve, buffer of the weights."""
    values, weights, _, flat, hidden, cell = args[:6]
    call = _Call(values, weights, *args[6:15])
    width = (call.projected or call.units) * call.directions
    shape = (*values.shape[:-1], width)
    output = call.in_order(shape)
    if flat is None:
        flat = _like(values, (call.layout.elements,))
    reserve = torch.empty(reserve_bytes(call) if call.train else 0, dtype=torch.uint8, device="meta")
    cells = _like(hidden, (0,)) if cell is None else _like(cell, cell.shape)
    return output, _like(hidden, hidden.shape), cells, reserve, flat


def _run_backward(args: Sequence[Any], _profile: Profile) -> tuple[Any, ...]:
    """Return the gradients of input, states and cells, and of each weight in one buffer (`_cudnn_rnn_backward`)."""
    values, weights, _, flat, hidden, cell = args[:6]
    call = _Call(values, weights, *args[10:19])
    of_values = call.in_order(values.shape)
    of_states = _like(hidden, hidden.shape), None if cell is None else _like(cell, cell.shape)
    if not args[-1][3]:
        return of_values, *of_states, []
    return of_values, *of_states, _parts(_like(flat, (call.layout.elements,)), weights, call.layout)


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")


SHAPES: dict[Any, Callable[[Sequence[Any], Profile], Any]] = {
    _RUN: _run,
    _RUN_BACKWARD: _run_backward,
    _MAKE_DROPOUT_STATE: lambda _args, profile: torch.empty(
        profile.multiprocessors * _DROPOUT_STATE_BYTES, dtype=torch.uint8, device="meta"
    ),
}
"""The results of cuDNN's operators, as tensors of the results' shapes; torch's own function leaves out the reserve."""


# Their scratch while they run


def scratch(args: Sequence[Any], _profile: Profile) -> list[Taken]:
    """Take the workspace of `_cudnn_rnn`, and the input in cuDNN's order where it comes in another; make its results.

    Its reserve is the last of them (aten/src/ATen/native/cudnn/RNN.cpp).
    """
    call = _Call(args[0], args[1], *args[6:15])
    return [*_copied(args[0], call), Made(4), Made(0), Made(1), Made(2), call.workspace_bytes, Made(3)]


def backward_scratch(args: Sequence[Any], _profile: Profile) -> list[Taken]:
    """Take what `_cudnn_rnn_backward` takes: zeros for gradients that did not come, then as forward, twice.

    Once for the gradient of the input, once for those of the weights.
    """
    values, hidden, cell, output, of_output, of_hidden, of_cell = args[0], *args[4:10]
    call = _Call(values, args[1], *args[10:19])
    zeros = [
        of.nbytes
        for of, gradient in ((output, of_output), (hidden, of_hidden), (cell, of_cell))
        if of is not None and gradient is None
    ]
    copies = _copied(values, call)
    for_input = [*copies, *(_copied(of_output, call) if of_output is not None else [])]
    taken: list[Taken] = [*zeros, *for_input, Made(0), Made(1), Made(2), call.workspace_bytes]
    taken += [GivenBack(position) for position in reversed(range(len(zeros), len(taken)))]
    return [*taken, *copies, Made(3), call.workspace_bytes] if args[-1][3] else taken


def _copied(tensor: torch.Tensor, call: _Call) -> list[int]:
    order = list(range(tensor.dim()))
    if call.is_transposed:
        order = [1, 0, *order[2:]]
    run = 1
    for number in reversed(order):
        size, stride = tensor.shape[number], tensor.stride(number)
        if size != 1 and stride != run:
            return [tensor.numel() * tensor.element_size()]
        run *= size
    return []
