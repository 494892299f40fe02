"""Checkpoints are not written while a GPU is simulated, as nothing was trained; a program's own data is."""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_tui.command.errors import is_users
from gpumem_tui.importing import after_import

if TYPE_CHECKING:
    from gpumem_tui.command.program import Program


def write_no_checkpoint(program: Program) -> None:
    """From now on whatever would write tensors without data writes nothing, and notes where it was asked to."""

    def instead(write: Callable[..., Any], is_without_data: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(write)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not is_without_data(*args, **kwargs):
                return write(*args, **kwargs)
            program.note(f"a checkpoint is not written, as nothing was trained ({_calling_place()})")
            return None

        return checked

    def replace(owner: Any, name: str, is_without_data: Callable[..., bool]) -> None:
        if hasattr(owner, name):
            setattr(owner, name, instead(getattr(owner, name), is_without_data))

    def replace_later(module: str, owner: str, name: str, is_without_data: Callable[..., bool]) -> None:
        after_import(module, lambda imported: replace(getattr(imported, owner), name, is_without_data))

    replace(torch, "save", lambda obj, f, *_, **__: not _is_in_memory(f) and _holds_no_data(obj))

    def safetensors(module: Any) -> None:
        replace(module, "save_file", lambda tensors, *_, **__: _holds_no_data(tensors))
        replace(module, "save_model", lambda model, *_, **__: _is_without_data(model))

    after_import("safetensors.torch", safetensors)
    for name, owner in (
        ("transformers.modeling_utils", "PreTrainedModel"),
        ("peft.peft_model", "PeftModel"),
        ("diffusers.models.modeling_utils", "ModelMixin"),
    ):
        replace_later(name, owner, "save_pretrained", lambda model, *_, **__: _is_without_data(model))

    def distributed(module: Any) -> None:
        for name in ("save", "async_save", "save_state_dict"):
            replace(module, name, _always)

    after_import("torch.distributed.checkpoint.state_dict_saver", distributed)
    replace_later("transformers.trainer", "Trainer", "_save_checkpoint", _always)
    replace_later("accelerate.accelerator", "Accelerator", "save_state", _always)


def _always(*_: object, **__: object) -> bool:
    """A training's whole state has the model's tensors in it."""
    return True


def _is_in_memory(f: Any) -> bool:
    """Whether what is written stays in this process, as in pickling a tensor."""
    return isinstance(f, io.IOBase) and not isinstance(f, (io.FileIO, io.BufferedWriter, io.BufferedRandom))


def _is_without_data(model: nn.Module) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers()))


class _Found(Exception):
    """A tensor without data is part of an object."""


class _Search(pickle.Pickler):
    """Goes through an object as pickling does, which is how it would be saved."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FakeTensor):
            raise _Found
        return (int, ()) if isinstance(obj, (torch.Tensor, torch.storage.UntypedStorage)) else NotImplemented


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _holds_no_data(obj: object) -> bool:
    """Whether tensors without data are part of an object."""
    sink: Any = _Nowhere()
    try:
        _Search(sink, protocol=5, buffer_callback=lambda _: False).dump(obj)
    except _Found:
        return True
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):  # said again, by whoever saves it
        return False
    return False


def _calling_place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "by a library"
