"""Several ranks on a simulated GPU: this process is the one that is followed, and the others are never started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from gpumem_tui.importing import after_import
from gpumem_tui.launchers import ranks_here

_MOST_LOCAL = 8
"""GPUs of one machine, where more are asked for than a launcher's line states."""


_LOCAL_GPUS = "GPUMEM_TUI_LOCAL_GPUS"
"""Tells processes that a program starts how many GPUs their machine has, where no launcher's variable does."""


def ranks(gpus: int) -> int:
    """Return how many ranks there are: as many GPUs as asked for, else as a launcher's variables say."""
    return gpus if gpus > 1 else ranks_here(os.environ).world_size or 1


def local_gpus(gpus: int) -> int:
    """Return how many GPUs this process counts on its machine."""
    counted = ranks_here(os.environ).local_size or int(os.environ.get(_LOCAL_GPUS) or 0)
    return counted or min(ranks(gpus), _MOST_LOCAL)


def follow_launchers(world: int, rank: int) -> None:
    """Keep launchers from starting any rank but the one that is followed, and end those that are started anyway.

    This process is that rank. A launcher (`torchrun`, `accelerate launch`) becomes the one program that it would have
    started many times.
    """
    from gpumem_tui.simulator.cuda.world import answer_alone
    from gpumem_tui.simulator.torch_internals import original
    from gpumem_tui.simulator.torch_internals import replace as replace_in_torch

    place = ranks_here(os.environ)
    here = place.rank if place.rank is not None else place.local_rank
    if here is not None and here != rank:
        os._exit(0)
    if world > 1:
        _be_rank(rank, world, min(world, local_gpus(world)))

    def become(config: Any, entrypoint: Any, arguments: list[Any], **_: Any) -> Any:
        size = world if world > 1 else config.min_nodes * config.nproc_per_node
        _be_rank(rank, size, min(size, config.nproc_per_node))
        if isinstance(entrypoint, str):
            sys.stdout.flush()
            sys.stderr.flush()
            os.execvp(entrypoint, [entrypoint, *map(str, arguments)])  # noqa: S606 - the user's own command
        return {0: entrypoint(*arguments)}

    def launcher(module: Any) -> None:
        replace_in_torch(module, "launch_agent", become)

    def spawner(module: Any) -> None:
        start = original(module, "start_processes")

        def start_one(fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **more: Any) -> Any:
            if nprocs > 1:
                os.environ.setdefault(_LOCAL_GPUS, str(nprocs))
            return start(_AsRank(fn, rank) if rank else fn, args, min(nprocs, 1), *others, **more)

        replace_in_torch(module, "start_processes", start_one)

    def start_no_child(module: Any) -> None:
        """Keep Lightning's launcher from starting this script again for every further rank."""
        module._SubprocessScriptLauncher._call_children_scripts = lambda _launcher: None

    after_import("torch.distributed.launcher.api", launcher)
    after_import("torch.multiprocessing.spawn", spawner)
    for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
        after_import(f"{package}.strategies.launchers.subprocess_script", start_no_child)
    if torch.distributed.is_available():
        answer_alone(rank)


class _AsRank:
    """The function of a spawned process, called as that of another rank."""

    def __init__(self, function: Callable[..., Any], rank: int) -> None:
        self._function, self._rank = function, rank

    def __call__(self, _: int, *args: Any) -> Any:
        return self._function(self._rank, *args)


def _be_rank(rank: int, world: int, local: int) -> None:
    """Be this rank by torchrun's variables, and its machine's first: its GPU is the one that is simulated.

    Raises:
        SystemExit: there is no such rank, in a line that ends the command.
    """
    if rank >= world:
        raise SystemExit(f"--rank {rank}: the command has {world} ranks, 0 to {world - 1}")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", GROUP_RANK=str(rank // local), ROLE_RANK=str(rank), WORLD_SIZE=str(world),
        ROLE_WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local), GROUP_WORLD_SIZE=str(max(1, world // local)),
        TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
    )  # fmt: skip
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
