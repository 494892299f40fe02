"""A command to plan for, and traces of it that are built by hand."""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.techniques import Technique, injected
from gpumem_tui.memory import MIB, Bucket, Unknown
from gpumem_tui.options.workload import simulated_device
from gpumem_tui.plan.combination import Combination
from gpumem_tui.run.events import Ready
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec
from tests.search.traces import CONTEXT_BYTES, NO_SETTING, PROFILE, traced, training

READY = Ready("2.13.0", PROFILE, CONTEXT_BYTES, "measured on an A100")
REFUSED = "the command uses autocast already"


def command_config(*words: str, gpu: str = "a100-80gb", ranks: int = 1) -> SearchConfig:
    """A command planned for a simulated GPU."""
    command = Command(words or ("python", "train.py", "--batch-size", "{batch}"), "/home/ada/training")
    workload = WorkloadSpec(Recipe(gpus=ranks), command=command)
    return SearchConfig(workload, simulated_device(gpu), python="python")


def timeline(batch_size: int, *, activations: int = 1200, optimizer: int = 950) -> Timeline:
    """A network with MiB of activations a sample, and of optimizer state."""
    sizes = {
        Bucket.PARAMETERS: 475 * MIB,
        Bucket.ACTIVATIONS: activations * MIB * batch_size,
        Bucket.TEMPORARY: 392 * MIB * batch_size,
        Bucket.GRADIENTS: 475 * MIB,
        Bucket.OPTIMIZER: optimizer * MIB,
    }
    return training(sizes, layers=12)


def affine(**sizes: int) -> AffineTrace:
    """Equal at every batch size."""
    return AffineTrace.fit((2, timeline(2, **sizes)), (3, timeline(3, **sizes)))


def base_trace(config: SearchConfig) -> Traced:
    """The command as it is; its backend takes no setting of the allocator that would help it."""
    return replace(traced(affine(), config.device.gpu), settings=NO_SETTING)


def base_predicted(config: SearchConfig) -> Predicted:
    """The report of its run."""
    formula = Formula(config.workload, config.device.gpu.total_bytes, config.headroom)
    return Predicted(Prediction(formula, base_trace(config)), READY)


def change(key: str, config: SearchConfig) -> Technique:
    """A change by name."""
    return next(one for one in injected(config.device.gpu, 1) if one.key == key)


def changed(config: SearchConfig, key: str, batch_size: int, **sizes: int) -> Combination:
    """A change whose run, planned for this batch, found these sizes."""
    found = replace(traced(affine(**sizes), config.device.gpu), settings=NO_SETTING)
    return Combination((change(key, config),), batch_size, traced=found)


def ran(
    changes: tuple[Technique, ...], batch_size: int, passes: int, found: Traced | Unknown, beside_bytes: int = 0
) -> Combination:
    """Changes that were run together."""
    one = Combination.of_command(changes, batch_size, passes)
    return replace(one, traced=found, beside_bytes=beside_bytes)
