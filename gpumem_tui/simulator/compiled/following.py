"""`torch.compile` on the simulated GPU: compiled by torch's own compiler, or, where that cannot be followed, eager."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpumem_tui.errors import named
from gpumem_tui.memory import format_bytes
from gpumem_tui.simulator.compiled import inductor
from gpumem_tui.simulator.compiled.hidden import CALL, announced, while_called, while_compiled
from gpumem_tui.simulator.cuda.names import CUDA, simulated
from gpumem_tui.simulator.device.base import DEVICE_TYPE
from gpumem_tui.simulator.torch_internals import original, replace, without_replacements

FOLLOWED = ((2, 13),)
"""Versions of torch whose compiler was tried here; of another one what is compiled is traced as eager."""

_BACKENDS = ("inductor", "aot_eager", "eager", "aot_eager_decomp_partition")
_PACKAGE = Path(__file__).parents[2]
_COMPILED = _PACKAGE / "run" / "replacements.py"
"""What stands in the place of a user's code, and is compiled with it; so are the networks of `workload`."""
_OURS = frozenset(
    str(file) for room in ("simulator", "step", "run") for file in (_PACKAGE / room).rglob("*.py") if file != _COMPILED
)
"""Code that runs around a user's."""
_OF_OUR_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
_ESTIMATE = (
    "torch.compile: traced as eager PyTorch, an estimate (compiled runs held 0.48 to 1.05 times their eager trace, 2.3 "
    "times and more where a checkpoint runs inside)"
)


class Followed:
    """What a program compiles, and the lines that say so.

    Args:
        notes: gets the lines, each as a key, the latest figures only.
        begins: called with the number of a graph, from 1, before it is compiled.

    Attributes:
        is_estimate: something that was compiled was traced as eager.
        unsure_bytes: what padding takes that a GPU may do without.
    """

    def __init__(self, notes: dict[str, None], begins: Callable[[int], None] = lambda _number: None) -> None:
        self._begins, self._begun = begins, 0
        self.is_estimate = False
        self._notes = notes
        self._graphs = self._breaks = 0
        self._eager: Counter[str] = Counter()
        self._line = self._padded_line = ""
        self._padded: dict[tuple[int, int, int], int] = {}
        self.unsure_bytes = 0

    @property
    def compiles(self) -> bool:
        """Whether anything was compiled, or would have been."""
        return self._graphs > 0 or self.is_estimate

    def counted(self, counters: Any) -> None:
        """Take over what Dynamo has counted (`torch._dynamo.utils.counters`)."""
        self._graphs = counters["stats"]["unique_graphs"]
        self._breaks = sum(counters["graph_break"].values())
        if self._graphs or self._eager:
            self._say()

    def graph_begins(self) -> None:
        """Say that a graph is about to be compiled."""
        self._begun += 1
        self._begins(self._begun)

    def ran_eager(self, reason: str) -> None:
        """Count a frame that Dynamo gave up."""
        self._eager[reason] += 1

    def estimated(self, reason: str) -> None:
        """Say that compiled code is traced as eager, and why."""
        self.is_estimate = True
        self._notes.setdefault(f"{_ESTIMATE}: {reason}")

    def left_out(self, what: str) -> None:
        """Say what is not followed of what was asked of the compiler."""
        self.is_estimate = True
        self._notes.setdefault(f"torch.compile: {what}: an estimate")

    def checkpoints(self, times: int) -> None:
        """Say that the compiler places what a checkpoint computes again."""
        self._notes.setdefault(
            f"torch.compile: {_counted(times, 'checkpoint')} within a graph: the compiler decides when to compute each "
            "again, and may hold several at once, as traced here (2.3 to 3.5 times eager in pytorch issue 193193)"
        )

    def padded(self, sizes: tuple[int, int, int], more_bytes: int) -> None:
        """Say which products are padded where a GPU's benchmark would decide."""
        self._padded[sizes] = more_bytes
        self.unsure_bytes = max(self._padded.values())  # of one product at a time
        largest = "×".join(f"{size:,}" for size in max(self._padded, key=self._padded.__getitem__))
        self._notes.pop(self._padded_line, None)
        self._padded_line = (
            f"torch.compile: {_counted(len(self._padded), 'product')} of odd sizes (the largest {largest}) padded, as "
            f"a GPU's benchmark may find faster; without, up to {format_bytes(self.unsure_bytes)} less"
        )
        self._notes[self._padded_line] = None

    def _say(self) -> None:
        parts = [f"{_counted(self._graphs, 'graph')} compiled, traced by the compiler's own buffers"]
        if self._breaks:
            parts.append(_counted(self._breaks, "graph break"))
        frames = sum(self._eager.values())
        reasons = "; ".join(reason for reason, _ in self._eager.most_common(2))
        parts.append(f"{_counted(frames, 'frame')} ran eager ({reasons})" if frames else "no frame ran eager")
        self._notes.pop(self._line, None)
        self._line = f"torch.compile: {'; '.join(parts)}"
        self._notes[self._line] = None


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def follow_compiler(notes: dict[str, None], begins: Callable[[int], None] = lambda _number: None) -> Followed:
    """Have `torch.compile` compile for the simulated GPU, for as long as the process lives.

    Args:
        notes: gets a line of what was compiled, or why it was not, each as a key.
        begins: called with the number of a graph, from 1, before it is compiled.

    Returns:
        what it compiles, from then on.
    """
    followed = Followed(notes, begins)
    compile_ = original(torch, "compile")
    prepared = functools.cache(lambda: _prepare(followed))

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compiled, **options)
        if options.get("disable"):
            return model
        reason = _reason_not_to(options.get("backend", "inductor"))
        if reason:
            return _eager(model, functools.partial(followed.estimated, reason))
        if isinstance(model, (nn.Module, type)):
            prepared()
            return compile_(model, **options)
        return _when_called(model, lambda: (prepared(), compile_(model, **options))[1])

    def compile_module(module: nn.Module, **options: Any) -> None:
        module._compiled_call_impl = compiled(module._call_impl, **options)

    replace(torch, "compile", compiled)
    replace(nn.Module, "compile", compile_module)
    replace(torch.compiler, "cudagraph_mark_step_begin", lambda: None)  # needs a build with CUDA
    return followed


def stay_eager(used: Callable[[], None]) -> None:
    """Have `torch.compile` leave everything as it is, for as long as the process lives.

    Args:
        used: called whenever something would have been compiled.
    """

    def kept(model: Any = None, **options: Any) -> Any:
        return functools.partial(kept, **options) if model is None else _eager(model, used)

    replace(torch, "compile", kept)
    replace(nn.Module, "compile", lambda *_, **__: used())


def _reason_not_to(chosen: Any) -> str:
    """Return why compiling with a backend is not followed; empty where it is."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version not in FOLLOWED:
        return f"the compiler of torch {version[0]}.{version[1]} was not tried"
    if isinstance(chosen, str) and chosen not in _BACKENDS:
        return f"backend {chosen!r}"
    if find_spec("triton") is None:
        return "no triton to import here"
    return ""


def _eager(model: Any, used: Callable[[], None]) -> Any:
    if isinstance(model, (nn.Module, type)):
        used()
        return model

    @functools.wraps(model)
    def run(*args: Any, **kwargs: Any) -> Any:
        used()  # libraries compile more than a program uses
        return model(*args, **kwargs)

    return run


def _when_called(function: Callable[..., Any], compile_now: Callable[[], Any]) -> Any:
    """Compile a function once it is called: libraries compile more than a program uses."""
    found: list[Any] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(compile_now())
        return found[0](*args, **kwargs)

    run._torchdynamo_inline = function  # type: ignore[attr-defined]
    return run


def forget() -> None:
    """Forget what was compiled, and for which shapes: a further trace begins as a process of its own would."""
    if "torch._inductor.compile_fx" in sys.modules:
        import_module("torch._dynamo").reset_code_caches()
        import_module("torch._dynamo.pgo").reset_code_state()


# Dynamo


def _prepare(followed: Followed) -> None:
    """Have Dynamo and Inductor work on the simulated GPU, and tell what they make of the program."""
    inductor.prepare(followed)
    warnings.filterwarnings("ignore", message=_OF_OUR_HOOKS)
    dynamo = import_module("torch._dynamo")
    dynamo.config.suppress_errors = True
    rules, frames = import_module("torch._dynamo.trace_rules"), import_module("torch._dynamo.convert_frame")
    contexts = import_module("torch._dynamo.eval_frame").OptimizeContext
    rules.SKIP_DIRS.extend(_OURS)
    rules._recompile_re()
    logging.getLogger(frames.__name__).addFilter(lambda record: not str(record.msg).startswith("WON'T CONVERT"))
    unsupported = import_module("torch._dynamo.exc")
    convert, enter = original(frames.ConvertFrameAssert, "__call__"), original(contexts, "__call__")
    meet, kinds = original(frames.CatchErrorsWrapper, "__call__"), import_module("torch._dynamo.types")
    left_out = kinds.FrameExecStrategy(kinds.FrameAction.SKIP, kinds.FrameAction.SKIP)  # with all that it calls
    counters = import_module("torch._dynamo.utils").counters

    def converted(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with while_compiled(), _no_collection():
                return convert(self, frame, *args, **kwargs)
        except (unsupported.Unsupported, unsupported.SkipFrame) as error:
            followed.ran_eager(_in_short(error))
            raise
        except Exception as error:
            followed.estimated(_in_short(error))
            raise
        finally:
            followed.counted(counters)

    def entered(self: Any, function: Any) -> Any:
        with without_replacements(CALL):
            result = enter(self, function)
        if isinstance(result, (nn.Module, type)):
            return result
        return _hiding(result, function, followed, unsupported.TorchDynamoException)

    def met(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_filename in _OURS:
            return kinds.ConvertFrameReturn(frame_exec_strategy=left_out)
        return meet(self, frame, *args, **kwargs)

    replace(frames.CatchErrorsWrapper, "__call__", met)
    replace(frames.ConvertFrameAssert, "__call__", converted)
    replace(contexts, "__call__", entered)
    _exchange_names()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: graphs are many objects, which are looked through again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _hiding(compiled: Any, function: Any, followed: Followed, failure: Any) -> Any:
    """Return compiled code that does not see what the simulated GPU does around it."""
    owner = getattr(function, "__self__", None)
    module = owner if isinstance(owner, nn.Module) and function.__name__ == "_call_impl" else None

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with announced(module, args), while_called():
            try:
                return compiled(*args, **kwargs)
            except failure as error:
                followed.estimated(_in_short(error))
                return function(*args, **kwargs)

    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
    return call


def _in_short(error: Exception) -> str:
    """Return the first sentence of an error of Dynamo's, which goes on over many lines."""
    cause = getattr(error, "inner_exception", None) or error
    return f"{named(cause)}: {str(cause).strip().partition(chr(10))[0]}"


def _exchange_names() -> None:
    """Have Dynamo read CUDA's name of a tensor's device, and write the simulated one into its graph."""
    tensors = import_module("torch._dynamo.variables.tensor").TensorVariable
    constants = import_module("torch._dynamo.variables.constant").ConstantVariable
    autocasts = import_module("torch._dynamo.variables.ctx_manager").AutocastModeVariable
    build = import_module("torch._dynamo.variables.base").VariableTracker.build
    device, is_cuda = original(tensors, "method_attr_device"), original(tensors, "method_attr_is_cuda")
    proxy, begin = original(constants, "as_proxy"), original(autocasts, "__init__")

    def is_here(variable: Any) -> bool:
        return variable.device is not None and variable.device.type == DEVICE_TYPE

    def autocast(variable: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        kind = DEVICE_TYPE if values[0] == "cuda" else values[0]
        begin(variable, [kind, *values[1:]], *args, **kwargs)

    replace(tensors, "method_attr_device", lambda one, tx: build(tx, CUDA) if is_here(one) else device(one, tx))
    replace(tensors, "method_attr_is_cuda", lambda one, tx: build(tx, True) if is_here(one) else is_cuda(one, tx))
    replace(constants, "as_proxy", lambda one: simulated(proxy(one)))
    replace(autocasts, "__init__", autocast)
