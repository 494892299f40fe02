"""The definition of a training step: its phases, a program's tensors, and the place of each allocation in the program.

Imports nothing of ours and nothing beyond the standard library, and is Python 3.9: a user's training process speaks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CPU = -1
"""The device number of host memory; CUDA devices have the number by which their process knows them."""


FROZEN_32 = "frozen float32"
"""The part of the parameters that nothing trains and that could be in 16 bits."""


GATHERED = "gathered parameters"
REDUCE_BUCKETS = "reduce buckets"
CASTS = "autocast's copies"
UPCASTS = "in fp32 by norms and embeddings"
"""Parts of what a step makes: weights that a sharding engine has whole for a while, gradients on their way, copies in
the type that autocast runs an operator in, and what is in fp32 as norms and embeddings of a 16-bit model are."""


class Phase(str, Enum):
    """Phase of a training run. `BATCH` is everything from the start of a step to the model's first forward.

    `EVALUATION` is what a trained model does without being trained: it is evaluated, sampled from, or a reference.
    `FORWARD_ONLY` is the forward of a program that trains nothing.
    """

    BUILD = "build"
    BATCH = "batch"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    FORWARD_ONLY = "forward only"


class RunStage(str, Enum):
    """Part of a whole run: several steps, or work between them.

    `WARM_UP` is the first step, which makes the optimizer's state. In a run that trains on what it generates, `ROLLOUT`
    is the generating, and `REFERENCE` are all other calls without gradients: a reference model's, a reward model's,
    those for the log-probabilities before an update. `WEIGHT_SYNC` copies trained weights to another model.
    """

    LOAD = "load"
    RESUME = "resume"
    WARM_UP = "warm-up"
    TRAIN = "train"
    EVALUATE = "evaluate"
    SAVE = "save"
    GENERATE = "generate"
    INFER = "inference"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    WEIGHT_SYNC = "weight sync"


def stage_of(step: int, phase: Phase) -> RunStage:
    """Return the stage of a run that a phase of a step is in, as far as these show; steps count from 1."""
    by_phase = {Phase.BUILD: RunStage.LOAD, Phase.EVALUATION: RunStage.EVALUATE, Phase.FORWARD_ONLY: RunStage.INFER}
    return by_phase.get(phase, RunStage.TRAIN if step > 1 else RunStage.WARM_UP)


@dataclass(frozen=True)
class Site:
    """The place that an allocation comes from; empty where unknown.

    Attributes:
        operator: e.g. ``aten.addmm``.
        module: qualified name of the module that ran, e.g. ``blocks.3.mlp.0``; in backward, of the forward it undoes.
        source: ``file:line`` that called.
        function: the name of the function that this line is in.
        part: which part of its bucket it is, where there are several, as "fp32 master weights" or "frozen float32".
        fused: further lines, ``file:line``, whose operators a compiler has put into the kernel that writes it.
    """

    operator: str = ""
    module: str = ""
    source: str = ""
    function: str = ""
    part: str = ""
    fused: tuple[str, ...] = ()
