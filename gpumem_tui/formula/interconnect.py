"""The time that several GPUs lose on each other: the bytes that each sends, over the slowest link on their way.

Gradients are summed in a ring, which sends 2(n − 1)/n of them from each of n GPUs (Patarasuk & Yuan 2009), at the
links' full rate: a lower bound of the time. ZeRO 1 and 2 send as much, ZeRO 3 half as much again (Rajbhandari et al.
2020, section 7). At best this is hidden behind backward, as torch's DDP and FSDP do (Li et al. 2020); at worst it comes
on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_tui.catalog.shapes import Gpu, GpuSpeed, ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.records import PRECISION_RECORDS, ZERO3, stage_of
from gpumem_tui.formula.weights import kept_bytes, trained_parameters
from gpumem_tui.memory import Unknown

GPUS_OF_A_NODE = 8
_PAIR = 2
_BACKWARD_SHARE = 2 / 3
"""The share of a pass: backward has two products for one of forward."""
_GIGA = 1e9
BRIDGED = ("rtx-2080-ti", "titan-rtx", "rtx-3090", "rtx-a5000", "rtx-a6000", "a40", "a30", "h100-nvl")
"""Cards whose NVLink is a bridge between two; the others' reaches every GPU of a node."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between GPUs.

    Attributes:
        name: for the reader.
        gigabytes_per_s: of one ring, in one direction.
        most: GPUs that it reaches.
    """

    name: str
    gigabytes_per_s: float
    most: int


def links(gpu: Gpu) -> tuple[Link, ...] | Unknown:
    """Return the links that a GPU can have, within a node and between nodes of eight, the slowest first.

    A node has one 100 Gb/s Ethernet port, or a 400 Gb/s InfiniBand port for each GPU.
    """
    speed = gpu.speed
    if speed is None:
        return Unknown(f"the links of {gpu.title} are not in the catalog")
    inside = [Link("PCIe", speed.pcie, GPUS_OF_A_NODE)]
    if speed.nvlink is not None:
        most = _PAIR if gpu.name.startswith(BRIDGED) else GPUS_OF_A_NODE
        inside.append(Link("Infinity Fabric" if gpu.arch else "NVLink", speed.nvlink, most))
    return (*inside, *_between_nodes(speed, inside[-1]))


def _between_nodes(speed: GpuSpeed, inside: Link) -> tuple[Link, ...]:
    within = inside.gigabytes_per_s if inside.most == GPUS_OF_A_NODE else speed.pcie
    many = 1 << 20
    return (
        Link("nodes, 100 Gb/s Ethernet", min(within, 12.5), many),
        Link("nodes, 400 Gb/s InfiniBand a GPU", min(within, 50.0 * GPUS_OF_A_NODE), many),
    )


def sent_bytes(shape: ModelShape, recipe: Recipe, gpus: int) -> float:
    """Return what each of so many GPUs that hold the same part of the network sends for one optimizer step of one pass.

    Gradients exist of what is trained; what ZeRO-3 gathers is the network as it is kept, adapters and all.
    """
    stored, cut = PRECISION_RECORDS[recipe.precision], recipe.tensor_parallel * recipe.pipeline_parallel
    gradients = trained_parameters(shape, recipe) * stored.gradient_bytes / cut
    if stage_of(recipe) != ZERO3:
        return 2 * (gpus - 1) / gpus * gradients
    gathered = kept_bytes(shape, recipe) * min(1.0, stored.compute_bytes / stored.parameter_bytes) / cut
    return (gpus - 1) / gpus * (gradients + 2 * gathered)


def tensor_parallel_seconds(shape: ModelShape, recipe: Recipe, batch_size: int, link: Link) -> float:
    """Return what the GPUs that hold one block together send each other in a pass of so many samples.

    Two sums of the residual stream a block in forward and two in backward (Shoeybi et al. 2019, figure 4), and two more
    where it is recomputed, in a ring; sequence parallel sends as much in other pieces (Korthikanti et al. 2022).
    """
    ways, layers = recipe.tensor_parallel, shape.layers / recipe.pipeline_parallel
    sums = 6 if recipe.recompute == "full" else 4
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    stream_bytes = batch_size * shape.tokens / recipe.context_parallel * shape.hidden * width
    return layers * sums * 2 * (ways - 1) / ways * stream_bytes / (link.gigabytes_per_s * _GIGA)


def bubble(recipe: Recipe) -> float:
    """Return the time that a pipeline's GPUs wait, over the time that they work: (p − 1)/m, interleaved over v.

    Narayanan et al. 2021, section 2.2: once for all micro-batches of a pass.
    """
    pieces = recipe.virtual_stages if recipe.schedule == "interleaved" else 1
    return (recipe.pipeline_parallel - 1) / (recipe.pipelined * pieces)


def fastest_link(joined: Sequence[Link], gpus: int) -> Link:
    """Return the fastest link: within a node of its own, beyond it of those between nodes."""
    inside = gpus <= GPUS_OF_A_NODE
    able = [link for link in joined if link.most >= gpus and (link.most <= GPUS_OF_A_NODE) == inside]
    return max(able, key=lambda link: link.gigabytes_per_s)


def efficiency(
    shape: ModelShape, recipe: Recipe, gpus: int, link: Link, step_s: float, passes: int
) -> tuple[float, float]:
    """Return the share of each GPU's speed that is left: with nothing hidden, and with all that backward can hide.

    Args:
        gpus: those that hold the same part of the network.
        step_s: a whole optimizer step on each, its passes included, in seconds.
        passes: of that step. Gradients are summed after the last (torch's ``no_sync``); ZeRO 3 communicates in each.
    """
    if gpus == 1:
        return 1.0, 1.0
    times = passes if stage_of(recipe) == ZERO3 else 1
    communication_s = times * sent_bytes(shape, recipe, gpus) / (link.gigabytes_per_s * _GIGA)
    exposed_s = max(0.0, communication_s - times * _BACKWARD_SHARE * step_s / passes)
    return step_s / (step_s + communication_s), step_s / (step_s + exposed_s)
