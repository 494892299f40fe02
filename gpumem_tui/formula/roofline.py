"""How long a training step takes at least, from the arithmetic and the bytes it moves (Williams et al. 2009).

Each matrix product takes the longer of its arithmetic at the rate that is assumed to be achieved, and of moving its
matrices once. A product that fills only part of the GPU takes as long as one that fills it: an output is cut into tiles
of 128 × 128, one for each multiprocessor at a time (NVIDIA's guide to matrix multiplication), and a long sum into
pieces that run side by side (split-K, there too). The optimizer's update moves parameters, gradients and state once,
regardless of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from gpumem_tui.catalog.shapes import MULTIPROCESSORS_OF_OTHERS, Gpu, ModelShape
from gpumem_tui.formula.fixed import state_factors
from gpumem_tui.formula.matmuls import Matmul, matmuls
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.records import BF16_SINCE, OPTIMIZER_RECORDS, PRECISION_RECORDS
from gpumem_tui.formula.resolved import fused
from gpumem_tui.formula.weights import weights
from gpumem_tui.memory import Unknown

TERA, GIGA = 1e12, 1e9
_TILE = 128
_PIECE = 512
"""Terms of a sum below which it is not cut. Assumed."""
_LEAST_SIDE = 32
"""A side of an output that is shorter takes as long as this one: of the smallest tiles of NVIDIA's libraries."""


@dataclass(frozen=True, slots=True)
class AssumedShare:
    """The share of the highest arithmetic rate that training is assumed to achieve, from published results.

    Attributes:
        least, most: from 0 to 1.
    """

    least: float
    most: float
    source: str

    def __str__(self) -> str:
        return f"{100 * self.least:.0f} to {100 * self.most:.0f} %"


_TRANSFORMERS = AssumedShare(
    0.30,
    0.46,
    "MT-NLG 30 %, PaLM 46 % (Chowdhery et al. 2022, table 3); Llama 3 38 to 43 % (Grattafiori et al. 2024, table 4)",
)
_CONVOLUTIONS = AssumedShare(
    0.15,
    0.24,
    "ResNet-50 by NVIDIA's DeepLearningExamples: 938 (TF32) and 2,470 images/s (mixed) on an A100, 1,200 on a V100",
)
_CUDA_CORES = AssumedShare(
    0.40, 0.60, "ResNet-50 in fp32 by NVIDIA's DeepLearningExamples: 367 images/s on a V100 are 57 %; else assumed"
)


@dataclass(frozen=True, slots=True)
class Engine:
    """The unit of the GPU that computes a step's products.

    Attributes:
        name: in words. `tflops`: its highest rate.
    """

    name: str
    tflops: float
    share: AssumedShare

    @property
    def words(self) -> str:
        """The name of the unit, and its highest rate."""
        return f"the {self.tflops:,.4g} TFLOP/s of its {self.name}"


def engine(shape: ModelShape, recipe: Recipe, gpu: Gpu) -> Engine | Unknown:
    """Return what computes the products of a step by torch's defaults, or why its rate is not known.

    By default torch multiplies fp32 matrices on the CUDA cores, and convolves in TF32 where there is one
    (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32).
    """
    speed = gpu.speed
    if speed is None:
        return Unknown(f"the arithmetic rate of {gpu.title} is not in the catalog")
    if gpu.arch:
        return Unknown(f"what share of its rates a step gets on {gpu.title} is not known: shares are of NVIDIA's GPUs")
    convolves = shape.record.has_batch_norm
    share = _CONVOLUTIONS if convolves else _TRANSFORMERS
    computes_in = PRECISION_RECORDS[recipe.precision].computes_in
    if computes_in == "float32":
        if convolves and speed.tf32 is not None:
            return Engine("tensor cores in TF32", speed.tf32, share)
        return Engine("CUDA cores in fp32", speed.fp32, _CUDA_CORES)
    if computes_in == "bfloat16" and gpu.compute_capability < BF16_SINCE:
        return Unknown(f"{gpu.title} computes bfloat16 by emulation, at no published rate; take amp-fp16")
    if speed.half is None:
        return Unknown(f"{gpu.title} has no tensor cores, and no published rate of fp16 with fp32 accumulation")
    return Engine("tensor cores in 16 bits", speed.half, share)


def _again(product: Matmul, recipe: Recipe) -> bool:
    """Return whether it is recomputed in backward."""
    if not product.backward:
        return False
    return product.in_block and (recipe.recompute == "full" or (recipe.recompute == "selective" and product.heads > 0))


@lru_cache(maxsize=4096)
def pass_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu, batch_size: int, share: float) -> float | Unknown:
    """Return seconds of a forward and backward of `batch_size` samples on one GPU at that share of its highest rate."""
    products, found = matmuls(shape, recipe), engine(shape, recipe, gpu)
    if isinstance(products, Unknown):
        return products
    if isinstance(found, Unknown):
        return found
    assert gpu.speed is not None
    units = gpu.multiprocessors or MULTIPROCESSORS_OF_OTHERS
    flops_per_s, bytes_per_s = found.tflops * TERA * share, gpu.speed.memory * GIGA
    width = PRECISION_RECORDS[recipe.precision].compute_bytes

    def seconds(flops: float, parts: int, elements: float) -> float:
        return max(flops / (flops_per_s * min(1.0, parts / units)), width * elements / bytes_per_s)

    return _sum(shape, products, recipe, batch_size, seconds)


@lru_cache(maxsize=4096)
def relative_pass(shape: ModelShape, recipe: Recipe, multiprocessors: int | None, batch_size: int) -> float:
    """Return the time of one forward and backward by arithmetic alone, in a unit of no meaning: only ratios are of use.

    For a family whose products are not known it is proportional to the batch.
    """
    products, units = matmuls(shape, recipe), multiprocessors or MULTIPROCESSORS_OF_OTHERS
    if isinstance(products, Unknown):
        return float(batch_size)

    return _sum(shape, products, recipe, batch_size, lambda flops, parts, _elements: flops / min(1.0, parts / units))


def _sum(
    shape: ModelShape,
    products: tuple[Matmul, ...],
    recipe: Recipe,
    batch_size: int,
    seconds: Callable[[float, int, float], float],
) -> float:
    """Sum over the products of forward and backward.

    Each has `seconds` of its operations, its parts that can run side by side, and the elements of its three
    matrices. Scores that a fused kernel keeps on the chip are not moved.
    """
    total = 0.0
    for product in products:
        rows = product.rows if product.heads else product.rows * batch_size
        count = product.heads * batch_size or 1
        columns, depth = product.columns, product.depth
        elements = count * (rows * depth / product.window + product.matrices * depth * columns + rows * columns)
        if product.heads and fused(shape, recipe):
            elements -= count * product.rows**2
        forward, *backward = (
            seconds(count * _flops(*dims), count * _parts(*dims), elements)
            for dims in ((rows, columns, depth), (rows, depth, columns), (depth, columns, rows))
        )
        gradients = backward[: product.backward]  # that of the input comes first
        total += product.times * (forward * (1 + _again(product, recipe)) + sum(gradients))
    return total


def _flops(rows: int, columns: int, terms: int) -> float:
    return 2.0 * max(rows, _LEAST_SIDE) * max(columns, _LEAST_SIDE) * terms


def _parts(rows: int, columns: int, terms: int) -> int:
    """Count tiles of an output, and the pieces that the sum behind each is cut into."""
    return -(-rows // _TILE) * -(-columns // _TILE) * max(1, terms // _PIECE)


def update_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu) -> float | Unknown:
    """Return seconds of one optimizer step on one GPU: parameters and state are read and written, gradients read."""
    if gpu.speed is None:
        return Unknown(f"the memory bandwidth of {gpu.title} is not in the catalog")
    tensors, storage = weights(shape, recipe).trained, PRECISION_RECORDS[recipe.precision]
    state_bytes = prod(state_factors(OPTIMIZER_RECORDS[recipe.optimizer], tensors, storage.state_bytes))
    parameters = sum(tensor.values for tensor in tensors)
    moved = parameters * (2 * storage.parameter_bytes + storage.gradient_bytes) + 2 * state_bytes
    sharded = recipe.sharded_over if recipe.sharding != "none" else 1
    cut = recipe.tensor_parallel * recipe.pipeline_parallel
    return moved / sharded / cut / (gpu.speed.memory * GIGA)
