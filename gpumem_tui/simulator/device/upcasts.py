"""Follows what comes of norms and embeddings in fp32 within a model whose linear layers compute in 16 bits.

PEFT's `prepare_model_for_kbit_training` casts all weights that are not packed to fp32 (peft/utils/other.py), and
programs cast norms by hand. Such a layer gives fp32, what is added to that is fp32, and linear layers on packed weights
give what they are given: bitsandbytes#1569 measured 81.1 GB with it and 63.1 without; TRL casts no longer (trl#4457).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from gpumem_tui.causes import Cause
from gpumem_tui.simulator.device import autocast
from gpumem_tui.simulator.device.base import DeviceParts
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.step import UPCASTS
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.walking import tensors_in

_NORM = re.compile(r"Norm|Embedding")
"""In the names of classes of norms and embeddings, libraries' own among them."""

_PACKED_BUFFERS = ("qweight", "W_q")
"""Under which GPTQ, AWQ and HQQ keep packed weights as buffers."""

_FP32_ANYWAY = re.compile(r"softmax|loss")
"""In the names of operators that models run in fp32 for any input."""


class Upcasts:
    """The fp32 norms and embeddings of 16-bit models on one device, and what comes of them.

    Attributes:
        are_there: whether a model has any, so that operators are to be followed.
    """

    def __init__(self, gpu: DeviceParts, memory: DeviceMemory) -> None:
        self._gpu, self._memory = gpu, memory
        self.are_there = False
        self._weights: set[int] = set()
        self._names: list[str] = []
        self._made_at = ""
        self._are_frozen = True
        self._dtype = torch.bfloat16
        self._are_followed = False

    def look(self, model: nn.Module) -> None:
        """Look for fp32 norms and embeddings in a model that is called for the first time."""
        for name, weight, dtype in upcast_weights(model):
            number = self._memory.allocation_of(weight)
            if number is None or number in self._weights:
                continue
            if not self.are_there:
                self.are_there = True
                register_module_forward_hook(self._leave_module)
            self._weights.add(number)
            self._names.append(name)
            self._made_at = self._made_at or self._gpu.recorder.place_of(number)
            self._are_frozen &= not weight.requires_grad
            self._dtype = dtype

    def follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note what an operator gives in fp32 of such a weight, or of what came of one; not what it gives so anyway."""
        is_forward = torch.is_grad_enabled() or not in_backward()
        if not is_forward or not self._gpu.sites.in_module or autocast.is_in_fp32() or _FP32_ANYWAY.search(name):
            return
        made = [one for one in tensors_in(result) if one.dtype is torch.float32]
        if made and any(map(self._is_one, tensors_in(args))):
            self._name(made)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a layer gives in fp32 as it was given such, though its weights are not."""
        made = output if isinstance(output, torch.Tensor) else None
        if made is None or made.dtype is not torch.float32 or not _has_others(module):
            return
        if any(map(self._is_one, tensors_in(args))):
            self._name([made])

    def _is_one(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype is not torch.float32:
            return False
        number = self._memory.allocation_of(tensor)
        return number is not None and (number in self._weights or self._gpu.recorder.parts.get(number) == UPCASTS)

    def _name(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            number = self._memory.allocation_of(tensor)
            if number is not None and number not in self._weights and number not in self._gpu.recorder.parts:
                self._gpu.recorder.name(number, UPCASTS)
                self._are_followed = True

    def causes(self) -> Iterator[Cause]:
        """Yield that fp32 norms and embeddings make activations fp32; bytes and line go by the batch size."""
        if not self._are_followed:
            return
        kind = str(self._dtype)
        remedy = f"keep them in 16 bits (`.to({kind})`)"
        if self._are_frozen:
            remedy = f"cast them back once the model is prepared: `for p in …: p.data = p.data.to({kind})`"
        which = f"{len(self._names):,} norms and embeddings are in fp32 ({self._made_at}), as {self._names[0]}"
        words = f"{which}, and what follows them is too, in a model whose linear layers compute in 16 bits; {remedy}"
        yield Cause("upcasts", words)


def upcast_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
    """Yield the fp32 weights of norms and embeddings whose nearest linear layers are in 16 bits or packed.

    These are the matrices of the smallest module around that has any: the frozen ones if there are, as adapters in fp32
    lie next to them. With each weight comes its qualified name, and the type of 16 bits that is meant.
    """
    yield from _found("", model)[0]


_Weight = tuple[str, torch.Tensor]
_Matrices = list[torch.Tensor]


def _found(
    prefix: str, module: nn.Module
) -> tuple[list[tuple[str, torch.Tensor, torch.dtype]], list[_Weight], _Matrices]:
    """Return the upcast weights within a module, fp32 ones with no linear layer next to them yet, and its matrices."""
    upcast: list[tuple[str, torch.Tensor, torch.dtype]] = []
    open_, matrices = list[_Weight](), _Matrices()
    is_norm = _NORM.search(type(module).__name__) is not None
    for name, weight in module.named_parameters(recurse=False):
        if not is_norm:
            matrices += [weight] if weight.dim() > 1 else []
        elif weight.dtype is torch.float32:
            open_.append((f"{prefix}{name}", weight))
    if not is_norm:
        matrices += [one for name, one in module.named_buffers(recurse=False) if name in _PACKED_BUFFERS]
    for name, child in module.named_children():
        inner, more, others = _found(f"{prefix}{name}.", child)
        upcast += inner
        open_ += more
        matrices += others
    if matrices and open_:
        dtype = _computes_in(matrices)
        upcast += [(name, weight, dtype) for name, weight in open_ if dtype is not None]
        open_ = []
    return upcast, open_, matrices


def _computes_in(matrices: _Matrices) -> torch.dtype | None:
    """Return the 16-bit type that most matrices compute in, without adapters of frozen ones; else None."""
    frozen = [one for one in matrices if not one.requires_grad] or matrices
    kinds = Counter(one.dtype for one in frozen)
    full = sum(count for kind, count in kinds.items() if kind.itemsize > 2)
    return None if 2 * full > len(frozen) else torch.float16 if kinds[torch.float16] else torch.bfloat16


def _has_others(module: nn.Module) -> bool:
    """Return whether a layer itself has weights that are not in fp32."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(one is not None and one.dtype is not torch.float32 for one in own)
