"""`predict` and `simulated`: what a command, a model or a step of this process takes, as `predict --json` prints it."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, cast

from msgspec import UNSET
from msgspec.structs import replace

from gpumem_tui.errors import OptionError, RunError, named
from gpumem_tui.options.configuration import asked_by, check_gpus_are_used, configure, predicted_size
from gpumem_tui.options.table import DEVICE, WORKLOAD, OptionRow
from gpumem_tui.options.workload import simulated_device
from gpumem_tui.report.shown import LedgerRows
from gpumem_tui.run.control import Control
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.headless import predicted
from gpumem_tui.search.prediction import Prediction
from gpumem_tui.search.printed import PredictObject
from gpumem_tui.search.report import verdict_line
from gpumem_tui.search.stages import HeldObject
from gpumem_tui.search.strategy import MAX_BATCH_SIZE
from gpumem_tui.text import shortened
from gpumem_tui.workload.spec import split_file

if TYPE_CHECKING:
    from gpumem_tui.run.events import Ready, TraceDone
    from gpumem_tui.run.in_process import FollowedBlock

Step = Callable[[], object]
Option = str | int | float | bool
_SIMULATED = "sim:"
_LIVE = ("step",)
"""The place of a command's words where the step is one of this process."""
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_TAKEN = {
    row.flag.removeprefix("--").replace("-", "_"): row
    for row in (*WORKLOAD, *DEVICE)
    if row.name not in ("gpu", "workload", "share")
}


def predict(
    step: Step | str | Sequence[str] | None = None,
    gpu: str | None = None,
    *,
    batch_size: int | None = None,
    **options: Option,
) -> PredictObject:
    """Return what a training step takes on a GPU, as `gpumem-tui predict --json` prints it. No GPU is needed.

    Args:
        step: a command, as words or as a line, with ``{batch}`` for the batch size; a workload file,
            ``FILE.py[:NAME]``; ``module:function`` or a function without arguments, which builds a model and trains
            some steps with it in this process, on tensors without values; None for a model of the catalog
            (``model="gpt2"``).
        gpu: as ``--gpu``: ``h100``, ``sim:rtx-4090-24gb``, ``0``; None for the first free one.
        batch_size: of a model, a workload file or a command with ``{batch}``.
        options: those of `gpumem-tui predict`, with underscores: ``precision="amp-bf16"``, ``limit="20GiB"``.

    Raises:
        OptionError: what is asked for is wrong; the line of the command line.
        RunError: it cannot be predicted; the line of the command line.
    """
    gpu = _device(gpu)
    _check_batch_size(batch_size)
    is_file = isinstance(step, str) and " " not in step and split_file(step)[0].suffix == ".py"
    if isinstance(step, str) and not is_file and _FUNCTION.fullmatch(step):
        step = _function(step)
    if callable(step):
        for name in (*(["batch_size"] if batch_size is not None else []), *options):
            raise OptionError(f"{name}: is for a command or a model; leave it out for a function, which takes gpu only")
        return _predict_step(step, gpu)
    values = dict(_read(name, value) for name, value in options.items())
    if is_file:
        values["workload"] = step
    elif step is not None:
        values["command"] = _words(step)
    config = configure(asked_by({**values, "gpu": gpu, "share": True}))
    check_gpus_are_used(config.workload)
    size = predicted_size(config, batch_size, "predict(…, batch_size=8)")
    prediction, _ = predicted(config, size, Control())
    return PredictObject.of(config, prediction, size)


def _device(gpu: object) -> str | None:
    """Return the GPU as it is typed; a number is that of a GPU of this machine.

    Raises:
        OptionError: it is neither a text nor a number.
    """
    if gpu is None or isinstance(gpu, str):
        return gpu
    if isinstance(gpu, int) and not isinstance(gpu, bool):
        return str(gpu)
    raise OptionError(f'gpu: give a name, such as gpu="h100", or the number of a GPU, not {type(gpu).__name__}')


def _check_batch_size(given: object) -> None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MAX_BATCH_SIZE):
        return
    raise OptionError(f"batch_size: give a whole number from 1 to {MAX_BATCH_SIZE:,}, not {shortened(repr(given))}")


def _words(command: object) -> tuple[str, ...]:
    """Return a command's words.

    Raises:
        OptionError: it is no command, an empty one, or a line with a quote that does not end.
    """
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise OptionError(f'predict: {error} in the command; write `predict(["python", "train.py"])`') from error
    if not isinstance(words, (list, tuple)):
        kind = type(words).__name__
        raise OptionError(
            f'predict: takes a command or a function, not {kind}; write `predict(["python", "train.py"])`'
        )
    if not words:
        raise OptionError('predict: the command is empty; write `predict(["python", "train.py"])`')
    return tuple(map(str, words))


def _read(name: str, value: Option) -> tuple[str, object]:
    """Return an option's field, and its value as the command line would read it.

    Raises:
        OptionError: no such option, or no such value of it.
    """
    row = _TAKEN.get(name)
    if row is None:
        near = difflib.get_close_matches(name, _TAKEN, 1)
        meant = f"did you mean {near[0]}?" if near else "--help-all of `gpumem-tui predict` lists them"
        raise OptionError(f"{name}: is no option of predict; {meant}")
    if row.holds == "flag":
        return row.name, bool(value)
    if row.holds == "choice":
        return row.name, _chosen(row, str(value))
    return row.name, row.read(repr(value) if isinstance(value, float) else str(value))


def _chosen(row: OptionRow, word: str) -> str:
    found = dict(row.aliases).get(word, word)
    if found not in row.choices:
        raise OptionError(f"{row.flag}: {word!r} is none of its values; give one of {', '.join(row.choices)}")
    return found


def _function(path: str) -> Step:
    """Return the function behind ``module:function``.

    Raises:
        OptionError: the module or the function is missing.
    """
    module, _, name = path.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise OptionError(f"{path}: {error}; check the name of the module") from error
    if not callable(found):
        raise OptionError(f"{path}: the module has no function {name}; check its name")
    return cast(Step, found)


# A step of this process


def _predict_step(step: Step, gpu: str | None) -> PredictObject:
    name = getattr(step, "__name__", type(step).__name__)
    config = configure(asked_by({"gpu": gpu, "share": True, "command": _LIVE}))
    with _block(config, unlimited=True) as block:
        step()
    found = _printed(config, block.done, name, f"the step `{name}`")
    if not found.traced.peak_allocated_bytes:
        raise RunError(f'{name}: puts nothing on the GPU; make its model and its data there, with `.to("cuda")`')
    return found


def _block(config: SearchConfig, *, unlimited: bool = False) -> AbstractContextManager[FollowedBlock]:
    """Return what runs a block of this process on the simulated GPU.

    Raises:
        RunError: there is no torch.
    """
    try:
        from gpumem_tui.run.in_process import simulated_block
    except ImportError as error:
        raise RunError("a GPU is simulated by torch, which is not installed here: `pip install torch`") from error
    return simulated_block(config.device.gpu, unlimited=unlimited)


def _printed(config: SearchConfig, done: tuple[Ready, TraceDone] | None, name: str, what: str) -> PredictObject:
    assert done is not None, "a block that ends without an error has figures"
    traced = config.traced(*done)
    found = PredictObject.of(config, Prediction(config.formula, traced), 1)
    workload = replace(found.workload, model=name, command=UNSET, batch_size=UNSET)
    return replace(found, workload=workload, answer=verdict_line(config, traced, 1, what))


class StepMemory:
    """The memory that the code of a `with` block took on a simulated GPU; known once the block has ended.

    Reading it before, or after the block has ended with an error, is a RunError.

    Attributes:
        peak: the most bytes of the whole device, as expected: what the allocator reserves, and the CUDA context.
        peak_allocated_bytes, peak_reserved_bytes: as `torch.cuda` counts them. device_used_bytes: as `peak`.
        buckets: bytes at the peak of the allocated memory, by key. ledger: all rows of the device then.
        composition: what is held at that peak, the largest first, each with its line.
        prediction: everything, as `gpumem-tui predict --json` prints it.
    """

    peak: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    buckets: dict[str, int]
    ledger: LedgerRows
    composition: tuple[HeldObject, ...]
    prediction: PredictObject

    def __init__(self) -> None:
        self._why, self._next = "it has not ended", "read `{name}` after the `with` block"

    def __getattr__(self, name: str) -> object:
        """Say why a figure is not there."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise RunError(f"what the block took is not known, as {self._why}; {self._next.format(name=name)}")

    def failed(self, error: BaseException) -> None:
        """Note that an error has ended the block."""
        name = named(error)
        lacks = "`gpumem_tui.predict(step)` gives what a step lacks"
        self._why, self._next = f"it ended with {name}", lacks if name == "OutOfMemoryError" else "mend that first"

    def end(self, found: PredictObject) -> None:
        """Take in what it took."""
        traced = found.traced
        self.prediction, self.buckets = found, traced.buckets or {}
        self.peak_allocated_bytes = traced.peak_allocated_bytes or 0
        self.peak_reserved_bytes = traced.peak_reserved_bytes or 0
        self.peak = self.device_used_bytes = traced.device_used_bytes or 0
        self.ledger = LedgerRows(found.answer, traced.ledger or {})
        self.composition = traced.composition or ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepMemory) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__.get('prediction', self._why)!r})"

    def _repr_html_(self) -> str:
        return self.prediction._repr_html_()


@contextmanager
def simulated(gpu: str) -> Iterator[StepMemory]:
    """Have the code of a `with` block run on a simulated GPU, which it finds as CUDA's, without a GPU.

    ``with gpumem_tui.simulated("rtx-4090") as gpu: train()``, then ``gpu.peak``, ``gpu.ledger``. Tensors on the device
    have shapes and no values. Models and optimizers that the block moves there are as before once it has ended. A step
    that does not fit raises `torch.OutOfMemoryError` there. All threads see that GPU meanwhile; blocks do not nest.

    Raises:
        OptionError: there is no such GPU.
        RunError: torch is missing or too old, the process uses a real GPU already, or simulates one.
    """
    name = _device(gpu)
    if name is None:
        raise OptionError('gpu: name the GPU to simulate, such as gpumem_tui.simulated("rtx-4090")')
    options = asked_by({"gpu": name, "command": _LIVE})
    device = options.with_context(simulated_device(name.removeprefix(_SIMULATED)))
    config, memory = SearchConfig(options.trained.spec(), device), StepMemory()
    try:
        with _block(config) as block:
            yield memory
    except BaseException as error:
        memory.failed(error)
        raise
    memory.end(_printed(config, block.done, "block", "the block"))
