"""Several ranks on a simulated GPU: this process is rank 0, and the others are never started.

A launcher (`torchrun`, `accelerate launch`) becomes the one program that it would have started many times.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from gpumem_tui.importing import after_import
from gpumem_tui.simulator.torch_internals import original, replace
from gpumem_tui.simulator.world import answer_alone

_MOST_LOCAL = 8
"""GPUs of one machine, where more are asked for than a launcher's line says."""


_LOCAL_GPUS = "GPUMEM_TUI_LOCAL_GPUS"
"""Tells processes that a program starts how many GPUs their machine has, where no launcher's variable does."""


def ranks(gpus: int) -> int:
    """How many ranks there are: as many GPUs as asked for, else as the environment says."""
    return gpus if gpus > 1 else int(os.environ.get("WORLD_SIZE") or 1)


def local_gpus(gpus: int) -> int:
    """How many GPUs this process counts on its machine."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get(_LOCAL_GPUS)
    return int(said or min(ranks(gpus), _MOST_LOCAL))


def follow_launchers(world: int) -> None:
    """Keep launchers from starting ranks beside the first, and end those that are started all the same."""
    if int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) > 0:
        os._exit(0)
    if world > 1:
        _be_rank_0(world, min(world, local_gpus(world)))

    def become(config: Any, entrypoint: Any, arguments: list[Any], **_: Any) -> Any:
        size = world if world > 1 else config.min_nodes * config.nproc_per_node
        _be_rank_0(size, min(size, config.nproc_per_node))
        if isinstance(entrypoint, str):
            sys.stdout.flush()
            sys.stderr.flush()
            os.execvp(entrypoint, [entrypoint, *map(str, arguments)])
        return {0: entrypoint(*arguments)}

    def launcher(module: Any) -> None:
        replace(module, "launch_agent", become)

    def spawner(module: Any) -> None:
        start = original(module, "start_processes")

        def start_one(fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **more: Any) -> Any:
            if nprocs > 1:
                os.environ.setdefault(_LOCAL_GPUS, str(nprocs))
            return start(fn, args, min(nprocs, 1), *others, **more)

        replace(module, "start_processes", start_one)

    after_import("torch.distributed.launcher.api", launcher)
    after_import("torch.multiprocessing.spawn", spawner)
    for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
        after_import(f"{package}.strategies.launchers.subprocess_script", _start_no_child)
    if torch.distributed.is_available():
        answer_alone()


def _start_no_child(module: Any) -> None:
    """Lightning's launcher starts this script again for every further rank."""
    module._SubprocessScriptLauncher._call_children_scripts = lambda launcher: None


def _be_rank_0(world: int, local: int) -> None:
    os.environ.update(
        RANK="0", LOCAL_RANK="0", GROUP_RANK="0", ROLE_RANK="0", WORLD_SIZE=str(world), ROLE_WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(local), GROUP_WORLD_SIZE=str(max(1, world // local)), TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
    )  # fmt: skip
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
