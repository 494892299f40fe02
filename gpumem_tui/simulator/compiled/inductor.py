"""Makes torch's Inductor compile for the simulated GPU: its passes, buffers and wrapper, and no kernel.

Inductor takes device types by the interfaces that other vendors' devices use. Parts that need a device that computes,
such as patterns of real tensors and benchmarks, are replaced; a benchmark's choice follows a rule here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.simulator.allocator.contexts import CUDA_GRAPH
from gpumem_tui.simulator.compiled import beside
from gpumem_tui.simulator.compiled.ahead import Ahead
from gpumem_tui.simulator.compiled.hidden import while_compiled
from gpumem_tui.simulator.compiled.shortcuts import shorten
from gpumem_tui.simulator.compiled.told import Followed
from gpumem_tui.simulator.compiled.wrapper import Wrapper
from gpumem_tui.simulator.device.base import DEVICE_TYPE
from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.device.streams import Streams
from gpumem_tui.simulator.torch_internals import (
    Replacements,
    extend,
    original,
    replace,
    replace_everywhere,
    without_replacements,
)

_BYTES_NOT_KNOWN = 100.0
"""FLOP per value moved from which a product counts as bound by arithmetic where a GPU's rates are not known."""

_ITEM = {torch.float32: "fp32", torch.float16: "half", torch.bfloat16: "half"}
_CACHES: dict[str, Any] = {
    "fx_graph_cache": False,
    "compile_threads": 1,
    "joint_graph_constant_folding": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
}
_MEASURED: dict[str, Any] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "cpp_wrapper": False,
    "freezing": False,
}
"""Settings of Inductor's that ask a device which kernel is faster, or compile for the host."""

_LEFT_OUT = {
    "triton.cudagraphs": "CUDA graphs are traced as calls with buffers, and copies of inputs, from a pool of their own",
    "max_autotune": "traced without autotuned kernels, some of which take workspaces",
    "max_autotune_gemm": "traced without autotuned products, some of which take workspaces",
}
"""Settings of these that change memory, and are not held against a GPU."""

_SINCE: dict[str, tuple[int, int]] = {
    "reorder_for_peak_memory": (2, 6),
    "donated_buffer": (2, 6),
    "loop_ordering_after_fusion": (2, 10),
    "guess_tangent_strides_as_outputs": (2, 10),
}
"""Since which version of torch settings are on that change a compiled program's memory (its _inductor/config.py and
_functorch/config.py): that the kernels are ordered for the lowest peak alone took 2 % of it off."""

_kernels = itertools.count(1)


@functools.cache
def prepare(told: Followed, ahead: Ahead) -> None:
    """Have Inductor know the simulated GPU; once per process.

    Args:
        told: hears of what is not as on a GPU.
        ahead: compiles what training will call.

    Raises:
        MissingInTorch: this torch lacks what is replaced.
    """
    with without_replacements(("*",)):
        _module("_dynamo.variables.torch").TorchInGraphFunctionVariable._get_handlers()
    with while_compiled():
        shorten()
        _register()
        _replace(told, ahead)


def _module(name: str) -> Any:
    return importlib.import_module(f"torch.{name}")


def _register() -> None:
    interface = _module("_dynamo.device_interface")
    common = _module("_inductor.codegen.common")
    kind = _interface(interface.DeviceInterface)
    for name in (DEVICE_TYPE, f"{DEVICE_TYPE}:0"):
        interface.register_interface_for_device(name, kind)
    common.register_backend_for_device(
        DEVICE_TYPE,
        _module("_inductor.codegen.triton").TritonScheduling,
        _module("_inductor.codegen.wrapper").PythonWrapperCodegen,
    )
    common.register_device_op_overrides(DEVICE_TYPE, _overrides(_module("_inductor.codegen.cuda.device_op_overrides")))
    extend(_module("_inductor.utils"), "GPU_TYPES", DEVICE_TYPE)


def _interface(base: Any) -> type:
    """Make what Dynamo and Inductor ask a device's properties of: the answers of the simulated GPU."""

    def capability(_device: Any = None) -> int:
        major, minor = backend.get_device_capability()
        return 10 * major + minor

    def properties(_device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(type=DEVICE_TYPE, **vars(backend.get_device_properties()))

    plain: dict[Any, str] = {
        0: "current_device exchange_device get_raw_stream maybe_exchange_device memory_allocated",
        True: "device_count is_available is_triton_capable",
        None: "current_stream raise_if_triton_unavailable set_device set_stream stream synchronize",
    }
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": properties,
        "get_compute_capability": capability,
        "is_bf16_supported": backend.is_bf16_supported,
        **{name: (lambda *_, said=said, **__: said) for said, names in plain.items() for name in names.split()},
    }
    fixed = {name: staticmethod(answer) for name, answer in answers.items()}
    worker = type("Worker", (), {name: fixed[name] for name in ("set_device", "current_device")})
    worker.get_device_properties = staticmethod(properties)  # type: ignore[attr-defined]
    stream, event = type("Stream", (), {}), type("Event", (), {})
    parts = {"Worker": worker, "Stream": stream, "Event": event, "device": torch.device}
    return type("SimulatedInterface", (base,), {**fixed, **parts})


def _overrides(module: Any) -> Any:
    """Return what a wrapper states of its device: CUDA's words, without what starts CUDA."""

    class SimulatedOverrides(module.CUDADeviceOpOverrides):  # type: ignore[misc]
        def import_get_raw_stream_as(self, name: str) -> str:
            return f"{name} = torch.{DEVICE_TYPE}.current_device"

        def set_device(self, _index: int) -> str:
            return "pass"

        def synchronize(self) -> str:
            return "pass"

        def device_guard(self, index: int) -> str:
            return f"torch.{DEVICE_TYPE}.device({index})"

    return SimulatedOverrides()


def _replace(told: Followed, ahead: Ahead) -> None:
    settings = _module("_functorch.config")
    if hasattr(settings, "check_custom_op_aliasing"):  # a check, by a mode that gives operators numbers for tensors
        settings.check_custom_op_aliasing = False
    joint = _module("_inductor.fx_passes.joint_graph")
    inner = _module("_inductor.compile_fx")
    replace_everywhere(_module("_inductor.utils"), "get_gpu_type", lambda: DEVICE_TYPE)
    replace(joint, "lazy_init", functools.partial(_on_the_host, original(joint, "lazy_init")))
    padding = _module("_inductor.fx_passes.pad_mm")
    replace(padding, "check_device", lambda *_: True)
    replace(padding, "has_triton", lambda *_: True)
    decides = "should_pad" if hasattr(padding, "can_pad") else "should_pad_bench"  # torch 2.10
    replace(padding, decides, functools.partial(_is_padded, padding, told))
    replace(_module("_inductor.scheduler"), "has_triton", lambda *_: True)
    replace(_module("utils._triton"), "triton_hash_with_backend", lambda: "")
    random = _module("_prims.rng_prims")  # of what is computed again: it knows states of CUDA's generators
    asked = original(random, "get_device")
    replace(random, "get_device", lambda *given: (asked(*given) or "cuda").replace(DEVICE_TYPE, "cuda"))
    replace(inner, "get_input_idxs_to_check", lambda *_, **__: [])  # it asks for addresses
    replace(_module("_inductor.codegen.triton").TritonKernel, "codegen_kernel", _no_kernel)
    replace(_module("_inductor.graph").GraphLowering, "compile_to_module", _written)
    compile_graph = original(inner, "fx_codegen_and_compile")
    replace(inner, "fx_codegen_and_compile", functools.partial(beside.compiled, compile_graph))
    graphs = _module("_inductor.cudagraph_utils")
    on_one_device = original(graphs, "check_multiple_devices_or_any_cpu_nodes")
    replace(graphs, "check_multiple_devices_or_any_cpu_nodes", lambda nodes: on_one_device(_by_cudas_name(nodes)))
    replace(graphs, "check_caching_allocator_for_cudagraphs", lambda: None)
    replace(inner, "cudagraphify", _graphed)
    replace(_module("_dynamo.backends.cudagraphs"), "get_device_index", lambda _graph: 0)
    trees = _module("_inductor.cudagraph_trees")
    replace(trees, "cudagraphify_impl", functools.partial(_graphed_alone, told))
    logging.getLogger("torch._inductor.template_heuristics.registry").setLevel(logging.CRITICAL)  # per device type
    compile_ = functools.partial(_compile, told, ahead, original(inner, "compile_fx"))
    replace(inner, "compile_fx", compile_)
    ahead.prepare()


def _on_the_host(make_patterns: Callable[..., None], _device: Any = None) -> None:
    """Make patterns of tensors on the host: torch 2.10 asks for CUDA instead of a device."""
    if inspect.signature(make_patterns).parameters:
        make_patterns(torch.device("cpu"))
        return
    with Replacements() as replaced:
        replaced.set(torch.cuda, "is_available", lambda: False)
        make_patterns()


def _compile(
    told: Followed, ahead: Ahead, compile_fx: Any, graph: Any, inputs: Any, *,
    config_patches: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """Compile a graph of Dynamo's with Inductor; the backward at once, as nothing is gained by waiting."""
    if "inner_compile" in more:  # called by itself, with settings made
        return compile_fx(graph, inputs, config_patches=config_patches, **more)

    told.graph_begins()
    if checkpoints := sum(str(node.target).endswith("activation_checkpoint") for node in graph.graph.nodes):
        told.checkpoints(checkpoints)

    def compile_inner(part: Any, given: Sequence[Any], **kwargs: Any) -> Any:
        if compiling.forks(part, given, kwargs):
            return lambda *_: None  # which nobody calls in a fork
        with while_compiled():
            return _module("_inductor.compile_fx").compile_fx_inner(part, given, **kwargs)

    settings, current = _module("_functorch.config"), _module("_inductor.config").get_config_copy()
    for name, what in _LEFT_OUT.items():
        if (config_patches or {}).get(name, current.get(name)):
            told.left_out(what)
    later = {name for name, since in _SINCE.items() if backend._gpu.profile.version < since}
    patches = {**(config_patches or {}), **_CACHES, **_MEASURED, **dict.fromkeys(later, False)}
    patches = {name: value for name, value in patches.items() if name in current}
    wanted = {"force_non_lazy_backward_lowering": True, **ahead.settings(), **dict.fromkeys(later, False)}
    now = {name: value for name, value in wanted.items() if name in settings.get_config_copy()}
    with settings.patch(now), beside.Beside(told.lines) as compiling:
        return compile_fx(graph, inputs, inner_compile=compile_inner, config_patches=patches, **more)


def _by_cudas_name(nodes: dict[torch.device, Any]) -> dict[torch.device, Any]:
    """Return what uses which device, the simulated one by CUDA's name."""
    return {torch.device("cuda", 0) if kind.type == DEVICE_TYPE else kind: node for kind, node in nodes.items()}


def _graphed(call: Callable[[list[Any]], Any], static_input_idxs: Sequence[int] = (), **_: Any) -> Callable[..., Any]:
    """Have a compiled graph take what a CUDA graph of it would: from a pool of its own, with copies of its inputs.

    `cudagraph_trees` in torch/_inductor runs it once to warm up and captures it in the same pool; what parameters and
    saved activations hold (static inputs) is not copied. The rest is a replay, whose buffers lie where they were.
    """
    static, captured = frozenset(static_input_idxs), False

    def run(inputs: list[Any]) -> Any:
        nonlocal captured
        assert Streams.active is not None, "compiled code is called while a GPU is simulated"
        if not captured:
            captured = True
            backend._gpu.load(CUDA_GRAPH)
        with backend._gpu.memory.workspaces_of_its_own(), Streams.active.in_graph_pool():
            for place, given in enumerate(inputs):
                if isinstance(given, torch.Tensor) and given.device.type == DEVICE_TYPE and place not in static:
                    inputs[place] = torch.empty_strided(
                        given.shape, given.stride(), dtype=given.dtype, device=given.device
                    )
            return call(inputs)

    return run


def _graphed_alone(
    told: Followed, call: Callable[[list[Any]], Any], _inputs: Any, static: Any = (), *_: Any, **__: Any
) -> Any:
    """Have a graph that only CUDA graphs are made of take what one would."""
    told.left_out(_LEFT_OUT["triton.cudagraphs"])
    return _graphed(call, static)


def _no_kernel(kernel: Any, _name: Any = None) -> str:
    """Give a kernel no source but a number: which buffers it is called with follows from its arguments."""
    kernel.args.python_argdefs()
    kernel.triton_meta = {"signature": {}, "device": None, "constants": {}}
    kernel.inductor_meta = {}
    return f"@triton_heuristics.pointwise(\n{next(_kernels)}\n"


def _written(lowering: Any) -> Any:
    """Load the wrapper of a graph, as `GraphLowering.compile_to_module` does with kernels."""
    wrapper = Wrapper.of(lowering)
    return SimpleNamespace(call=wrapper, __file__="") if beside.is_fork() else wrapper.loaded()


# Products that Inductor pads


def _is_padded(
    padding: Any, told: Followed, match: Any, left: torch.Tensor, right: torch.Tensor, product: Any, **more: Any
) -> bool:
    """Say whether a product's operands are padded to aligned sizes: where arithmetic and not memory bounds it.

    Inductor asks two things (`_should_pad` in torch/_inductor/fx_passes/pad_mm.py): whether it is bound by arithmetic,
    more than half of the GPU's operations per value, and whether a benchmark of the padded product is faster by 10 %,
    which it is taken to be.
    """
    if hasattr(padding, "can_pad") and not padding.can_pad(left, right, product, **more):
        return False
    named = (*left.shape[-2:], right.shape[-1])
    sizes: list[int] = [size if isinstance(size, int) else size.node.hint for size in named]
    rows, inner, columns = sizes
    moved = rows * inner + inner * columns + rows * columns
    if not moved or rows * inner * columns / moved <= _balance(backend._gpu.gpu, left.dtype):
        return False
    unit = padding.get_alignment_size(left)
    wide = [size + padding.get_padded_length(size, unit) for size in sizes]
    if wide == sizes:
        return False
    more_values = 0
    for name, a, b in (("mat1", 0, 1), ("mat2", 1, 2), ("", 0, 2)):
        widened = wide[a] * wide[b] - sizes[a] * sizes[b]
        if widened and name and not padding.should_exclude_padding_time(match, name):
            widened = wide[a] * wide[b]  # copied: what makes it cannot write it padded
        more_values += widened
    told.padded((rows, inner, columns), more_values * left.element_size())
    return True


def _balance(gpu: Gpu, kind: torch.dtype) -> float:
    """Return half of the operations that a GPU makes per value that it moves (`is_mm_compute_bound` there)."""
    rate = getattr(gpu.speed, _ITEM.get(kind, ""), None) if gpu.speed else None
    return float(0.5 * 1000 * rate / gpu.speed.memory) if rate and gpu.speed else _BYTES_NOT_KNOWN
