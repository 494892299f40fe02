"""Checkpoints of a followed program: what saving takes on the GPU is followed, and nothing is written.

Nothing was trained, so no checkpoint is worth a file; a program's own data is written.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpumem_tui.importing import after_import
from gpumem_tui.run.left_out import LeftOutFiles
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


class _Saving:
    """Has every function that would write tensors without data write nothing, and notes where it was asked to."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._files = LeftOutFiles(torch.save)

    def follow(self) -> None:
        """Follow torch's own ways of saving, and those of libraries as they are imported."""
        self._files.follow()
        self._replace(torch, "save", lambda obj, f, *_, **__: not _is_in_memory(f) and _holds_no_data(obj))
        after_import("safetensors.torch", self._safetensors)
        after_import("torch.distributed.checkpoint.state_dict_saver", self._distributed)
        for package in ("lightning.fabric", "lightning_fabric"):
            after_import(
                f"{package}.utilities.cloud_io",
                lambda module: self._replace(module, "_atomic_save", lambda held, *_, **__: _holds_no_data(held)),
            )
        for module, owner, pretrained in _PRETRAINED:
            after_import(module, functools.partial(self._pretrained, owner, pretrained))
        _note_gathering(self._program)
        after_import("trl.trainer.base_trainer", _leave_out_cards)
        after_import("transformers.trainer", self._trainer)
        after_import("accelerate.accelerator", self._accelerator)

    def _left_out(self) -> None:
        place = _calling_place(sys._getframe(1)) or "by a library"
        self._program.note(f"a checkpoint is not written, as nothing was trained ({place})")
        self._program.later.came("saving", self._program.steps)

    def _replace(self, owner: Any, name: str, is_without_data: Callable[..., bool]) -> None:
        if hasattr(owner, name):
            setattr(owner, name, self._instead(getattr(owner, name), is_without_data))

    def _instead(self, write: Callable[..., Any], is_without_data: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(write)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if self._program.tries.is_looking or not is_without_data(*args, **kwargs):  # which a finder loads again
                return write(*args, **kwargs)
            self._left_out()
            if folder := _folder_of_distributed(*args[1:], **kwargs):
                self._files.leave_folder(folder)
                self._files.put(os.path.join(folder, ".metadata"), {})
            elif args and write.__name__ in _TO_ONE_FILE:
                held = _weights_in(args[0]) if write.__name__ == "save_model" else args[0]
                self._files.put(args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename")), held)
            return None

        return checked

    def _safetensors(self, module: Any) -> None:
        self._replace(module, "save_file", lambda tensors, *_, **__: _holds_no_data(tensors))
        self._replace(module, "save_model", lambda model, *_, **__: _is_without_data(model))

    def _distributed(self, module: Any) -> None:
        for name in ("save", "save_state_dict"):
            self._replace(module, name, _always)
        if hasattr(module, "async_save"):
            left_out = self._instead(module.async_save, _always)
            module.async_save = functools.wraps(left_out)(functools.partial(_as_done, module, left_out))

    def _pretrained(self, name: str, pretrained: _Pretrained, module: Any) -> None:
        """Have ``save_pretrained`` leave its folder, with the model's configuration, and a file for its weights."""
        owner = getattr(module, name)
        write = owner.save_pretrained

        @functools.wraps(write)
        def saved(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            if self._program.tries.is_looking or not _is_without_data(model):
                return write(model, save_directory, *args, **kwargs)
            self._left_out()
            self._files.leave_folder(save_directory)
            with suppress(Exception), tempfile.TemporaryDirectory(prefix="gpumem-tui.") as folder:
                pretrained.configure(model, folder)
                self._files.new_files(save_directory, folder)
            with suppress(Exception):
                given = kwargs.get("state_dict")
                self._files.put(os.path.join(save_directory, pretrained.file), given or pretrained.weights(model))
            return None

        owner.save_pretrained = saved

    def _trainer(self, module: Any) -> None:
        kind = module.Trainer
        kind._save_checkpoint = self._elsewhere(kind._save_checkpoint, _of_trainer, _folder_of_trainer)

    def _accelerator(self, module: Any) -> None:
        kind = module.Accelerator
        kind.save_state = self._elsewhere(kind.save_state, _of_accelerator, _folder_of_accelerator)

    def _elsewhere(
        self, save: Callable[..., Any], within: Callable[..., Any], folder_of: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a library's function that saves a training's whole state, into a folder that is removed after.

        Args:
            within: calls it with that folder in the place of the program's own, in which no file that is there is
                written anew, and no older checkpoint removed.
            folder_of: returns the program's own, which gets the files that it has not, as programs look there next.
        """

        @functools.wraps(save)
        def saved(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self._left_out()
            with tempfile.TemporaryDirectory(prefix="gpumem-tui.", ignore_cleanup_errors=True) as folder:
                try:
                    result = within(save, folder, owner, *args, **kwargs)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # noqa: BLE001  a library may look at what is not written
                    self._program.note(f"what saving takes from here on is not followed: {one_line(error)}")
                    result = None
                with suppress(Exception):
                    own = folder_of(owner, *args, **kwargs)
                    self._files.leave_folder(own)
                    made_in = os.path.join(folder, os.path.basename(own))
                    self._files.new_files(own, made_in if os.path.isdir(made_in) else folder)
            return result

        return saved


def follow_saving(program: Program) -> None:
    """Have every function that would write tensors without data write nothing, and note where it was asked to."""
    _Saving(program).follow()


def _weights_in(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(nn.Module.named_parameters(model))
    for prefix, part in nn.Module.named_modules(model):
        kept = part._buffers.keys() - part._non_persistent_buffers_set
        found.update({f"{prefix}.{name}".lstrip("."): part._buffers[name] for name in kept})
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class _Pretrained:
    """A library's ``save_pretrained``.

    Attributes:
        file: which it writes the weights to. `configure`: writes a model's configuration into a folder.
        weights: returns what it writes.
    """

    file: str
    configure: Callable[[Any, str], object]
    weights: Callable[[Any], Mapping[str, torch.Tensor]] = _weights_in


def _adapters_in(model: Any) -> Mapping[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)  # type: ignore[no-any-return]


def _configure_adapters(model: Any, folder: str) -> None:
    for configuration in model.peft_config.values():
        configuration.save_pretrained(folder)


_PRETRAINED = (
    (
        "transformers.modeling_utils",
        "PreTrainedModel",
        _Pretrained("model.safetensors", lambda model, folder: model.config.save_pretrained(folder)),
    ),
    ("peft.peft_model", "PeftModel", _Pretrained("adapter_model.safetensors", _configure_adapters, _adapters_in)),
    (
        "diffusers.models.modeling_utils",
        "ModelMixin",
        _Pretrained("diffusion_pytorch_model.safetensors", lambda model, folder: model.save_config(folder)),
    ),
)
"""Module, class, and what its ``save_pretrained`` writes."""


def _leave_out_cards(module: Any) -> None:
    """Leave out the cards of models that TRL writes with each checkpoint, over what is in the README there."""
    for kind in vars(module).values():
        if isinstance(kind, type) and "create_model_card" in vars(kind):
            kind.create_model_card = lambda *_, **__: None  # type: ignore[attr-defined]  # as was asked


def _folder_of_trainer(trainer: Any, _model: Any = None, trial: Any = None, **_: Any) -> str:
    return os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")


def _folder_of_accelerator(accelerator: Any, output_dir: Any = None, *_: Any, **__: Any) -> Any:
    """Return the folder that accelerate would save into, which it may number itself."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return output_dir
    return os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")


# Loading


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
        """Have the step that makes an optimizer's state before there is any, of gradients of zeros, count for none."""
        if make := getattr(module, "_init_optim_state", None):
            module._init_optim_state = program.uncounted(make)
        for name in ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"):
            if hasattr(module, name):
                setattr(module, name, noted(getattr(module, name)))

    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", fsdp)
    after_import("torch.distributed.checkpoint.state_dict", state_dict)


def _folder_of_distributed(writer: Any = None, *_: Any, checkpoint_id: Any = None, **others: Any) -> Any:
    """Return the folder that torch's `save` and `async_save` would write to; None for functions of other kinds."""
    named = getattr(others.get("storage_writer", writer), "path", None)
    return checkpoint_id or (named if isinstance(named, (str, os.PathLike)) else None)


def _as_done(module: Any, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what torch's `async_save` does of a checkpoint that is staged and written: nothing is left to wait for."""
    if (result := save(*args, **kwargs)) is not None:
        return result
    done: Future[None] = Future()
    done.set_result(None)
    response = getattr(module, "AsyncSaveResponse", None)
    return done if response is None or kwargs.get("async_stager") is None else response(done, done)


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
    return _folder_of_accelerator(accelerator, output_dir)


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
