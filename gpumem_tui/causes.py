"""Named causes of memory: how much, where, and the one sentence that shows what to do about it.

Imports nothing of ours but the root, and nothing beyond the standard library: the processes that train find them, the
viewer prints them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpumem_tui.memory import format_bytes

CauseKind = Literal[
    "leak", "evaluation_with_gradients", "whole_checkpoint", "no_gradient", "kept_checkpoint", "reduce_buckets",
    "graph_pools", "cudnn_off", "casts", "upcasts",
]  # fmt: skip

_LEADS: dict[CauseKind, str] = {
    "leak": "memory grows by {} a step: ",
    "evaluation_with_gradients": "evaluation holds {}, most of it for a backward that never comes: ",
    "whole_checkpoint": "backward makes {} of activations again at the same time: ",
    "reduce_buckets": "reduce buckets are a second copy of the gradients, {}: ",
    "graph_pools": "CUDA graphs keep {} free in pools of their own: ",
    "casts": "autocast's copies take {} at the peak: ",
    "upcasts": "activations in fp32 take {} at the peak: ",
    "cudnn_off": "convolutions without cuDNN take {} for im2col's columns: ",
    "no_gradient": "{} of parameters in the optimizer never got a gradient: ",
    "kept_checkpoint": "{} of a checkpoint stay on the GPU: ",
}
"""How the sentence of a cause begins, with its bytes: these differ by batch size, the rest does not."""


@dataclass(frozen=True)
class Cause:
    """A named cause of memory.

    Attributes:
        sentence: what it is, and what to do about it, without the bytes.
        size_bytes: what it takes, of a leak in a step; 0 where that is not known.
        line: ``file:line`` that makes the memory; empty where unknown.
        kept_at: ``file:line`` of the statement that keeps it; empty where nothing does, or it was not found.
    """

    cause: CauseKind
    sentence: str
    size_bytes: int = 0
    line: str = ""
    kept_at: str = ""

    def __str__(self) -> str:
        return _LEADS[self.cause].format(format_bytes(self.size_bytes)) + self.sentence


Note = str | Cause
"""A note on a result, in a line: a cause where it has a name, else words."""

INPUTS_ALIKE, TRIES_LONGER = "inputs: ", "--longest N tries longer ones"
"""How the note on inputs of one length begins, and how it ends where the program names no limit."""


def causes_in(notes: Iterable[Note], *kinds: CauseKind) -> tuple[Cause, ...]:
    """Return the causes among notes, of some kinds if such are given."""
    return tuple(note for note in notes if isinstance(note, Cause) and (not kinds or note.cause in kinds))
