"""GPUs that the catalog lacks: those of the user's settings, and one described by its memory and architecture.

Such a name (`custom-20GiB-sm_89`) describes the GPU completely, so plans, forms and lines keep no more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpumem_tui.catalog.shapes import CatalogError, Gpu
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, format_bytes, size_from, size_text
from gpumem_tui.settings import load

CUSTOM = "custom"
_ASSUMED_ARCHITECTURE = "sm_80"
"""The architecture of a GPU that names none: the A100's."""
_OLDEST, _NEWEST = (6, 0), (12, 1)
_LEAST_BYTES, _MOST_BYTES = GIB, 4096 * GIB
_LIKE_IN_SIZE = 2.5
"""The driver's reserve grows with the memory: it is that of GPUs with so many times more or less."""


def custom_name(memory_bytes: int, arch: str | None) -> str:
    """Return the name of a GPU with this memory, as the driver reports it, and architecture."""
    return "-".join(filter(None, (CUSTOM, size_text(memory_bytes), arch)))


def described(name: str, catalog: Mapping[str, Gpu]) -> Gpu | None:
    """Return the GPU that a name such as ``custom-20GiB-sm_89`` describes; None for another name.

    Raises:
        CatalogError: it describes none.
    """
    kind, _, rest = name.partition("-")
    if kind.lower() != CUSTOM:
        return None
    size, _, arch = rest.partition("-")
    if not size:
        raise CatalogError(f"{name!r} is any GPU: give its memory and architecture, as in --memory 24GiB --arch sm_89")
    return _made(name, None, size, arch, None, catalog)


def is_custom(gpu: Gpu) -> bool:
    """Return whether its name describes it."""
    return gpu.name.startswith(f"{CUSTOM}-")


def of_settings(catalog: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Return the GPUs of ``[gpus]`` in the user's settings by name.

    Raises:
        OptionError: the file is wrong, or one of them is no GPU.
    """
    found = {}
    for name, table in load().gpus.items():
        where = f"[gpus.{name}] in the settings"
        if not re.fullmatch(r"[a-z][a-z0-9]*(?:[-.][a-z0-9]+)*", name) or name.startswith(CUSTOM):
            raise OptionError(f"{where}: write its name in small letters and figures, with - between: my-card")
        if name in catalog:
            raise OptionError(f"{where}: the catalog has a GPU of this name; choose another")
        try:
            found[name] = _made(name, name, table.memory, table.arch, table.multiprocessors, catalog)
        except CatalogError as error:
            raise OptionError(f"{where}: {error}") from error
    return found


def _made(
    name: str, title: str | None, memory: str, arch: str, multiprocessors: int | None, catalog: Mapping[str, Gpu]
) -> Gpu:
    """Return a GPU; without a title it gets one, and the name in its usual form."""
    try:
        total_bytes = size_from(memory)
    except ValueError as error:
        raise CatalogError(f"memory {error}") from error
    if not _LEAST_BYTES <= total_bytes <= _MOST_BYTES:
        most = size_text(_MOST_BYTES)
        raise CatalogError(f"give memory from {size_text(_LEAST_BYTES)} to {most}, not {format_bytes(total_bytes)}")
    capability, rocm = _architecture(arch or _ASSUMED_ARCHITECTURE, catalog)
    usual = rocm or "sm_{}{}".format(*capability)
    assumed = "" if arch else ", assumed"
    least, expected, most_bytes = (0, 0, 0) if rocm else _reserve(total_bytes, catalog)
    return Gpu(
        name=custom_name(total_bytes, usual if arch else None) if title is None else name,
        title=title or f"custom GPU ({usual}{assumed})",
        kind="workstation",
        total_bytes=total_bytes,
        cuda_total_bytes=total_bytes - expected,
        compute_capability=capability,
        source="memory and architecture as given; the driver's reserve as of GPUs of about its size",
        multiprocessors=multiprocessors or _agreed(total_bytes, capability, rocm, catalog),
        reserves=() if rocm else ((0, least), (0, most_bytes)),
        no_speed="its rates were not given",
        arch=rocm,
    )


def _architecture(text: str, catalog: Mapping[str, Gpu]) -> tuple[tuple[int, int], str]:
    """Return the compute capability, and what ROCm's compilers call it where it runs no CUDA.

    Raises:
        CatalogError: there is no such architecture, or it is older or newer than those known.
    """
    word = text.strip().lower()
    if word.startswith("gfx"):
        known = {gpu.arch: gpu.compute_capability for gpu in catalog.values() if gpu.arch}
        if word not in known:
            raise CatalogError(f"architecture {text!r} is unknown; write one of AMD's: {', '.join(known)}")
        return known[word], word
    match = re.fullmatch(r"(?:sm_?|compute_)?(\d{1,2})\.?(\d)[af]?", word)
    capability = (int(match[1]), int(match[2])) if match else (0, 0)
    if not _OLDEST <= capability <= _NEWEST:
        least, most = ("sm_{}{}".format(*one) for one in (_OLDEST, _NEWEST))
        raise CatalogError(f"architecture {text!r} is unknown; write {least} to {most}, or one of AMD's such as gfx942")
    return capability, ""


def _reserve(total_bytes: int, catalog: Mapping[str, Gpu]) -> tuple[int, int, int]:
    """Return the least, the middle and the most that the driver keeps of GPUs of about this size."""
    own = [gpu for gpu in catalog.values() if not gpu.arch and not gpu.unified]
    near = [gpu for gpu in own if 1 / _LIKE_IN_SIZE <= gpu.total_bytes / total_bytes <= _LIKE_IN_SIZE]
    nearest = near or [min(own, key=lambda gpu: abs(gpu.total_bytes - total_bytes))]
    sizes = sorted(gpu.reserve_bytes for gpu in nearest)
    return sizes[0], sizes[len(sizes) // 2], sizes[-1]


def _agreed(total_bytes: int, capability: tuple[int, int], rocm: str, catalog: Mapping[str, Gpu]) -> int | None:
    """Return the multiprocessors that all GPUs of this size and architecture have; None where they differ."""
    alike = {
        gpu.multiprocessors
        for gpu in catalog.values()
        if (gpu.compute_capability, gpu.arch) == (capability, rocm)
        and abs(gpu.total_bytes - total_bytes) * 20 < total_bytes
    }
    return alike.pop() if len(alike) == 1 else None
