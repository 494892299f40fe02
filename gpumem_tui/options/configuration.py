"""From what a user asked for to what is searched, predicted or planned: the command line and the screens share it."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Unknown, format_bytes

if TYPE_CHECKING:
    from gpumem_tui.options.workload import WorkloadOptions
    from gpumem_tui.search.config import SearchConfig


def configure(values: dict[str, Any]) -> tuple[WorkloadOptions, SearchConfig]:
    """Options and search configuration from the command line's values; one that is not given takes its default.

    Asks NVML which GPUs there are: this may take a while, or for ever where the driver hangs.

    Raises:
        OptionError: the values are wrong, or do not go together.
    """
    from gpumem_tui.monitor.devices import list_gpus
    from gpumem_tui.options.workload import (
        ModelChanges,
        WorkloadOptions,
        choose_device,
        share_limit_bytes,
        visible_gpus,
        with_ranks,
    )
    from gpumem_tui.search.config import SearchConfig
    from gpumem_tui.simulator.settings import AllocatorSettings, AllocatorSettingsError

    changes = ModelChanges(**{field.name: values.pop(field.name, None) for field in fields(ModelChanges)})
    named = [field.name for field in fields(WorkloadOptions) if field.name in values]
    options = WorkloadOptions(changes=changes, **{name: values.pop(name) for name in named})
    workload = options.spec()
    python = _interpreter(values.pop("python", None)) or sys.executable
    gpus = list_gpus()
    if not isinstance(gpus, Unknown):
        gpus = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    share = values.pop("share", False)
    device = choose_device(values.pop("gpu", None), gpus, share=share)
    if workload.command is not None:
        device = with_ranks(device, workload.command.processes, gpus, share=share)
    values["limit_bytes"] = values.get("limit_bytes") or share_limit_bytes(device)
    if (values["limit_bytes"] or 0) > device.gpu.total_bytes:
        raise OptionError(f"--limit: the device has only {format_bytes(device.gpu.total_bytes)}")
    try:
        allocator = AllocatorSettings.from_environment()
    except AllocatorSettingsError as error:
        raise OptionError(str(error)) from error
    return options, SearchConfig(workload=workload, device=device, python=python, allocator=allocator, **values)


def _interpreter(path: str | None) -> str | None:
    if path is None:
        return None
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise OptionError(
            f"--python: {path or 'nothing'} is not a program that can be run; give the path of a Python with torch"
        )
    return found
