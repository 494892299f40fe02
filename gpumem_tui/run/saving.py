"""Checkpoints of a followed program: what saving takes on the GPU is followed, and nothing is written.

Nothing was trained, so no checkpoint is worth a file; a program's own data is written.
"""

from __future__ import annotations

import atexit
import functools
import io
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpumem_tui.importing import after_import
from gpumem_tui.simulator.device.kinds import is_without_data
from gpumem_tui.step.sites import callers
from gpumem_tui.step.walking import buffers_in, parameters_in, tensors_in
from gpumem_tui.workload.errors import is_users, one_line

if TYPE_CHECKING:
    from types import FrameType

    from gpumem_tui.run.program import Program
    from gpumem_tui.simulator.device.gpu import SimulatedGpu

_DEEPEST = 3
"""Mappings within each other in which a checkpoint has its weights at most."""

_TO_ONE_FILE = ("save", "save_file", "save_model", "_atomic_save")
"""Functions of torch, safetensors and Lightning that write their first argument to the file that is their second."""


class LeftOutFiles:
    """Files that stand where checkpoints would: of their size, without data, and gone at the end.

    Programs ask for their size, rename, copy, link and remove them. A file that was there before stays as it was.
    """

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._pid = os.getpid()

    def follow(self) -> None:
        """Follow what the program does to them from now on, and remove what is left when it ends."""
        for module, name, moves in (
            (os, "rename", True), (os, "replace", True), (os, "link", False), (shutil, "copyfile", False),
        ):  # fmt: skip
            self._wrap(module, name, moves)
        atexit.register(self._remove)

    def put(self, path: Any, held: object) -> None:
        """Put one where a checkpoint of what is held would be written."""
        if not isinstance(path, (str, os.PathLike)) or os.path.exists(path) or not os.path.isdir(_folder_of(path)):
            return
        with open(path, "wb") as file:
            file.truncate(sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(held)))
        self._paths.add(os.path.abspath(path))

    def _wrap(self, module: Any, name: str, moves: bool) -> None:
        call = getattr(module, name)

        @functools.wraps(call)
        def followed(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(source, (str, os.PathLike)) or os.path.abspath(source) not in self._paths:
                return call(source, target, *args, **kwargs)
            before, after = os.path.abspath(source), os.path.abspath(target)
            result: Any = target
            if after in self._paths or not os.path.exists(after):
                result = call(source, target, *args, **kwargs)
                self._paths.add(after)
            elif moves:
                os.unlink(before)
            if moves:
                self._paths.discard(before)
            return result

        setattr(module, name, followed)

    def _remove(self) -> None:
        for path in self._paths if os.getpid() == self._pid else ():
            with suppress(OSError):
                os.unlink(path)


def _folder_of(path: str | os.PathLike[str]) -> str:
    return os.path.dirname(os.path.abspath(path))


def follow_saving(program: Program) -> None:
    """Have whatever would write tensors without data write nothing, and note where it was asked to."""
    files = LeftOutFiles()
    files.follow()

    def left_out() -> None:
        place = _calling_place(sys._getframe(1)) or "by a library"
        program.note(f"a checkpoint is not written, as nothing was trained ({place})")
        program.later.came("saving", program.steps)

    def instead(write: Callable[..., Any], is_without_data: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(write)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if program.tries.is_looking or not is_without_data(*args, **kwargs):  # which a finder loads again
                return write(*args, **kwargs)
            left_out()
            if args and write.__name__ in _TO_ONE_FILE:
                files.put(args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename")), args[0])
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
    for package in ("lightning.fabric", "lightning_fabric"):
        after_import(
            f"{package}.utilities.cloud_io",
            lambda module: replace(module, "_atomic_save", lambda held, *_, **__: _holds_no_data(held)),
        )

    _note_gathering(program)

    def elsewhere(save: Callable[..., Any], within: Callable[..., Any]) -> Callable[..., Any]:
        """Return a library's function that saves a training's whole state, into a folder that is removed after.

        Args:
            within: calls it with that folder in the place of the program's own, in which nothing is written, and no
                older checkpoint removed.
        """

        @functools.wraps(save)
        def saved(owner: Any, *args: Any, **kwargs: Any) -> Any:
            left_out()
            with tempfile.TemporaryDirectory(prefix="gpumem-tui.", ignore_cleanup_errors=True) as folder:
                try:
                    return within(save, folder, owner, *args, **kwargs)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # noqa: BLE001  a library may look at what is not written
                    program.note(f"what saving takes from here on is not followed: {one_line(error)}")
                    return None

        return saved

    def trainer(module: Any) -> None:
        module.Trainer._save_checkpoint = elsewhere(module.Trainer._save_checkpoint, _of_trainer)

    def accelerator(module: Any) -> None:
        module.Accelerator.save_state = elsewhere(module.Accelerator.save_state, _of_accelerator)

    def cards(module: Any) -> None:
        """Leave out the cards of models that TRL writes with each checkpoint, over what stands in the README there."""
        for kind in vars(module).values():
            if isinstance(kind, type) and "create_model_card" in vars(kind):
                kind.create_model_card = lambda *_, **__: None  # type: ignore[attr-defined]  # as was asked

    after_import("trl.trainer.base_trainer", cards)
    after_import("transformers.trainer", trainer)
    after_import("accelerate.accelerator", accelerator)


# What is loaded


def name_checkpoints(gpu: SimulatedGpu) -> None:
    """Have what the program loads onto the GPU from files of weights be known as a checkpoint."""

    def loading(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loaded(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            if _has_weights(found):
                gpu.loaded(tensors_in(found), _calling_place(sys._getframe(1)))
            return found

        return loaded

    def safetensors(module: Any) -> None:
        module.load_file = loading(module.load_file)

    modules: Any = torch
    modules.load = loading(torch.load)
    after_import("safetensors.torch", safetensors)


def _has_weights(held: object, depth: int = 0) -> bool:
    """Return whether a file of what is held is one of weights, and not of data.

    These are tensors by names of parameters, as ``blocks.0.weight``, or an optimizer's ``param_groups``.
    """
    if not isinstance(held, Mapping) or depth == _DEEPEST:
        return False
    return any(
        name == "param_groups"
        or (_is_of_weights(name) if isinstance(value, torch.Tensor) else _has_weights(value, depth + 1))
        for name, value in held.items()
    )


def _is_of_weights(name: object) -> bool:
    return isinstance(name, str) and ("." in name or name in ("weight", "bias"))


def _note_gathering(program: Program) -> None:
    """Take a state that ranks gather for a save, which the first rank alone may write."""

    def noted(gather: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(gather)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            program.later.came("saving", program.steps)
            return gather(*args, **kwargs)

        return gathered

    def fsdp(module: Any) -> None:
        kind = module.FullyShardedDataParallel
        kind.state_dict_type = staticmethod(noted(kind.state_dict_type))

    def state_dict(module: Any) -> None:
        for name in ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"):
            if hasattr(module, name):
                setattr(module, name, noted(getattr(module, name)))

    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", fsdp)
    after_import("torch.distributed.checkpoint.state_dict", state_dict)


def _of_trainer(save: Callable[..., Any], folder: str, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Have transformers' Trainer save into a folder that holds no older checkpoints, upload nothing, and forget it."""
    best = trainer.state.best_model_checkpoint
    instead = {"_get_output_dir": lambda *_, **__: folder, "_push_from_checkpoint": lambda *_, **__: None}
    vars(trainer).update(instead)
    try:
        return save(trainer, *args, **kwargs)
    finally:
        for name in instead:
            del vars(trainer)[name]
        trainer.state.best_model_checkpoint = best


def _of_accelerator(
    save: Callable[..., Any], folder: str, accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Have accelerate save into a folder, not among the numbered ones, of which it removes the oldest."""
    configuration = accelerator.project_configuration
    names_them, configuration.automatic_checkpoint_naming = configuration.automatic_checkpoint_naming, False
    try:
        save(accelerator, folder, *args, **kwargs)
    finally:
        configuration.automatic_checkpoint_naming = names_them
    return output_dir


def _always(*_: object, **__: object) -> bool:
    """Answer for a training's whole state, which has the model's tensors in it."""
    return True


def _is_in_memory(f: Any) -> bool:
    """Return whether what is written stays in this process, as in pickling a tensor."""
    return isinstance(f, io.IOBase) and not isinstance(f, (io.FileIO, io.BufferedWriter, io.BufferedRandom))


def _is_without_data(model: nn.Module) -> bool:
    return any(is_without_data(tensor) for tensor in (*parameters_in(model), *buffers_in(model)))


class _Found(Exception):
    """A tensor without data is part of an object."""


class _Search(pickle.Pickler):
    """Goes through an object as pickling does, which is how it would be saved."""

    def reducer_override(self, obj: Any) -> Any:
        if is_without_data(obj):
            raise _Found
        return (int, ()) if isinstance(obj, (torch.Tensor, torch.storage.UntypedStorage)) else NotImplemented


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _holds_no_data(obj: object) -> bool:
    """Return whether tensors without data are part of an object."""
    sink: Any = _Nowhere()
    try:
        _Search(sink, protocol=5, buffer_callback=lambda _: False).dump(obj)
    except _Found:
        return True
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):  # said again, by whoever saves it
        return False
    return False


def _calling_place(frame: FrameType) -> str:
    for one in callers(frame):
        if is_users(one.f_code.co_filename):
            return f"{os.path.relpath(one.f_code.co_filename)}:{one.f_lineno}"
    return ""
