"""Leaves out of Inductor's work what only the sources of kernels need, and what is found out again and again.

Each shortcut comes to the result that Inductor comes to; where a torch lacks what it builds on, or a kernel is of
another kind, Inductor goes its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import fx

from gpumem_tui.simulator.torch_internals import MissingInTorch, original, replace

_BY_THEIR_CODE = ("scan", "sort", "bucketize", "partial_accumulate")
"""Operators whose kernels take workspaces, or other buffers than a body's list of accesses has."""


def shorten() -> None:
    """Shorten the work of torch's Inductor, for as long as the process lives."""
    patterns = _what_is_there, _attention_of_products
    for shortcut in (_templates_when_used, _no_bodies, _no_symbols, _reindexed_once, *patterns, _no_caches):
        try:
            shortcut()
        except (AttributeError, ImportError, LookupError, MissingInTorch):  # another torch, which goes the long way
            continue


def _module(name: str) -> Any:
    return import_module(f"torch._inductor.{name}")


# Kernels


def _no_bodies() -> None:
    """Have the buffers that a kernel takes and makes found by its accesses, without the source of its body."""
    scheduling, common = _module("codegen.simd").SIMDScheduling, _module("codegen.common")
    loops, settings, virtualized = _module("loop_body"), _module("config").triton, _module("virtualized").V
    kinds = loops.MemoryUsageType
    usual = original(scheduling, "codegen_node_schedule")

    def is_plain(features: Any) -> bool:
        """Say whether a kernel is one loop at most: what it writes and reads again within is not written then."""
        if virtualized.graph.sizevars.shape_env.var_to_range or settings.multi_kernel:
            return False
        if any(features.contains_op(name) for name in _BY_THEIR_CODE):
            return False
        if not features.is_reduction():
            return True
        otherwise = settings.cooperative_reductions or settings.force_cooperative_reductions
        otherwise = otherwise or hasattr(features, "with_tiling_scores")  # which torch 2.14 goes by
        return not otherwise and virtualized.choices.should_use_persistent_reduction(features, False)

    def generated(self: Any, features: Any) -> None:
        if not is_plain(features):
            usual(self, features)
            return
        graph, kernel, nodes = virtualized.graph, common.Kernel(), tuple(features.scheduler_nodes())
        with virtualized.set_kernel_handler(kernel):
            for node in nodes:
                node.decide_inplace_update()
            stored: set[str] = set()
            for node in nodes:
                _follow_accesses(kernel, node, kinds, graph, stored)
            kernel.remove_kernel_local_buffers()
            for node in nodes:
                node.mark_run()
        graph.removed_buffers |= kernel.removed_buffers
        graph.inplaced_to_remove |= kernel.inplaced_to_remove
        self.scheduler.free_buffers()

    replace(scheduling, "codegen_node_schedule", generated)


def _follow_accesses(kernel: Any, node: Any, kinds: Any, graph: Any, stored: set[str]) -> None:
    """Have a kernel take the buffers that a node reads and writes, as `CSEProxy` in codegen/common.py does.

    Args:
        kinds: of accesses, by name.
        stored: what was written by the kernel up to here, whose values are not read again; gets what the node writes.
    """
    body = node._body
    for entry in body.memory_usage[kinds.LOAD_SEED]:
        kernel.args.input(entry.buffer_name)
    for entry in body.memory_usage[kinds.LOAD]:
        by_a_value = any(one.name.startswith("indirect") for one in body.indexing_exprs[entry.index_name].free_symbols)
        if by_a_value or entry.buffer_name not in stored:
            kernel.args.input(entry.buffer_name)
    for entry in (*body.memory_usage[kinds.STORE], *body.memory_usage[kinds.STORE_REDUCTION]):
        name = entry.buffer_name
        kernel.store_buffer_names.add(name)
        if entry.mode != "atomic_add":
            stored.add(name)
            if name in graph.name_to_buffer:
                stored.update(node.get_output(name).get_mutations())
        if name not in graph.removed_buffers:
            kernel.args.output(name)


# Templates


class _Template:
    """Stand-in for a template of a kernel's source, which takes as long to read as a graph to lower, until one is used.

    Args:
        read: reads it.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = functools.cache(read)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)


def _templates_when_used() -> None:
    """Have templates read once one is used: hardly a graph uses any where nothing is tuned."""
    templates = _module("codegen.common").KernelTemplate
    read = original(templates, "_template_from_string")
    later = staticmethod(lambda source: _Template(functools.partial(read, source)))
    replace(templates, "_template_from_string", later)


# Questions about sizes that are numbers


def _no_symbols() -> None:
    """Have a graph of fixed sizes searched for no symbols."""
    scheduler, virtualized = _module("scheduler"), _module("virtualized").V
    usual = original(scheduler.Scheduler, "get_graph_partition_symbol_inputs")

    def symbols(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_any = virtualized.graph.sizevars.shape_env.var_to_range
        return usual(self, *args, **kwargs) if has_any else scheduler.OrderedSet()

    replace(scheduler.Scheduler, "get_graph_partition_symbol_inputs", symbols)


# Loops


def _reindexed_once() -> None:
    """Have loops written over other sizes once: fusing them is tried with kernel after kernel of the same sizes."""
    bodies = _module("loop_body").LoopBody
    usual = original(bodies, "reindex_iter_loops")

    def reindexed(self: Any, sizes: Any) -> Any:
        known = vars(self).setdefault("_as_reindexed", {})
        if tuple(sizes) not in known:
            known[tuple(sizes)] = usual(self, sizes)
        return known[tuple(sizes)]

    replace(bodies, "reindex_iter_loops", reindexed)


# Patterns


def _what_is_there() -> None:
    """Have a pattern compared with a node only where all of its operators are in the graph."""
    patterns = _module("pattern_matcher")
    of = getattr(patterns, "backend", "inductor")  # torch up to 2.8
    fx.Graph()._find_nodes_lookup_table.table  # noqa: B018 - or an AttributeError

    @functools.cache
    def needed(pattern: Any) -> tuple[Any, ...]:
        """Return the operators of a pattern, each as the keys of which a graph must have one."""
        if isinstance(pattern, patterns.MultiOutputPattern):
            return tuple(key for part in pattern.outputs if part is not None for key in needed(part))
        if not isinstance(pattern, patterns.CallFunction):
            return ()
        parts = [part for part in pattern.flat_args_kwargs[0] if isinstance(part, patterns.PatternExpr)]
        own = tuple(("call_function", function) for function in pattern.fns)
        return (own, *(key for part in parts for key in needed(part)))

    class InGraph(dict[Any, Any]):
        """A pass's patterns, of which it gives those that a graph has the operators of, as it is by then."""

        def of(self, graph: Any) -> InGraph:
            self.table, self.as_of = graph._find_nodes_lookup_table.table, -1
            return self

        def __getitem__(self, key: Any) -> Iterator[Any]:
            for entry in dict.__getitem__(self, key):
                changes = patterns.counters[of]["pattern_matcher_count"]  # of graphs, by patterns
                if self.as_of != changes:
                    self.as_of, self.are_there = changes, dict[Any, bool]()
                if entry.pattern not in self.are_there:
                    every = needed(entry.pattern)
                    self.are_there[entry.pattern] = all(any(map(self.table.get, keys)) for keys in every)
                if self.are_there[entry.pattern]:
                    yield entry

    usual = original(patterns.PatternMatcherPass, "apply")

    def apply(self: Any, graph: Any) -> Any:
        before = self.patterns
        self.patterns = InGraph(before).of(getattr(graph, "graph", graph))
        try:
            return usual(self, graph)
        finally:
            self.patterns = before

    replace(patterns.PatternMatcherPass, "apply", apply)


def _attention_of_products() -> None:
    """Have patterns of attention made once a graph has products of batches, as all of them have: tracing them is long.

    A graph has none where attention is one operator, or none exists.
    """
    attention, joint, inner = (
        _module(name) for name in ("fx_passes.fuse_attention", "fx_passes.joint_graph", "compile_fx")
    )
    make, usual = original(attention, "_sfdp_init"), original(inner, "joint_graph_passes")
    if not signature(make).parameters:  # torch 2.10, which asks for CUDA instead of a device
        return
    made = _module("pattern_matcher").init_once_fakemode(make)

    def passed(graph: Any, device: Any = None) -> Any:
        if any(node.target is torch.ops.aten.bmm.default for node in graph.graph.nodes):
            joint.lazy_init(device)
            made(torch.device("cpu"))
        return usual(graph, device)

    replace(attention, "_sfdp_init", lambda _device: None)
    replace(inner, "joint_graph_passes", passed)


# Work for caches


def _no_caches() -> None:
    """Have neither graphs written out nor triton's sources hashed for caches that are switched off."""
    usual = original(fx.GraphModule, "print_readable")

    def printed(self: Any, *args: Any, **options: Any) -> str:
        is_key = options.get("fast_sympy_print") and options.get("print_output") is False
        return "" if is_key else usual(self, *args, **options)

    replace(fx.GraphModule, "print_readable", printed)
    replace(_module("codecache"), "triton_key", lambda: "")
