"""Answers of collectives where every rank holds what rank 0 holds.

The `fake` process group copies what it can between tensors with values and leaves sums as they are; tensors of the
simulated device it never sees. Here the results follow for both, as far as there are values (see `values`), since
programs take lengths and counts from them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.device.kinds import is_without_data

_STASHES_SINCE = (2, 8)

_MOST_ELEMENTS = 1 << 16
"""Counts and lengths are small: what is larger, as gradients, has no values on the device that anybody reads."""

_Arguments = Mapping[str, Any]
_Follow = Callable[[_Arguments, int], torch.Tensor | None]


# Collectives of objects take the place of torch's, which read sizes back.


def _all_gather_object(object_list: list[Any], obj: Any, *_: object, **__: object) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: object, **__: object) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *_: object,
    **__: object,
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _recv_object_list(*_: object, **__: object) -> None:
    raise RuntimeError(
        "this rank receives an object that only another one has, which is not run: of torch.distributed.pipelining, "
        "give PipelineStage its input_args and output_args"
    )


OF_OBJECTS: dict[str, Callable[..., Any]] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": lambda *_, **__: None,
    "send_object_list": lambda *_, **__: None,
    "recv_object_list": _recv_object_list,
}
"""By the name of the function of `torch.distributed`."""


# Collectives of tensors: what is done to the result after torch's own has run. Each returns it.


def _gathered(given: _Arguments, _ranks: int) -> None:
    for output in given.get("tensor_list") or given.get("gather_list") or ():
        _copy(output, given["tensor"])


def _gathered_whole(given: _Arguments, ranks: int) -> None:
    output, part = given["output_tensor"], given["input_tensor"]
    _copy(output.view(ranks, -1), part.reshape(1, -1).expand(ranks, -1))


def _scattered(given: _Arguments, _ranks: int) -> None:
    if given.get("scatter_list"):
        _copy(given["tensor"], given["scatter_list"][0])


def _reduce_scattered(given: _Arguments, ranks: int) -> torch.Tensor:
    output: torch.Tensor = given["output"]
    first = given["input_list"][0] if "input_list" in given else given["input"].reshape(-1)[: output.numel()]
    _copy(output, first.reshape(output.shape))
    return _summed(output, given, ranks)


def _exchanged(given: _Arguments, _ranks: int) -> None:
    if given["output"].shape == given["input"].shape:
        _copy(given["output"], given["input"])


OF_TENSORS: dict[str, _Follow] = {
    "all_gather": _gathered,
    "gather": _gathered,
    "all_gather_into_tensor": _gathered_whole,
    "scatter": _scattered,
    "all_reduce": lambda given, ranks: _summed(given["tensor"], given, ranks),
    "reduce": lambda given, ranks: _summed(given["tensor"], given, ranks),
    "reduce_scatter": _reduce_scattered,
    "reduce_scatter_tensor": _reduce_scattered,
    "all_to_all_single": _exchanged,
}
"""By the name of the function of `torch.distributed`."""


def among_equals(collective: Callable[..., Any], follow: _Follow) -> Callable[..., Any]:
    """Return the collective with the results that it has if all ranks hold what this one does."""
    bind = inspect.signature(collective).bind

    @functools.wraps(collective)
    def answered(*args: Any, **kwargs: Any) -> Any:
        given = bind(*args, **kwargs).arguments
        row = _in_a_row(given)
        with torch._C.DisableTorchFunction():  # else a mode gets to see, and to call, this function instead
            work = collective(*args, **kwargs)
        kept = _stash({**given, "row": row}, is_waited_for=work is None)
        ranks = dist.get_world_size(given.get("group"))
        if ranks < 1:  # of a group that this rank is not in
            return work
        with torch.no_grad():
            result = follow(given, ranks)
        return work and _Done(() if result is None else (result,), kept)

    return answered


def _in_a_row(given: _Arguments) -> torch.Tensor | None:
    """Return where `all_gather` and `reduce_scatter` have a list's tensors in a row, of one size; else None.

    It is `newLikeFlat` in `allgather` and `reduce_scatter` of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
    """
    listed: list[torch.Tensor] = given.get("tensor_list") or given.get("input_list") or []
    if not listed or not is_without_data(listed[0]) or any(one.shape != listed[0].shape for one in listed):
        return None
    return listed[0].new_empty((len(listed), *listed[0].shape))


_stashed: list[tuple[int, int, list[torch.Tensor]]] = []
"""Tensors kept by collectives that nobody has waited for, how many phases had begun and the GPU's work by then."""


def _stash(given: _Arguments, *, is_waited_for: bool) -> list[torch.Tensor]:
    """Keep the tensors of a collective until its work is waited for; if only its future is, a phase or more.

    Instead of recording streams, PyTorch keeps them since 2.8. Work that was not waited for is let go by the next
    collective
    after a side thread, which looks ten times a second, has found it ended: not in the same phase, nor while the GPU
    may be behind a program that does not wait for it (`TensorShelf` and `shelvesToUnstash_` of
    torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, #148590).
    """
    gpu = backend.current
    if gpu is None or gpu.profile.version < _STASHES_SINCE:
        return []
    begun, done = gpu.phases_begun, gpu.streams.done
    _stashed[:] = [one for one in _stashed if one[2] and (one[0] == begun or one[1] > done)]
    if is_waited_for:
        return []
    kept = [one for one in pytree.tree_leaves(dict(given)) if isinstance(one, torch.Tensor) and is_without_data(one)]
    _stashed.append((begun, gpu.streams.moment, kept))
    return kept


def _copy(output: torch.Tensor, given: torch.Tensor) -> None:
    """Copy on the device; on the host the `fake` process group has done it."""
    if is_without_data(output) and _is_followed(output) and output.numel() == given.numel():
        output.copy_(given)


def _summed(tensor: torch.Tensor, given: _Arguments, ranks: int) -> torch.Tensor:
    operation = given.get("op", dist.ReduceOp.SUM)
    if _is_followed(tensor) or not is_without_data(tensor):
        if operation == dist.ReduceOp.SUM:
            tensor.mul_(ranks)
        elif operation == dist.ReduceOp.PRODUCT:
            tensor.pow_(ranks)
    return tensor


def _is_followed(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _MOST_ELEMENTS and not tensor.requires_grad


class _Done(dist.distributed_c10d.Work):
    """A collective that is over, with its result, which `FakeWork` has not, and what it keeps until waited for."""

    def __init__(self, result: tuple[torch.Tensor, ...], kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._result, self._kept = result, kept

    def wait(self, *_: object, **__: object) -> bool:
        """Let go what was kept."""
        self._kept.clear()
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the collective wrote."""
        return list(self._result)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that has the result already."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future
