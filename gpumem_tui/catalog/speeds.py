"""How fast one kind of GPU can be at most."""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS_OF_OTHERS = 108
"""An A100's, assumed for a GPU whose number is not known."""


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Highest rates that the vendor publishes, without sparsity; None where a GPU has none or none was found.

    Attributes:
        fp32: TFLOP/s of the CUDA cores in fp32.
        tf32: of the tensor cores on fp32 values rounded to 19 bits.
        half: of the tensor cores on fp16 with fp32 accumulation, and on bf16 where the architecture has that.
        memory: GB/s of the GPU's memory.
        pcie: GB/s of its PCIe link in one direction.
        nvlink: GB/s of all its NVLinks together in one direction.
        source: of the figures.
    """

    fp32: float
    memory: float
    pcie: float
    source: str
    tf32: float | None = None
    half: float | None = None
    nvlink: float | None = None
