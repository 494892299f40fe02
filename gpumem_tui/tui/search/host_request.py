"""A search on another machine that the form asks for: the machine itself chooses the GPU and reads the files."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.options.configuration import Options
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.remote.hosts import one_host
from gpumem_tui.remote.searching import RemoteSearch
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.settings import load


@dataclass(frozen=True)
class Edited:
    """What the form gives back: always a valid workload.

    Attributes:
        there: the connection to the machine that searches it; None for this machine.
    """

    options: WorkloadOptions
    config: SearchConfig
    there: RemoteSearch | None = None


@dataclass(frozen=True)
class HostRequest:
    """What is in the form for another machine, which has not seen it yet.

    Attributes:
        host, directory: as they were typed.
        ssh: how hosts are reached; None: as the user's settings say.
    """

    host: str
    directory: str
    asked: Options
    ssh: SshOptions | None = None

    def connect(self) -> Edited:
        """Ask the host. Takes as long as ssh does.

        Raises:
            OptionError: it is no host, or the options are wrong there.
            LinkLost: the host cannot be reached, or has no such program.
        """
        settings = load()
        host = one_host(self.host, dict(settings.hosts))
        ssh = self.ssh or SshOptions(settings.remote_command, settings.interval_s)
        there = RemoteSearch(host, ssh, self.directory, self.asked)
        return Edited(self.asked.trained, there.configure().config, there)
