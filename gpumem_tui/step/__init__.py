"""Where in a training step memory is taken: the step's phase, and the place in the program.

Imports nothing of ours and nothing beyond the standard library, and is Python 3.9: a user's training process speaks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CPU = -1
"""The device number of host memory; CUDA devices have the number by which their process knows them."""


class Phase(str, Enum):
    """Where a training run is. `BATCH` is everything from the start of a step to the model's first forward."""

    BUILD = "build"
    BATCH = "batch"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Site:
    """Where an allocation comes from; empty where unknown.

    Attributes:
        operator: e.g. ``aten.addmm``.
        module: qualified name of the module that ran, e.g. ``blocks.3.mlp.0``; in backward, of the forward it undoes.
        source: ``file:line`` that called.
        function: the name of the function that this line is in.
    """

    operator: str = ""
    module: str = ""
    source: str = ""
    function: str = ""
