"""Trainers of libraries: when they evaluate and save by their settings, and how a run comes to that sooner.

TRL's, LLaMA-Factory's and axolotl's trainers are transformers'.
"""

from __future__ import annotations

import functools
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


# transformers

_OCCASIONS: tuple[tuple[Occasion, str, str], ...] = (
    ("evaluation", "eval", "should_evaluate"),
    ("saving", "save", "should_save"),
)
"""How `TrainingArguments` name each, and what callbacks set in a trainer's control for it."""

_NEAR_STEPS = 5
"""What is due within so many steps is followed when it is due."""


def _follow_transformers(program: Program, module: Any) -> None:
    """Have transformers' Trainer say what it will do, and do what is awaited once its steps are made.

    What is awaited and none of its settings ask for may come after training, which ends then.
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
