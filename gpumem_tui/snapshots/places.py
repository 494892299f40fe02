"""An allocation's stack: the program's own line in it, and the part of training it was made in."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.memory import Bucket
from gpumem_tui.snapshots.model import NO_STACK, Frame, MemorySnapshot
from gpumem_tui.snapshots.states import BEFORE, HeldBlock

NOWHERE = "no stack"
_BEFORE_RECORDING = "before the recording"
_PARAMETERS, _FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = "model", "forward", "backward", "optimizer", "elsewhere"
_TITLES = {bucket.value: bucket.title for bucket in Bucket}
_MAKES_MODEL = {"_apply", "convert", "reset_parameters"}


class Places:
    """Answers for one snapshot, each stack looked at once."""

    def __init__(self, snapshot: MemorySnapshot) -> None:
        self._stacks = snapshot.stacks
        self._lines: dict[int, str] = {}
        self._categories: dict[int, str] = {}
        self.are_categories_named = any(
            any(history.categories) for history in snapshot.histories
        ) or any(block.category for segment in snapshot.segments for block in segment.blocks)  # fmt: skip

    def line(self, stack: int) -> str:
        """The innermost line that is not torch's or Python's own: ``folder/file.py:12 function``."""
        if stack not in self._lines:
            self._lines[stack] = _line(self._stacks[stack])
        return self._lines[stack]

    def operator(self, stack: int) -> str:
        """What the innermost frame calls itself; "" without a stack."""
        frames = self._stacks[stack]
        return frames[0].function if frames else ""

    def category(self, held: HeldBlock) -> str:
        """As the file names it, else as its stack suggests."""
        if held.category:
            return _TITLES.get(held.category, held.category)
        if held.stack == NO_STACK:
            return _BEFORE_RECORDING if held.event == BEFORE else NOWHERE
        if held.stack not in self._categories:
            self._categories[held.stack] = _part_of_training(self._stacks[held.stack])
        return self._categories[held.stack]


def frame_text(frame: Frame) -> str:
    """A frame in a line."""
    if not frame.file:
        return frame.function or "?"
    return f"{frame.file}:{frame.line} {frame.function}".rstrip()


def _line(frames: Sequence[Frame]) -> str:
    own = next((frame for frame in frames if _is_program(frame.file)), None)
    if own is not None:
        return f"{'/'.join(own.file.split('/')[-2:])}:{own.line} {own.function}".rstrip()
    python = next((frame for frame in frames if frame.file.endswith(".py")), None)
    if python is not None:
        return f"{'/'.join(python.file.split('/')[-2:])}:{python.line} {python.function}".rstrip()
    return frames[0].function or NOWHERE if frames else NOWHERE


def _is_program(file: str) -> bool:
    """Neither torch's nor Python's own, and Python at all; notebooks' cells have names of their own."""
    if not file.endswith(".py") and "ipython-input" not in file and "ipykernel" not in file:
        return False
    if "/torch/" in file or file.startswith("torch/"):
        return False
    return "/lib/python3" not in file or "-packages/" in file


def _part_of_training(frames: Sequence[Frame]) -> str:
    """In which part of a training step a stack was taken, by torch's own frames in it."""
    part = _OTHER
    for file, _, function in frames:
        if "torch/optim/" in file:
            return _OPTIMIZER
        if file.endswith("torch/autograd/graph.py") or "torch::autograd::Engine" in function:
            return _BACKWARD
        if file.endswith("torch/nn/modules/module.py") and "call_impl" in function:
            part = _FORWARD
        elif part == _OTHER and "torch/nn/" in file and (function in _MAKES_MODEL or function == "__init__"):
            part = _PARAMETERS
    return part
