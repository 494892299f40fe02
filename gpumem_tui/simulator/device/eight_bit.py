"""bitsandbytes without its compiled library: its own Python runs, and allocates what it does on CUDA.

Its operators are functions of Python that make their results and scratch, then call a kernel of the library (version
0.50, backends/cuda/ops.py; the kernels take no memory of their own: csrc/kernels.cu, csrc/ops.cu, where `igemmlt` gives
cuBLASLt no workspace). Here the kernels do nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from gpumem_tui.importing import after_import
from gpumem_tui.simulator.device.base import DeviceParts
from gpumem_tui.simulator.device.kernels import Refused, bodies

_OUTLIERS = 7
_SCALE = 1 / 127

NOTE = (
    f"linear layers of 8 bits: {_OUTLIERS} columns of their input are taken to have outliers, which only its values "
    "tell: the most in models of up to 13 billion parameters (arXiv 2208.07339, section 3.2)"
)

_PAGED = (
    "paged optimizer states lie in managed memory, which CUDA moves to the host when the GPU is full: they are not "
    "counted (bitsandbytes, get_paged in functional.py)"
)


class _NoKernel:
    """A function of the library, whose types may be set as those of `ctypes`; it states that it succeeded."""

    def __call__(self, *_: Any) -> int:
        return 0


class _NoLibrary:
    """The operator `bitsandbytes.cextension.lib` is on CUDA."""

    compiled_with_cuda = True

    @functools.cache  # noqa: B019 - there is one
    def __getattr__(self, name: str) -> _NoKernel:
        return _NoKernel()

    __getitem__ = __getattr__


def follow_bitsandbytes(current: Callable[[], DeviceParts]) -> None:
    """Have bitsandbytes work without its library, once the program has imported it.

    Args:
        current: the GPU that is simulated now.
    """
    vectorwise = functools.partial(_quantized_by_rows, current)
    # Registered before the package's first module ends.
    bodies["bitsandbytes::int8_vectorwise_dequant"] = lambda values, scales: values * scales.view(-1, 1) * _SCALE
    # Before anything is imported: it would say with a traceback that CUDA's libraries are not there.
    logging.getLogger("bitsandbytes.cextension").addFilter(lambda record: record.levelno < logging.ERROR)
    after_import("bitsandbytes.cextension", _without_library)
    after_import("bitsandbytes._ops", functools.partial(_keep_kernels, vectorwise))
    after_import("bitsandbytes.functional", functools.partial(_with_paged, current))


def _without_library(module: ModuleType) -> None:
    module.lib = _NoLibrary()  # type: ignore[attr-defined]


def _keep_kernels(vectorwise: Callable[..., Any], operators: ModuleType) -> None:
    """Keep what the package registers as operators on CUDA, or on every device, as their bodies."""
    register = operators.register_kernel

    def keep(name: str, device: str, *rest: Any, **more: Any) -> Any:
        def kept(kernel: Callable[..., Any]) -> Any:
            if device == "cuda":
                bodies[name] = _refusing(kernel)
            elif device == "default":
                bodies.setdefault(name, kernel)
            bodies["bitsandbytes::int8_vectorwise_quant"] = vectorwise
            return register(name, device, *rest, **more)(kernel)

        return kept

    operators.register_kernel = keep  # type: ignore[attr-defined]


def _refusing(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Have what the package refuses on CUDA, as an optimizer that has no kernel of 8 bits, end the program as there."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except ValueError as error:
            raise Refused(error) from None

    return run


def _with_paged(current: Callable[[], DeviceParts], functional: ModuleType) -> None:
    """Have states that are paged be tensors of the host, of their shape and without memory, and norms not be read."""
    update = functional.optimizer_update_32bit

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        current().notes[_PAGED] = None
        made: Any = torch.zeros((), dtype=dtype, device="cpu").expand(shape)
        made.is_paged, made.page_deviceid = True, getattr(device, "index", 0)
        return made  # type: ignore[no-any-return]

    @functools.wraps(update)
    def updated(name: str, gradient: Any, parameter: Any, *args: Any, max_unorm: float = 0.0, **more: Any) -> None:
        if max_unorm > 0:  # its value only limits the update
            torch.norm(parameter.data.float())
        update(name, gradient, parameter, *args, **more)

    functional.get_paged, functional.optimizer_update_32bit = paged, updated  # type: ignore[attr-defined]


def _quantized_by_rows(
    current: Callable[[], DeviceParts], values: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Quantize each row, as the operator does, with as many outliers as `NOTE` states."""
    columns = values.shape[-1]
    scales = values.new_empty(values.numel() // columns, dtype=torch.float32)
    made = values.new_empty(values.shape, dtype=torch.int8)
    found = None
    if threshold > 0:
        current().notes[NOTE] = None
        outliers = values.abs() >= threshold
        outliers.any()
        outliers.any(dim=0)
        found = values.new_empty(min(_OUTLIERS, columns), dtype=torch.int64)
        if scales.numel() > 1:
            made[:, found] = 0
    return made, scales, found
