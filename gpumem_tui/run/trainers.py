"""Trainers of libraries: when they evaluate and save by their settings, and how a run comes to that sooner.

TRL's, LLaMA-Factory's and axolotl's trainers are transformers'.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpumem_tui.importing import after_import
from gpumem_tui.run.later import Occasion

if TYPE_CHECKING:
    from gpumem_tui.run.program import Program


def follow_trainers(program: Program) -> None:
    """Follow trainers once they are imported."""
    after_import("transformers.trainer", lambda module: _follow_transformers(program, module))
    for package in ("lightning.pytorch", "pytorch_lightning"):
        after_import(f"{package}.trainer.trainer", lambda module: _follow_lightning(program, module.Trainer))
        after_import(f"{package}.loops.training_epoch_loop", lambda module: _hasten_lightning(program, module))


# transformers

_OCCASIONS: tuple[tuple[Occasion, str, str], ...] = (
    ("evaluation", "eval", "should_evaluate"),
    ("saving", "save", "should_save"),
)
"""How `TrainingArguments` name each, and what callbacks set in a trainer's control for it."""

_NEAR_STEPS = 5
"""An evaluation or save due within so many steps is followed when it is due."""


def _follow_transformers(program: Program, module: Any) -> None:
    """Have transformers' Trainer say what it will do, and do what is awaited once its steps are made.

    An awaited part that no setting asks for may come after training, which ends then.
    """
    trainer, later = module.Trainer, program.later
    train, evaluate = trainer.train, trainer.evaluate
    flow = module.DefaultFlowCallback.on_step_end

    @functools.wraps(train)
    def followed_train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            later.came("resuming", program.steps)
        later.declare(lambda: _declared(self, flow))
        return train(self, resume_from_checkpoint, *args, **kwargs)

    @functools.wraps(evaluate)
    def followed_evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        later.came("evaluation", program.steps)
        return evaluate(self, *args, **kwargs)

    @functools.wraps(flow)
    def sooner(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = flow(self, args, state, control, **kwargs)
        for occasion, kind, sets in _OCCASIONS:
            if not later.awaits(occasion) or getattr(control, sets) or _is_near(args, state, kind):
                continue
            setattr(control, "should_training_stop" if _strategy(args, kind) == "no" else sets, True)
        return control

    trainer.train, trainer.evaluate = followed_train, followed_evaluate
    module.DefaultFlowCallback.on_step_end = sooner


def _strategy(args: Any, kind: str) -> str:
    """Return when ``eval`` or ``save`` is due: no, steps, epoch or best. Before 4.41 evaluation's had another name."""
    found = getattr(args, f"{kind}_strategy", None) or getattr(args, "evaluation_strategy", "no")
    return str(getattr(found, "value", found))


def _is_near(args: Any, state: Any, kind: str) -> bool:
    every = getattr(state, f"{kind}_steps", 0)
    return _strategy(args, kind) == "steps" and every > 0 and -state.global_step % every <= _NEAR_STEPS


def _declared(trainer: Any, flow: Any) -> Mapping[Occasion, str]:
    """Return what a Trainer will do by its `TrainingArguments`, as far as its last step.

    `load_best_model_at_end` is not among these: the weights are read on the host and copied into the model's own.
    """
    args, state = trainer.args, trainer.state
    found: dict[Occasion, str] = {}
    for occasion, kind, sets in _OCCASIONS:
        if when := _when(args, state, flow, kind, sets):
            found[occasion] = when
    for name in ("do_eval", "do_predict"):
        if getattr(args, name, False) and "evaluation" not in found:
            found["evaluation"] = f"{name} after training"
    return {**found, "resuming": "from a checkpoint"} if "saving" in found else found


def _when(args: Any, state: Any, flow: Any, kind: str, sets: str) -> str:
    """Return the setting and when it is due, as ``save_strategy every 50 steps``; empty for never."""
    strategy = _strategy(args, kind)
    name = f"{kind}_strategy"
    if strategy == "epoch":
        return f"{name} every epoch"
    if strategy == "best":
        return f"{name} best, after evaluations"
    every, last = getattr(state, f"{kind}_steps", 0), state.max_steps
    if strategy != "steps" or not every:
        return ""
    if every <= last:
        return f"{name} every {every:,} steps" if every > 1 else f"{name} every step"
    at_end: Any = SimpleNamespace(should_evaluate=False, should_save=False, should_log=False)
    flow(None, args, SimpleNamespace(**{**vars(state), "global_step": last}), at_end)
    return f"{name} at the end, step {last:,}" if getattr(at_end, sets) else ""


# Lightning


def _follow_lightning(program: Program, trainer: Any) -> None:
    """Have Lightning's Trainer say what it will do."""
    fit, later = trainer.fit, program.later

    @functools.wraps(fit)
    def followed_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("ckpt_path") or any(isinstance(one, str) for one in args):
            later.came("resuming", program.steps)
        later.declare(lambda: _declared_by_lightning(self))
        return fit(self, *args, **kwargs)

    trainer.fit = followed_fit


def _hasten_lightning(program: Program, module: Any) -> None:
    """Have Lightning's Trainer validate and save what is awaited after a step, or end where it never does."""
    loop, later = module._TrainingEpochLoop, program.later
    check = loop._should_check_val_fx

    @functools.wraps(check)
    def sooner(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer, is_due = self.trainer, check(self, *args, **kwargs)
        if later.awaits("saving") and trainer.checkpoint_callbacks:
            with tempfile.TemporaryDirectory(prefix="gpumem-tui.") as folder:
                trainer.save_checkpoint(os.path.join(folder, "sooner.ckpt"))
        is_due |= later.awaits("evaluation") and trainer.enable_validation
        if is_due:
            later.came("evaluation", program.steps)
        trainer.should_stop |= later.awaits("evaluation") or later.awaits("saving")
        return is_due

    loop._should_check_val_fx = sooner


def _declared_by_lightning(trainer: Any) -> Mapping[Occasion, str]:
    """Return what a Lightning Trainer will do, by its arguments and its first callback that saves."""
    found: dict[Occasion, str] = {}
    if trainer.enable_validation:
        batches, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
        within = isinstance(batches, int) and batches != trainer.num_training_batches
        found["evaluation"] = (
            f"val_check_interval every {batches:,} batches"
            if within
            else _every("check_val_every_n_epoch", epochs or 1)
        )
    for callback in trainer.checkpoint_callbacks[:1]:
        steps, epochs = vars(callback).get("_every_n_train_steps"), vars(callback).get("_every_n_epochs")
        name = type(callback).__name__
        if steps and steps <= trainer.estimated_stepping_batches:
            found["saving"] = f"{name} every {steps:,} steps" if steps > 1 else f"{name} every step"
        elif not steps:
            found["saving"] = _every(name, epochs or 1)
    return {**found, "resuming": "from a checkpoint"} if "saving" in found else found


def _every(name: str, epochs: int) -> str:
    return f"{name} every {epochs:,} epochs" if epochs > 1 else f"{name} every epoch"
