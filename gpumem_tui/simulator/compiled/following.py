"""`torch.compile` on the simulated GPU: compiled by torch's own compiler, or, where that cannot be followed, eager."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from gpumem_tui.errors import named
from gpumem_tui.importing import Uncollected, after_import
from gpumem_tui.simulator.compiled import inductor
from gpumem_tui.simulator.compiled.ahead import Ahead
from gpumem_tui.simulator.compiled.hidden import CALL, announced, name_meshes, while_called, while_compiled
from gpumem_tui.simulator.compiled.told import Followed
from gpumem_tui.simulator.cuda.names import CUDA, simulated
from gpumem_tui.simulator.device.base import DEVICE_TYPE
from gpumem_tui.simulator.device.kinds import all_as_fakes, is_without_data
from gpumem_tui.simulator.torch_internals import (
    Replacements,
    is_checked,
    is_replaced,
    original,
    replace,
    without_replacements,
)
from gpumem_tui.step.sites import is_installed, is_own
from gpumem_tui.text import minor_of

_BACKENDS = ("inductor", "aot_eager", "eager", "aot_eager_decomp_partition", "cudagraphs")
_PACKAGE = Path(__file__).parents[2]
_COMPILED = _PACKAGE / "run" / "replacements.py"
"""Code that replaces a user's, and is compiled with it; so are the networks of `workload`."""
_OURS = frozenset(
    str(file) for room in ("simulator", "step", "run") for file in (_PACKAGE / room).rglob("*.py") if file != _COMPILED
)
"""Code that runs around a user's."""
_OF_OUR_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


def follow_compiler(
    notes: dict[str, None], begins: Callable[[int], None] = lambda _number: None, *, alone: bool = True
) -> Followed:
    """Have `torch.compile` compile for the simulated GPU, for as long as the process lives.

    Args:
        notes: gets a line of what was compiled, or why it was not, each as a key.
        begins: called with the number of a graph, from 1, before it is compiled.
        alone: no other run is traced next to this one, so that a processor is free to compile ahead.

    Returns:
        what it compiles, from then on.
    """
    followed = Followed(notes, begins)
    _told.append(followed)
    compile_ = original(torch, "compile")

    @functools.cache
    def prepared() -> None:
        with Uncollected():
            _prepare(followed, Ahead(followed.lines, may_begin=alone))

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compiled, **options)
        if options.get("disable"):
            return model
        asked()
        reason = _reason_not_to(options.get("backend", "inductor"))
        if reason:
            return _eager(model, functools.partial(followed.estimated, reason))
        if isinstance(model, (nn.Module, type)):
            prepared()
            return compile_(model, **options)
        return _when_called(model, lambda: (prepared(), compile_(model, **options))[1])

    def asked() -> None:
        """Note that the program compiles, of which libraries do more than is used."""
        caller = sys._getframe(2).f_code.co_filename
        if is_own(caller) and not is_installed(caller):
            followed.asked()

    def compile_module(module: nn.Module, **options: Any) -> None:
        asked()
        module._compiled_call_impl = compiled(module._call_impl, **options)

    after_import("torch._dynamo.compiled_autograd", functools.partial(_compile_backwards, followed, prepared))
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
    if not is_checked("torch.compile"):
        return f"the compiler of torch {'.'.join(torch.__version__.split('.')[:2])} was not tried"
    if isinstance(chosen, str) and chosen not in _BACKENDS:
        known = chosen in torch.compiler.list_backends(exclude_tags=())
        return f"backend {chosen!r} is {'not followed' if known else 'none that torch has here'}"
    return "no triton to import here" if find_spec("triton") is None else ""


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


_told: list[Followed] = []
"""The compilations of the process: of one program, perhaps run several times."""


def forget() -> None:
    """Forget what was compiled, and for which shapes: a further trace begins as a process of its own would."""
    for followed in _told:
        followed.begin_again()
    if "torch._inductor.compile_fx" in sys.modules:
        import_module("torch._dynamo").reset_code_caches()
        import_module("torch._dynamo.utils").counters.clear()
        import_module("torch._dynamo.pgo").reset_code_state()


# Dynamo


def _prepare(followed: Followed, ahead: Ahead) -> None:
    """Have Dynamo and Inductor work on the simulated GPU, and tell what they make of the program."""
    inductor.prepare(followed, ahead)
    warnings.filterwarnings("ignore", message=_OF_OUR_HOOKS)
    import_module("torch._dynamo").config.suppress_errors = True
    rules = import_module("torch._dynamo.trace_rules")
    rules.SKIP_DIRS.extend(_OURS)
    rules._recompile_re()
    _follow_frames(followed, ahead)
    _leave_out_ours()
    _exchange_names()
    after_import("torch.distributed.device_mesh", name_meshes)


def _follow_frames(followed: Followed, ahead: Ahead) -> None:
    """Have it told which frames Dynamo compiles, and which it gives up."""
    frames, unsupported = import_module("torch._dynamo.convert_frame"), import_module("torch._dynamo.exc")
    contexts = import_module("torch._dynamo.eval_frame").OptimizeContext
    convert, enter = original(frames.ConvertFrameAssert, "__call__"), original(contexts, "__call__")
    counters = import_module("torch._dynamo.utils").counters

    def converted(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with while_compiled(), Uncollected(), _disable_current_modes():  # Dynamo leaves them on within DDP
                return convert(self, frame, *args, **kwargs)
        except (unsupported.Unsupported, unsupported.SkipFrame) as error:
            if frame.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names:
                code = frame.f_code
                place = f"{code.co_name}, {Path(code.co_filename).name}:{code.co_firstlineno}"
                followed.ran_eager(place, _in_short(error))
            raise
        except Exception as error:
            followed.estimated(_failed(error))
            raise
        finally:
            ahead.framed()
            followed.counted(counters)

    def entered(self: Any, function: Any) -> Any:
        with without_replacements(CALL):
            result = enter(self, function)
        if isinstance(result, (nn.Module, type)):
            return result
        return _hiding(result, function, followed, ahead, unsupported.TorchDynamoException)

    logging.getLogger(frames.__name__).addFilter(lambda record: not str(record.msg).startswith("WON'T CONVERT"))
    replace(frames.ConvertFrameAssert, "__call__", converted)
    replace(contexts, "__call__", entered)


def _leave_out_ours() -> None:
    """Have Dynamo compile no code that runs around a user's, nor guard by it, and take our tensors for its own."""
    version = minor_of(torch.__version__)
    wrapper = import_module("torch._dynamo.convert_frame").CatchErrorsWrapper
    kinds = import_module("torch._dynamo.types")
    meet = original(wrapper, "__call__")
    if version >= (2, 7):
        skip = kinds.FrameExecStrategy(kinds.FrameAction.SKIP, kinds.FrameAction.SKIP)  # with all that it calls
        left_out = kinds.ConvertFrameReturn(frame_exec_strategy=skip)
    else:
        left_out = import_module("torch._C._dynamo.eval_frame").skip_code_recursive_flag
    guards = import_module("torch._dynamo.guards").GuardBuilder
    by_object = "id_match_unchecked" if hasattr(guards, "id_match_unchecked") else "ID_MATCH"  # torch up to 2.8
    match = original(guards, by_object)
    graph = import_module("torch._dynamo.output_graph").OutputGraph
    given = original(graph, "example_inputs")
    builder = import_module("torch._dynamo.variables.builder")
    checkpoints = original(builder, "is_utils_checkpoint")

    def is_checkpoint(value: Any) -> bool:
        """Return whether a value is torch's checkpoint, or ours around it, which a program may have imported."""
        within = vars(value).get("__wrapped__") if isinstance(value, FunctionType) else None
        return bool(checkpoints(value) or checkpoints(within))

    def met(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_filename in _OURS:
            return left_out
        return meet(self, frame, *args, **kwargs)

    def matched(self: Any, guard: Any, *args: Any) -> None:
        """Guard code by an object, but for a function that is replaced again where that code is called."""
        if not is_replaced(self.get(guard if version >= (2, 10) else guard.name)):
            match(self, guard, *args)

    def inputs(self: Any) -> list[Any]:
        """Return a graph's inputs as tensors of Dynamo's own mode, which torch leaves to the caller up to 2.10."""

        def own(one: Any) -> Any:
            is_other = is_without_data(one) or is_traceable_wrapper_subclass(one)
            return self.fake_mode.from_tensor(one) if is_other else one

        return list(tree_map(own, given(self)))

    replace(wrapper, "__call__", met)
    replace(guards, by_object, matched)
    replace(builder, "is_utils_checkpoint", is_checkpoint)
    if version <= (2, 10):
        replace(graph, "example_inputs", inputs)


def _hiding(compiled: Any, function: Any, followed: Followed, ahead: Ahead, failure: Any) -> Any:
    """Return compiled code that does not see what the simulated GPU does around it."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with announced(function, args), while_called():
            ahead.called(getattr(function, "__self__", None), lambda: compiled(*args, **kwargs))
            try:
                return compiled(*args, **kwargs)
            except failure as error:  # cycles of an error with its frames would keep their tensors
                followed.estimated(_failed(error.with_traceback(None)))
            return function(*args, **kwargs)

    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
    return call


def _failed(error: Exception) -> str:
    """Return the line for an error that a compiler stops with."""
    return f"the compiler stopped with {_in_short(error)}, as it may on a GPU, where that ends the program"


def _in_short(error: Exception) -> str:
    """Return the first sentence of an error of Dynamo's, which continues over many lines."""
    cause = getattr(error, "inner_exception", None) or error
    return f"{named(cause)}: {str(cause).strip().partition(chr(10))[0]}"


def _compile_backwards(followed: Followed, prepared: Callable[[], None], module: Any) -> None:
    """Have compiled autograd see of a backward what the program made of it.

    Args:
        prepared: called before anything is compiled.
        module: `torch._dynamo.compiled_autograd`.
    """
    instance = module.AutogradCompilerInstance
    enable, begin, end = (
        original(module, "_enable"),
        original(instance, "begin_capture"),
        original(instance, "end_capture"),
    )

    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with all_as_fakes():
            return engine(*args, **kwargs)

    @contextmanager
    def enabled(*args: Any, **kwargs: Any) -> Iterator[None]:
        reason = _reason_not_to("inductor")
        if not reason and minor_of(torch.__version__) < (2, 8):
            reason = f"torch {torch.__version__} follows none where a mode is on"
        if reason:
            followed.left_out(f"compiled autograd is not followed, as {reason}")
            yield
            return
        prepared()
        with enable(*args, **kwargs), Replacements() as replacements:
            replacements.wrap(torch.autograd, "_engine_run_backward", run)
            yield

    def begun(self: Any, *args: Any) -> Any:
        self.stack.enter_context(while_compiled())
        self.stack.enter_context(_disable_current_modes())
        return begin(self, *args)

    def ended(self: Any, outputs: Any) -> Any:
        run_compiled, compiled = end(self, outputs)

        def called(function: Any, inputs: Any, sizes: Any, scalars: Any, hooks: Any, packed: Any) -> Any:
            with while_called():
                return run_compiled(function, inputs, sizes, scalars, [_as_written(hook) for hook in hooks], packed)

        return called, compiled

    replace(module, "_enable", enabled)
    replace(instance, "begin_capture", begun)
    replace(instance, "end_capture", ended)


def _as_written(hook: Any) -> Any:
    """Return the program's function that one of ours calls; what gives a gradient as it is in place of one of ours."""
    while getattr(getattr(hook, "__code__", None), "co_filename", "") in _OURS:
        hook = getattr(hook, "__wrapped__", torch.detach)
    return hook


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

    def autocast(variable: Any, target_values: Any, *args: Any, **kwargs: Any) -> None:
        kind = DEVICE_TYPE if target_values[0] == "cuda" else target_values[0]
        begin(variable, [kind, *target_values[1:]], *args, **kwargs)

    replace(tensors, "method_attr_device", lambda one, tx: build(tx, CUDA) if is_here(one) else device(one, tx))
    replace(tensors, "method_attr_is_cuda", lambda one, tx: build(tx, True) if is_here(one) else is_cuda(one, tx))
    replace(constants, "as_proxy", lambda one: simulated(proxy(one)))
    replace(autocasts, "__init__", autocast)
