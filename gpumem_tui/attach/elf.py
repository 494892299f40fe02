"""Where a running process has a function: the files it has mapped, and the symbols that they export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+ +(\S.*)")
_PAGE = 4096
_CODE_BYTES = 16


@dataclass(frozen=True)
class Mapping:
    """One part of a process's address space; `path` is a file as the process names it, or ``[vdso]`` and the like."""

    start: int
    end: int
    offset: int
    path: str
    is_code: bool = False


@dataclass(frozen=True)
class Symbol:
    """A function of the running process, or a variable of it.

    Attributes:
        address: in the process.
        code: its first bytes in the file; the process must have the same ones there, or the file is another by now.
    """

    address: int
    code: bytes


def mappings(proc: Path) -> tuple[Mapping, ...]:
    """The named parts of the address space of the process at `proc` (``/proc/PID``), lowest first.

    Raises:
        OSError: it is gone, or is not ours to read.
    """
    found = (_LINE.match(line) for line in (proc / "maps").read_text(errors="surrogateescape").splitlines())
    return tuple(
        Mapping(int(match[1], 16), int(match[2], 16), int(match[4], 16), match[5], "x" in match[3])
        for match in found
        if match
    )


def symbols(proc: Path, first: Mapping, names: tuple[str, ...]) -> dict[str, Symbol]:
    """Those of `names` that the file behind `first`, its lowest mapping, exports. Empty for a file that is no ELF.

    Raises:
        OSError: the file cannot be read.
    """
    with (proc / "root" / first.path.lstrip("/")).open("rb") as file:
        try:
            elf = ELFFile(file)
            bias = _bias(elf, first)
            return {name: symbol for name in names for symbol in _lookup(elf, name, bias)}
        except ELFError:
            return {}


def _bias(elf: Any, first: Mapping) -> int:
    """What the loader added to every address of the file."""
    for segment in elf.iter_segments("PT_LOAD"):
        if segment["p_offset"] // _PAGE * _PAGE == first.offset:
            return first.start - int(segment["p_vaddr"]) // _PAGE * _PAGE
    raise ELFError("no segment begins where the mapping does")


def _lookup(elf: Any, name: str, bias: int) -> Iterator[Symbol]:
    """The symbol, where it is defined. Through the hash table, as the loader does: a Python exports thousands."""
    for table in (".gnu.hash", ".hash"):
        section = elf.get_section_by_name(table)
        found = section.get_symbol(name) if section is not None else None
        if found is not None and found["st_shndx"] != "SHN_UNDEF":
            value = found["st_value"]
            offset = next(elf.address_offsets(value), None)
            if offset is not None:
                elf.stream.seek(offset)
                yield Symbol(bias + value, elf.stream.read(_CODE_BYTES))
            return
