"""Measurements of a machine's own GPUs: a file of figures by GPU, driver and torch, written once, read by searches.

The user's file is ``calibration.toml`` next to the settings; `gpumem-tui doctor --calibrate` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import msgspec

from gpumem_tui.catalog.loader import is_same_product, parse_toml
from gpumem_tui.catalog.shapes import CatalogError, Context, Gpu
from gpumem_tui.decoding import decodable
from gpumem_tui.memory import MIB, format_bytes
from gpumem_tui.settings import default_path
from gpumem_tui.system import replacing

_FILE = "calibration.toml"
_SUGGESTION = "`gpumem-tui doctor --calibrate` writes one"
_ALIKE_BYTES = 16 * MIB
"""Processes of one GPU, driver and torch differ by as much: which kernels they have loaded so far."""


@dataclass(frozen=True)
class Calibration:
    """A measurement of the context of one kind of GPU, under one driver and one torch.

    Attributes:
        gpu: as the driver calls it.
        total_bytes: of its memory, as the driver has it.
        measured: the day, as YYYY-MM-DD.
        stages: bytes on the device outside the allocator, by what the process had used by then, in order: ``context``,
            ``cuBLAS``, ``cuDNN``, ``NCCL``.
        eager_bytes: with every kernel loaded at the start (``CUDA_MODULE_LOADING=EAGER``); None for not measured.
        is_learned: seen of processes that trained, the ``least`` and the most; not measured for the purpose.
    """

    gpu: str
    total_bytes: int
    driver: str
    torch: str
    measured: str
    stages: dict[str, int] = field(default_factory=dict)
    eager_bytes: int | None = None
    is_learned: bool = False

    @property
    def context(self) -> Context:
        """The context that a training process is expected to have: with cuBLAS and cuDNN, where both were loaded."""
        alone = [size_bytes for name, size_bytes in self.stages.items() if name != "NCCL"]
        eager = os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
        most = max([*alone, *([self.eager_bytes] if eager and self.eager_bytes else [])])
        how = "seen of training processes" if self.is_learned else "measured"
        words = f"{how} on this {self.gpu} on {self.measured}, driver {self.driver}, torch {self.torch}"
        return Context(min(alone), most, most, f"{words} (calibration)")

    @property
    def size_words(self) -> str:
        """The least and the most that was measured, in words."""
        low, high = format_bytes(self.context.low_bytes), format_bytes(self.context.high_bytes)
        return low if low == high else f"{low} to {high}"

    @property
    def key(self) -> tuple[str, int, str, str]:
        """The GPU, driver and torch by which a file holds one calibration each."""
        return self.gpu, self.total_bytes, self.driver, self.torch

    @property
    def words(self) -> str:
        """The calibration as a word of a command, which `seen` reads."""
        return ",".join(map(str, (*self.key, *self.stages.values())))


def seen(words: str) -> Calibration:
    """Read what was learned of training processes: GPU, bytes in all, driver, torch, the least bytes and the most.

    Raises:
        CatalogError: it is something else.
    """
    with suppress(ValueError):
        gpu, total_bytes, driver, torch, least, most = words.split(",")
        sizes = {"least": int(least), "training": int(most)}
        if 0 < sizes["least"] <= sizes["training"] <= int(total_bytes) and not set(words) & set('"\\\n'):
            today = date.today().isoformat()
            return Calibration(
                gpu=gpu,
                total_bytes=int(total_bytes),
                driver=driver,
                torch=torch,
                measured=today,
                stages=sizes,
                is_learned=True,
            )
    raise CatalogError(f"{words!r}: write GPU, its bytes, driver, torch, least and most bytes, with commas between")


def is_known(new: Calibration, kept: Iterable[Calibration]) -> bool:
    """Return whether the stored calibration has the same value: measured for the purpose, or learned, within 16 MiB."""
    for one in kept:
        if one.key == new.key:
            low_bytes, high_bytes = one.context.low_bytes - _ALIKE_BYTES, one.context.high_bytes + _ALIKE_BYTES
            return not one.is_learned or low_bytes <= new.context.low_bytes <= new.context.high_bytes <= high_bytes
    return False


def load(path: Path | None = None) -> tuple[Calibration, ...]:
    """Read the calibrations of a file; of the user's, which need not exist, if `path` is None.

    Raises:
        CatalogError: there is no such file, or it is none; one line shows which and why.
    """
    wanted = path or default_path(_FILE)
    try:
        found = msgspec.convert(
            parse_toml(wanted.read_text("utf-8"), str(wanted)), decodable(dict[str, list[Calibration]])
        )
    except FileNotFoundError as error:
        if path is None:
            return ()
        raise CatalogError(f"{wanted}: there is no such file; {_SUGGESTION}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(
            f"{wanted}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}; {_SUGGESTION}"
        ) from error
    except msgspec.ValidationError as error:
        raise CatalogError(f"{wanted}: is no calibration: {error}; {_SUGGESTION}") from error
    calibrations = tuple(found.get("calibration", ()))
    if any(not one.stages for one in calibrations):
        raise CatalogError(f"{wanted}: is no calibration: one has no stages; {_SUGGESTION}")
    return calibrations


def save(new: Calibration, path: Path | None = None) -> Path:
    """Write a calibration into a file, in place of the one of the same GPU, driver and torch; return the file.

    Raises:
        CatalogError: the file that is there is no calibration; it stays.
        OSError: it cannot be written.
    """
    wanted = path or default_path(_FILE)
    kept = [one for one in (load(wanted) if wanted.exists() else ()) if one.key != new.key]
    lines = ["# Measured by gpumem-tui with `gpumem-tui doctor --calibrate`, in bytes."]
    for one in (*kept, new):
        lines += ["", "[[calibration]]", *(f'{name} = "{getattr(one, name)}"' for name in ("gpu", "driver", "torch"))]
        lines += [f'measured = "{one.measured}"', f"total_bytes = {one.total_bytes}"]
        lines += [] if one.eager_bytes is None else [f"eager_bytes = {one.eager_bytes}"]
        lines += ["is_learned = true"] if one.is_learned else []
        lines += ["[calibration.stages]", *(f"{name} = {size_bytes}" for name, size_bytes in one.stages.items())]
    wanted.parent.mkdir(parents=True, exist_ok=True)
    with replacing(wanted) as file:
        file.write(("\n".join(lines) + "\n").encode())
    return wanted


def calibrated(gpu: Gpu, calibrations: Sequence[Calibration]) -> Gpu:
    """Return a GPU with the context that was measured on one of its kind, the newest; as it is where none was.

    If several are of one day, it is the last one.
    """
    alike = [one for one in reversed(calibrations) if is_same_product(one.gpu, one.total_bytes, gpu)]
    return replace(gpu, context=max(alike, key=lambda one: one.measured).context) if alike else gpu
