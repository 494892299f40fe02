"""Changes made to a training program from outside, before it uses torch: what a technique would do to its memory.

Each change is what its user would write into the script; nothing is changed that the program does not do through torch.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.records import BF16_SINCE
from gpumem_tui.run.adapters import adapt_models, why_not_adapted
from gpumem_tui.run.checkpoints import Checkpoints
from gpumem_tui.run.events import PROPOSE
from gpumem_tui.run.parts import has_parameters, repeated_blocks, repeated_layers
from gpumem_tui.run.program import Program
from gpumem_tui.run.replacements import (
    CHUNKED_FROM,
    REPLACEMENTS,
    checkpointed,
    chunked_cross_entropy,
    construct_with,
    replace_optimizers,
    title_of,
    torch_optimizers,
    why_not_chunked,
)
from gpumem_tui.run.shards import Sharder, why_not_sharded
from gpumem_tui.simulator.compiled.following import stay_eager
from gpumem_tui.simulator.compiled.told import Followed
from gpumem_tui.simulator.torch_internals import Replacements
from gpumem_tui.step.phases import in_backward, mark_backward
from gpumem_tui.step.walking import modules_in, parameters_in

_OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "no-foreach": ("foreach", {"foreach": False, "fused": None}),
    "fused": ("fused", {"fused": True, "foreach": None}),
}
"""Ways in which an optimizer steps: the option that a class must have, and its value."""

_SHARDED_BY = ("FullyShardedDataParallel", "ZeroRedundancyOptimizer")


class Changes:
    """Changes made together, or the question which could be made.

    Args:
        wanted: keys of `KEYS`, with "+" between; or `PROPOSE`.
        gpu: what the program believes to train on.
        compiler: what the program compiles.
        checkpoints: what it checkpoints.
        program: how far it is.
    """

    def __init__(self, wanted: str, gpu: Gpu, compiler: Followed, checkpoints: Checkpoints, program: Program) -> None:
        self._wanted = tuple(wanted.split("+"))
        self._dtype = torch.bfloat16 if gpu.compute_capability >= BF16_SINCE else torch.float16
        self._made: Counter[str] = Counter()
        self._seen = _Observed(compiler, checkpoints, program)
        self._is_without_gradients = False
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._autocast: Any = None
        self._sharder: Sharder | None = None
        self._replaced = Replacements()  # until the end of the process

    def start(self) -> None:
        """Make the change from now on, or watch what the program does by itself."""
        self._seen.start(self._enter_root, self._leave_root)
        for wanted in sorted(self._wanted, key=lambda key: key != "sharded"):  # the shards of what adapters leave
            self._start_one(wanted)

    def _start_one(self, wanted: str) -> None:
        count = functools.partial(self._made.update, (wanted,))
        if wanted == PROPOSE:
            self._seen.watch()
        elif wanted in REPLACEMENTS:
            replace_optimizers(wanted, count)
        elif wanted in _OPTIONS:
            self._give_options(*_OPTIONS[wanted], count)
        elif wanted == "set-to-none":
            for owner in (torch.optim.Optimizer, nn.Module):
                self._zero_to_none(owner)
        elif wanted == "compile":
            self._replaced.wrap(nn.Module, "__call__", functools.partial(self._compile_first, count))
        elif wanted == "eager":
            stay_eager(count)
        elif wanted == "chunked-loss":
            chunked_cross_entropy(count)
        elif wanted == "lora":
            adapt_models(count)
        elif wanted == "sharded":
            self._sharder = Sharder(count)
        elif wanted == "autocast":
            mark_backward(self._leave_autocast)  # the loss belongs in it (PyTorch's "Automatic Mixed Precision")

    def found(self) -> tuple[tuple[str, str], ...]:
        """Return by change why it cannot be made, or was not; empty where it can be, or was."""
        if PROPOSE not in self._wanted:
            never = "the command never came to what it changes"
            return tuple((key, "" if self._made[key] else never) for key in self._wanted)
        return tuple((key, why_not(self._seen)) for key, why_not in _WHY_NOT.items())

    @property
    def written(self) -> tuple[str, ...]:
        """Return the lines of the program that were found for a change, in the program's own names."""
        return () if self._sharder is None else tuple(self._sharder.written)

    @property
    def is_sharded(self) -> bool:
        """Return whether ranks hold parts: of parameters (FSDP, tensor parallel) or of optimizer state (ZeRO)."""
        roots = self._seen.roots
        named = {type(thing).__name__ for thing in (*modules_in(*roots), *self._seen.optimizers)}
        parts = any(hasattr(parameter, "placements") for parameter in parameters_in(*roots))
        return parts or not named.isdisjoint(_SHARDED_BY)

    # Around the calls of models

    def _enter_root(self, root: nn.Module, *, is_first: bool) -> None:
        if "checkpointing" in self._wanted and is_first:
            self._seen.checkpoints.are_by_block = True
            self._made["checkpointing"] += checkpoint_blocks(root)
        if "no-grad" in self._wanted and self._seen.program.evaluates_for_nothing:
            self._made["no-grad"] += 1
            self._is_without_gradients = True
            torch.set_grad_enabled(False)
        if "autocast" in self._wanted and self._autocast is None:
            self._made["autocast"] += 1
            self._autocast = torch.autocast("cuda", dtype=self._dtype)
            self._autocast.__enter__()

    def _leave_root(self) -> None:
        """End autocast where gradients are off, as no backward follows, which would end it; have them on again."""
        if not torch.is_grad_enabled():
            self._leave_autocast()
        if self._is_without_gradients:
            self._is_without_gradients = False
            torch.set_grad_enabled(True)

    def _leave_autocast(self) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    def _compile_first(
        self, count: Callable[[], None], call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Compile a model that no other one calls, before it is called; of one that FSDP2 shards, each block."""
        if not self._seen.is_within and module not in self._compiled and not in_backward():
            self._compiled.add(module)
            by_block = hasattr(module, "set_reshard_after_forward")
            for part in repeated_blocks(module) if by_block else (module,):
                if has_parameters(part):
                    part.compile()
                    count()
        return call(module, *args, **kwargs)

    # In torch's own functions

    def _give_options(self, needed: str, options: Mapping[str, Any], count: Callable[[], None]) -> None:
        for kind in torch_optimizers():
            names = inspect.signature(kind).parameters
            if needed in names:
                known = {name: value for name, value in options.items() if name in names}
                construct_with(kind, known, count)

    def _zero_to_none(self, owner: Any) -> None:
        zero_grad = owner.zero_grad

        @functools.wraps(zero_grad)
        def changed(zeroed: Any, set_to_none: bool = True) -> Any:
            self._made["set-to-none"] += not set_to_none
            return zero_grad(zeroed, set_to_none=True)

        owner.zero_grad = changed


def checkpoint_blocks(root: nn.Module) -> int:
    """Checkpoint a model's repeated blocks, by its own switch where it has one; how many, or 1 for a switch."""
    for module in modules_in(root):
        if getattr(module, "supports_gradient_checkpointing", False):  # transformers: its blocks fill a cache, too
            own: Any = module
            own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return 1
    found = list(repeated_blocks(root))
    for block in found:
        checkpointed(block)
    return len(found)


class _Observed:
    """The memory techniques that the program was seen to use by itself."""

    def __init__(self, compiler: Followed, checkpoints: Checkpoints, program: Program) -> None:
        self.compiler = compiler
        self.checkpoints = checkpoints
        self.program = program
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.uses_autocast = False
        self.zeroes = False
        self.losses: dict[str, None] = {}
        self._depth = 0

    def start(self, enter: Callable[..., None], leave: Callable[[], None]) -> None:
        """Follow models that no other one calls, and optimizers."""

        def entered(module: nn.Module, *_: Any) -> None:
            self._depth += 1
            if self._depth == 1 and not in_backward():
                is_first = module not in self.roots
                self.roots.add(module)
                enter(module, is_first=is_first)

        def left(*_: Any) -> None:
            self._depth -= 1
            if not self._depth and not in_backward():
                leave()

        register_module_forward_pre_hook(entered)
        register_module_forward_hook(left, always_call=True)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.optimizers.add(optimizer))

    def watch(self) -> None:
        """Notice what the program calls."""
        notices = Replacements()  # which compiled code does not see
        self._notice(setattr, torch.autocast, "__enter__", self._see_autocast)
        self._notice(notices.set, nn.functional, "cross_entropy", self._see_loss)
        for owner in (torch.optim.Optimizer, nn.Module):
            self._notice(setattr, owner, "zero_grad", self._see_zero_grad)

    @property
    def is_within(self) -> bool:
        """Return whether a model is being called."""
        return self._depth > 0

    def _notice(self, put: Callable[..., None], owner: Any, name: str, see: Callable[..., None]) -> None:
        before = getattr(owner, name)

        @functools.wraps(before)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            see(*args, **kwargs)
            return before(*args, **kwargs)

        put(owner, name, noticed)

    def _see_autocast(self, context: Any) -> None:
        self.uses_autocast |= context._enabled

    def _see_zero_grad(self, _: Any, set_to_none: bool = True) -> None:
        self.zeroes |= not set_to_none

    def _see_loss(self, logits: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        self.losses[why_not_chunked(logits, target, *args, **kwargs)] = None

    @property
    def torchs(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that stepped and are of torch's own classes, not of classes made from them."""
        return [optimizer for optimizer in self.optimizers if type(optimizer) in torch_optimizers()]

    def groups(self) -> list[dict[str, Any]]:
        """Return their groups of parameters."""
        return [group for optimizer in self.torchs for group in optimizer.param_groups]


# Why a change cannot be made; empty where it can


def _no_checkpoint(seen: _Observed) -> str:
    if seen.checkpoints.cover(seen.roots):
        return "the command checkpoints already"
    if any(next(repeated_blocks(root), None) is not None for root in seen.roots):
        return ""
    layers = max((repeated_layers(root) for root in seen.roots), key=len, default=[])
    if layers:
        kind = type(layers[0]).__name__
        return (
            f"no repeated blocks: its {len(layers)} {kind} are single layers, of which a checkpoint would keep as much"
        )
    return "no repeated blocks: no list or sequence has two modules of one class"


def _no_replacement(key: str, seen: _Observed) -> str:
    if not seen.torchs:
        return _foreign(seen)
    if all(REPLACEMENTS[key].is_like(optimizer) for optimizer in seen.torchs):
        return f"the command's optimizer is {title_of(seen.torchs[0])}"
    return ""


def _foreign(seen: _Observed) -> str:
    names = sorted({f"{type(one).__module__.partition('.')[0]}'s {type(one).__name__}" for one in seen.optimizers})
    return f"the command's optimizer is not torch's: {', '.join(names) or 'none stepped'}"


def _no_options(option: str, seen: _Observed) -> str:
    if not seen.torchs:
        return _foreign(seen)
    named = type(seen.torchs[0]).__name__
    if all(group.get("fused") for group in seen.groups()):
        return f"{named} is fused already"
    if option == "foreach":
        looped = all(group.get("foreach") is False for group in seen.groups())
        return f"{named} is not foreach already" if looped else ""
    fusable = any("fused" in inspect.signature(type(optimizer)).parameters for optimizer in seen.torchs)
    return "" if fusable else f"torch has no fused {named}"


def _no_autocast(seen: _Observed) -> str:
    if seen.uses_autocast:
        return "the command uses autocast already"
    kinds: Counter[torch.dtype] = Counter()
    for parameter in parameters_in(*seen.roots):
        kinds[parameter.dtype] += parameter.numel()
    most = max(kinds, key=lambda dtype: kinds[dtype], default=torch.float32)
    return "" if most is torch.float32 else f"its weights are {str(most).removeprefix('torch.')} already"


def _no_chunks(seen: _Observed) -> str:
    if not seen.losses:
        return f"no cross-entropy of torch over {CHUNKED_FROM:,} classes or more"
    return "" if "" in seen.losses else next(reversed(seen.losses))


def _no_evaluation(seen: _Observed) -> str:
    gradients = seen.program.gradients
    if gradients.evaluated_at:
        return ""
    return (
        "no evaluation ran with gradients" if gradients.has_evaluated else "no evaluation ran: --through eval runs one"
    )


_WHY_NOT: Mapping[str, Callable[[_Observed], str]] = {
    "no-grad": _no_evaluation,
    "checkpointing": _no_checkpoint,
    **{key: functools.partial(_no_replacement, key) for key in REPLACEMENTS},
    "autocast": _no_autocast,
    "chunked-loss": _no_chunks,
    "lora": lambda seen: why_not_adapted(seen.roots),
    "sharded": lambda seen: why_not_sharded(seen.roots, seen.optimizers),
    **dict.fromkeys(
        ("deepspeed-zero2", "deepspeed-zero3"),
        lambda _: "" if find_spec("deepspeed") else "DeepSpeed is not installed",
    ),
    "set-to-none": lambda seen: (
        "" if seen.zeroes else "the command sets gradients to None already, as torch does by default"
    ),
    "no-foreach": functools.partial(_no_options, "foreach"),
    "fused": functools.partial(_no_options, "fused"),
    "compile": lambda seen: "the command compiles already" if seen.compiler.compiles else "",
    "eager": lambda seen: "" if seen.compiler.compiles else "the command compiles nothing",
}
KEYS = tuple(_WHY_NOT)
"""Every change by name."""
