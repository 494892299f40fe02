"""The changes that a plan makes to a user's command: their names, what to write to have them, and their costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.changes import BF16_SINCE, sharded
from gpumem_tui.formula.extras import LOSS_CHUNKS
from gpumem_tui.formula.optimizers import OPTIMIZER_TECHNIQUES
from gpumem_tui.formula.price import ONE_MORE_FORWARD, Price
from gpumem_tui.formula.recipe import Sharding

MORE_RANKS = "more-ranks"
"""The change that is made to the launcher's line, not to the program."""


@dataclass(frozen=True)
class CommandChange:
    """A technique, as a change to a command.

    Attributes:
        key: names it; of one that is made by a run, in `command.changes` too.
        how: what to write to have it.
        cost: in compute or accuracy, in words; `source`: where that is from.
        price: the cost as a comparison sees it.
    """

    key: str
    name: str
    how: str
    cost: str
    source: str
    price: Price


_OPTIMIZERS = {key: technique for key, technique in OPTIMIZER_TECHNIQUES.items() if technique.code}
_BY_PARAMETER_PERCENT = 1.0
"""Assumed for the comparison only: launches of kernels, which a large model's arithmetic hides."""

_STEPS = (
    CommandChange(
        "set-to-none",
        "gradients set to None",
        "zero_grad(set_to_none=True)",
        "none: a gradient of None is skipped, one of zero is not (weight decay, momentum)",
        "torch.optim.Optimizer.zero_grad",
        Price(changes=1),
    ),
    CommandChange(
        "fused",
        "fused optimizer step",
        "the optimizer with fused=True",
        "none: one kernel updates all",
        "torch.optim, foreach and fused implementations",
        Price(changes=1),
    ),
    CommandChange(
        "no-foreach",
        "optimizer step by parameter",
        "the optimizer with foreach=False",
        "a kernel for each parameter: a slower step",
        "torch.optim, foreach and fused implementations",
        Price(slower_percent=_BY_PARAMETER_PERCENT, changes=1),
    ),
)
"""Of how the optimizer steps."""


def injected(gpu: Gpu, ranks: int) -> tuple[CommandChange, ...]:
    """Every change, in the order in which they are run: those that mostly save most come first.

    Args:
        gpu: decides the 16-bit format.
        ranks: of the command as it is.
    """
    kind, bits = ("bfloat16", "7") if gpu.compute_capability >= BF16_SINCE else ("float16", "10")
    scaling = "" if kind == "bfloat16" else " and loss scaling"
    return (
        CommandChange(
            "checkpointing",
            "checkpointed blocks",
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), or the library's own switch",
            "30 to 40 % more time: a second forward pass",
            "Korthikanti et al. 2022",
            Price(slower_percent=ONE_MORE_FORWARD, changes=1),
        ),
        CommandChange(
            "autocast",
            f"autocast {kind}",
            f'with torch.autocast("cuda", dtype=torch.{kind}): around forward and loss',
            f"a 16-bit copy of the weights; {bits} mantissa bits instead of 23{scaling} in matrix products",
            "Micikevicius et al. 2018",
            Price(changes=1),
        ),
        *_optimizers(),
        CommandChange(
            "chunked-loss",
            f"loss in {LOSS_CHUNKS} pieces",
            f"cross-entropy over {LOSS_CHUNKS} pieces of the rows, each computed again in backward; or a fused loss",
            "the loss is computed twice; the result is exact",
            "Hsu et al. 2024 (Liger Kernel)",
            Price(changes=1),
        ),
        *_STEPS,
        *_more_ranks(ranks),
    )


OFFLOADED = CommandChange(
    "offload-optimizer",
    "optimizer in host memory",
    "torchao's CPUOffloadOptimizer",
    "gradients and weights cross the bus at every update, and the CPU runs it; as much host memory",
    "Ren et al. 2021 (ZeRO-Offload)",
    Price(offloads=1, changes=1),
)
"""Worked out from the command's own trace."""


def sharded_over(gpus: int, stage: Sharding) -> CommandChange:
    """One rank's work over several GPUs; worked out from the command's own trace."""
    change = sharded(stage, gpus, gpus - 1)
    how = "torch's ZeroRedundancyOptimizer" if stage == "zero1" else "FSDP2's fully_shard"
    return CommandChange(change.key, change.name, how, change.cost, change.source, change.price)


def _more_ranks(ranks: int) -> Iterator[CommandChange]:
    """Twice as many, where there are several."""
    if ranks > 1:
        yield CommandChange(
            MORE_RANKS,
            f"{2 * ranks} ranks instead of {ranks}",
            f"--gpus {2 * ranks}, and the launcher's line",
            f"{2 * ranks} GPUs; more communication",
            "Rajbhandari et al. 2020",
            Price(gpus=ranks, changes=1),
        )


def _optimizers() -> Iterator[CommandChange]:
    for key, technique in _OPTIMIZERS.items():
        yield CommandChange(key, technique.name, technique.code, technique.cost, technique.source, technique.price)


NAMES = ("checkpointing", "autocast", *_OPTIMIZERS, "chunked-loss", "set-to-none", "fused", "no-foreach", MORE_RANKS)
"""Every change as `--what-if` takes it."""
