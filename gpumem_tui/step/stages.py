"""Where a whole run is, besides its steps: resuming, saving, generating, evaluating, syncing weights.

Functions of torch and of libraries are followed while they run. Imports nothing of ours but `step`, and beyond the
standard library only torch, and is Python 3.9: a user's training process speaks it.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from gpumem_tui.step import RunStage

FOLLOWED = (
    ("torch", "", "save", RunStage.SAVE),
    ("torch.optim.optimizer", "Optimizer", "load_state_dict", RunStage.RESUME),
    ("torch.nn.modules.module", "Module", "load_state_dict", RunStage.WEIGHT_SYNC),
    ("torch.distributed.checkpoint.state_dict_saver", "", "save", RunStage.SAVE),
    ("torch.distributed.checkpoint.state_dict_saver", "", "async_save", RunStage.SAVE),
    ("torch.distributed.checkpoint.state_dict", "", "get_state_dict", RunStage.SAVE),
    ("torch.distributed.checkpoint.state_dict", "", "get_model_state_dict", RunStage.SAVE),
    ("safetensors.torch", "", "save_file", RunStage.SAVE),
    ("safetensors.torch", "", "save_model", RunStage.SAVE),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", RunStage.SAVE),
    ("transformers.generation.utils", "GenerationMixin", "generate", RunStage.GENERATE),
    ("transformers.trainer", "Trainer", "evaluation_loop", RunStage.EVALUATE),
    ("transformers.trainer", "Trainer", "_save_checkpoint", RunStage.SAVE),
    ("accelerate.accelerator", "Accelerator", "save_state", RunStage.SAVE),
    ("accelerate.accelerator", "Accelerator", "load_state", RunStage.RESUME),
    ("peft.peft_model", "PeftModel", "save_pretrained", RunStage.SAVE),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained", RunStage.SAVE),
    ("lightning.pytorch.loops.evaluation_loop", "_EvaluationLoop", "run", RunStage.EVALUATE),
    ("lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint", RunStage.SAVE),
    ("pytorch_lightning.loops.evaluation_loop", "_EvaluationLoop", "run", RunStage.EVALUATE),
    ("pytorch_lightning.trainer.trainer", "Trainer", "save_checkpoint", RunStage.SAVE),
    ("trl.trainer.callbacks", "SyncRefModelCallback", "sync_target_model", RunStage.WEIGHT_SYNC),
    ("trl.generation.vllm_generation", "VLLMGeneration", "sync_weights", RunStage.WEIGHT_SYNC),
)
"""Module, class, function, and the stage of the run in which a call of it is."""

_BY_NAME = {
    **dict.fromkeys(("generate", "generate_sequences", "rollout", "sample"), RunStage.GENERATE),
    **dict.fromkeys(("sync_weights", "update_weights", "load_weights", "sync_target_model"), RunStage.WEIGHT_SYNC),
    **dict.fromkeys(("evaluate", "evaluation_loop", "validate", "validation_step"), RunStage.EVALUATE),
    **dict.fromkeys(("save_pretrained", "save_checkpoint", "_save_checkpoint", "save_state"), RunStage.SAVE),
    **dict.fromkeys(("load_checkpoint", "resume", "load_state"), RunStage.RESUME),
    "from_pretrained": RunStage.LOAD,
}
"""Functions of programs that are called by these names as a rule."""


def stage_by_names(functions: Iterable[str]) -> RunStage | None:
    """Return the stage that the functions on a stack show by their names, the innermost first; None where none does."""
    return next((_BY_NAME[name] for name in functions if name in _BY_NAME), None)


class StageHooks:
    """Follows the functions of `FOLLOWED`.

    Args:
        begins: called with a stage as one of its functions is called, and the object that this is a method of.
            Returns whether it counts.
        ended: called as that function has returned, or raised an error; stages within others end first.
    """

    def __init__(self, begins: Callable[[RunStage, Any], bool], ended: Callable[[], None]) -> None:
        self._begins, self._ended = begins, ended
        self._waiting = {name for name, *_ in FOLLOWED}
        self._undo: list[Callable[[], None]] = []

    def take(self, names: Iterable[str] = ()) -> None:
        """Follow the functions of modules that have been imported by now: these, or all."""
        for name in set(names or self._waiting) & self._waiting:
            module = sys.modules.get(name)
            if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self._waiting.discard(name)
                self._follow(name, module)

    def close(self) -> None:
        """Follow nothing any more; functions that were replaced again since stay, without effect."""
        self._begins = lambda *_: False
        while self._undo:
            self._undo.pop()()

    def _follow(self, name: str, module: ModuleType) -> None:
        for at, kind, function, stage in FOLLOWED:
            owner = getattr(module, kind, None) if kind else module
            if at == name and owner is not None and function in vars(owner):
                self._replace(owner, function, stage)

    def _replace(self, owner: Any, name: str, stage: RunStage) -> None:
        original = vars(owner)[name]
        is_torchs = name == "save" and owner.__name__ == "torch"
        is_optimizers = stage is RunStage.RESUME and name == "load_state_dict"

        @functools.wraps(original)
        def followed(*args: Any, **kwargs: Any) -> Any:
            in_memory = is_torchs and any(isinstance(one, io.BytesIO) for one in (*args, *kwargs.values()))
            if (
                in_memory
                or (is_optimizers and _is_new(*args, **kwargs))
                or not self._begins(stage, args[0] if args else None)
            ):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._ended()

        def undo() -> None:
            if vars(owner)[name] is followed:
                setattr(owner, name, original)

        setattr(owner, name, followed)
        self._undo.append(undo)


def _is_new(_: Any, state_dict: Any = None, *__: Any, **___: Any) -> bool:
    """Return whether a loaded optimizer state is one before any step, as Accelerate loads where it prepares one."""
    return isinstance(state_dict, dict) and not state_dict.get("state", True)
