"""The settings of `PYTORCH_CUDA_ALLOC_CONF`, parsed as PyTorch parses them. Standard library only."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from gpumem_tui.errors import OptionError
from gpumem_tui.memory import MIB
from gpumem_tui.text import minor_of

_INTERVALS = 16
"""`kRoundUpPowerOfTwoIntervals` in c10/core/AllocatorConfig.cpp: one per power of two from 1 MiB to 64 GiB."""

_MIN_LARGE_SEGMENT_MB = 10
"""`kMinLargeAlloc` in c10/core/AllocatorConfig.h; a large segment must exceed it."""


@dataclass(frozen=True)
class AllocatorSettings:
    """The tuning options that change which bytes are reserved (c10/core/AllocatorConfig.h).

    Attributes:
        expandable_segments: one growing virtual range per stream and pool instead of fixed segments.
        max_split_size_bytes: blocks of at least this size are never split; None for no limit.
        roundup_power2_divisions: steps between powers of two to which a request is rounded, one entry per
            power of two from 1 MiB to 64 GiB; 0 rounds to 512 B only.
        garbage_collection_threshold: share of the allowed memory above which unused segments are reclaimed;
            0 is off. Acts only when a memory fraction is set, as in PyTorch.
        large_segment_bytes: what is taken from the driver for a large request below 10 MiB.
        max_non_split_rounding_bytes: a free block beyond the split limit serves a request that is smaller by less than
            this; None for `large_segment_bytes`.
        text: the variable's value that this was read from.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    large_segment_bytes: int = 20 * MIB
    max_non_split_rounding_bytes: int | None = None
    text: str = field(default="", compare=False)

    def divisions_for(self, size_bytes: int) -> int:
        """Return the round-up divisions that apply to a request of this size."""
        index = (size_bytes.bit_length() - 1) - (MIB.bit_length() - 1)
        return self.roundup_power2_divisions[min(max(index, 0), _INTERVALS - 1)]

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Read what the user set for the real allocator, under either of `NAMES`.

        Raises:
            OptionError: an option whose value PyTorch would refuse.
        """
        return cls.parse(next((os.environ[name] for name in NAMES if name in os.environ), ""))

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the value of `PYTORCH_CUDA_ALLOC_CONF` (or `PYTORCH_ALLOC_CONF`), c10/core/AllocatorConfig.cpp.

        Options that do not change the bytes (backend, pinned memory, …) are accepted and have no effect.

        Raises:
            OptionError: an option whose value PyTorch would refuse.
        """
        options = dict(_key_and_value(option) for option in _split_options(text))
        large = options.get("large_segment_size_mb")
        smallest_mb = 20 if large is None else _megabytes("large_segment_size_mb", large, _MIN_LARGE_SEGMENT_MB + 1)
        found: dict[str, Any] = {"text": text, "large_segment_bytes": smallest_mb * MIB}
        for key, value in options.items():
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise _refused(key, f"must be True or False, not {value!r}")
                found[key] = value == "True"
            elif key in ("max_split_size_mb", "max_non_split_rounding_mb"):
                found[f"{key.removesuffix('_mb')}_bytes"] = _megabytes(key, value, smallest_mb) * MIB
            elif key == "roundup_power2_divisions":
                found[key] = _divisions(key, value)
            elif key == "garbage_collection_threshold":
                found[key] = _threshold(key, value)
        return cls(**found)


NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variable's names; where both are set the older wins, as in PyTorch."""

_NEWER_SINCE = (2, 10)
"""From this version of torch on the newer name sets every option. Versions 2.8 and 2.9 warn of the older one, yet leave
out `expandable_segments` under the newer (pytorch/pytorch#183387, unslothai/unsloth-zoo#933)."""


def variable_for(torch_version: str) -> str:
    """Return the name to set: the older where that is set already, as it wins; else the one that torch reads."""
    older, newer = NAMES
    return older if older in os.environ or minor_of(torch_version) < _NEWER_SINCE else newer


def with_option(text: str, option: str) -> str:
    """Return a value of the variable with one option set, and the others as they are.

    >>> with_option("max_split_size_mb:64,expandable_segments:False", "expandable_segments:True")
    'max_split_size_mb:64,expandable_segments:True'
    """
    key, _ = _key_and_value(option)
    return ",".join([*(one for one in _split_options(text) if _key_and_value(one)[0] != key), option])


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """Return what to give `torch.cuda.set_per_process_memory_fraction`, so that `limit_bytes` may be reserved.

    It multiplies by the device's total and cuts off: without the half byte, one byte and so a segment would be missing.
    """
    return min(1.0, (limit_bytes + 0.5) / total_bytes)


def _split_options(text: str) -> list[str]:
    """Split at the commas that are outside of square brackets."""
    options, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            options.append(text[start:index])
            start = index + 1
    options.append(text[start:])
    return [option for option in (part.strip() for part in options) if option]


def _refused(key: str, problem: str) -> OptionError:
    return OptionError(f"PYTORCH_CUDA_ALLOC_CONF: {key} {problem}; correct or remove it")


def _key_and_value(option: str) -> tuple[str, str]:
    key, separator, value = option.partition(":")
    if not separator:
        raise _refused(repr(option), "is not written as option:value")
    return key.strip(), value.strip()


def _integer(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise _refused(key, f"must be a whole number, not {value!r}") from None


def _megabytes(key: str, value: str, smallest_mb: int) -> int:
    megabytes = _integer(key, value)
    if megabytes < smallest_mb:
        raise _refused(key, f"must be at least {smallest_mb}, not {megabytes}")
    return megabytes


def _threshold(key: str, value: str) -> float:
    try:
        threshold = float(value)
    except ValueError:
        threshold = math.nan
    if not 0.0 < threshold < 1.0:
        raise _refused(key, f"must lie between 0 and 1, not {value!r}")
    return threshold


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Read `4` for every size, or `[256:1,512:2,>:8]` with sizes in MiB.

    In the list the first size also represents all smaller ones, ``>`` for all that are larger than the last one named,
    and 0 turns rounding off.
    """
    if not value.startswith("["):
        return (_power_of_two(key, value),) * _INTERVALS
    if not value.endswith("]"):
        raise _refused(key, f"lacks the closing bracket in {value!r}")
    divisions = [0] * _INTERVALS
    named: int | None = None
    for entry in filter(None, (part.strip() for part in value[1:-1].split(","))):
        size, _, count = (part.strip() for part in entry.partition(":"))
        amount = 0 if count == "0" else _power_of_two(key, count)
        if size == ">":
            after = (named or 0) + 1
            divisions[after:] = [amount] * (_INTERVALS - after)
            continue
        index = min(_power_of_two(key, size).bit_length() - 1, _INTERVALS - 1)
        if named is None:
            divisions[:index] = [amount] * index
        divisions[index] = amount
        named = index
    return tuple(divisions)


def _power_of_two(key: str, value: str) -> int:
    number = _integer(key, value)
    if number < 1 or number & (number - 1):
        raise _refused(key, f"takes powers of two, not {value!r}")
    return number


def next_division(size_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between two powers of two."""
    if size_bytes & (size_bytes - 1) == 0:
        return size_bytes
    floor = 1 << (size_bytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-size_bytes // step) * step
