"""The typed options on machines to watch. Without click: commands that need no parsing start without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpumem_tui.ascii import fit_streams

if TYPE_CHECKING:
    from gpumem_tui.settings import Settings

Asked = TypeVar("Asked", bound="AskedHosts")


class AskedHosts(Struct, frozen=True):
    """The machines that the command line names, and how they are watched.

    Attributes:
        hosts: of `--host`; `hosts_file`: of `--hosts`; `slurm_job`: of `--slurm`.
        interval_s: seconds between two readings; None for as the settings have it.
        address: where metrics of all of them are served; then no terminal is needed.
        timeout_s: seconds for a host's first answer where that is waited for; None for the usual time.
        allow_signals: offer to end processes there.
        mine: list only the processes of the user who watches.
        bell: ring when an alert begins; `read_only`: only watch.
        record: also keep their states in this new file; without a terminal nothing else is done.
        settings_path: the settings file; None for the user's.
        quiet: only keep or serve what is read: no screen, no lines.
    """

    hosts: tuple[str, ...] = ()
    hosts_file: Path | None = None
    slurm_job: str | None = None
    remote_command: str | None = None
    interval_s: float | None = None
    address: tuple[str, int] | None = None
    allow_signals: bool = False
    record: Path | None = None
    mine: bool = False
    bell: bool = False
    read_only: bool = False
    settings_path: Path | None = None
    timeout_s: float | None = None
    quiet: bool = False

    @classmethod
    def of(cls: type[Asked], values: Mapping[str, Any]) -> Asked:
        """Return what was typed, by click's names of the options."""
        return cls(**{name: values[name] for name in cls.__struct_fields__ if name in values})

    @property
    def are_named(self) -> bool:
        """Return whether any machine is named."""
        return bool(self.hosts or self.hosts_file or self.slurm_job)


class AskedMonitor(AskedHosts, frozen=True):
    """The options of `monitor`: which machines, and of these or of this one what is shown."""

    once: bool = False
    as_json: bool = False
    as_csv: bool = False
    wire: bool = False
    replay: Path | None = None
    speed: float | None = None


def settings_of(asked: Any, *more: str) -> Settings:
    """Return the settings of the file that was named, else the user's, with what was typed in the place of the file's.

    Args:
        asked: what was typed, by the settings' names, and `settings_path`.
        more: settings besides those that every Monitor takes.
    """
    from gpumem_tui.settings import load

    settings, names = load(asked.settings_path), ("interval_s", "mine", "bell", "read_only", *more)
    if settings.ascii and asked.settings_path is not None:  # the user's own file is read at the start
        fit_streams(ascii_only=True)
    return replace(settings, **{name: getattr(asked, name) or getattr(settings, name) for name in names})
