"""Opens the program on one of its screens. A screen's modules are imported when it is first shown."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from gpumem_tui.ascii import is_ascii_only
from gpumem_tui.errors import OptionError
from gpumem_tui.monitor.snapshot import Snapshot, Source
from gpumem_tui.monitor.vendors import is_without_driver
from gpumem_tui.settings import Settings, keep_theme, load, theme_of

if TYPE_CHECKING:
    from gpumem_tui.options.configuration import Options
    from gpumem_tui.plan.plan import Plan
    from gpumem_tui.recording.player import Player
    from gpumem_tui.remote.connection import Fleet
    from gpumem_tui.search.config import SearchConfig
    from gpumem_tui.snapshots.analysis import Analysis
    from gpumem_tui.snapshots.comparison import Comparison
    from gpumem_tui.snapshots.model import MemorySnapshot
    from gpumem_tui.tui.kit.main_screen import Act, MainScreen, ScreenName
    from gpumem_tui.watch.live import LiveProbes
    from gpumem_tui.watch.supervising import TerminalCommand

    Screens = Mapping[ScreenName, Callable[[], MainScreen]]

_GRAPHICS_ELSEWHERE = "TEXTUAL_DRIVER"
"""With this Textual draws on no terminal, but in a browser (Textual's documentation, "textual.constants")."""
_ARENA_MAX, _ARENAS = -8, 2
"""glibc's malloc.h."""
_DECIDE_S = 1.0
"""A driver that has not said anything by then is there, and hangs."""


def open_program(settings: Settings) -> int:
    """Open on the Monitor if a GPU or a probe answers, else on Search with the simulated GPU; returns the exit code.

    Where the settings have it read-only, nothing can be searched: it opens on the Monitor.

    Raises:
        OptionError: the environment asks for what cannot be searched.
    """
    _settle_memory()
    source = _sampler(settings)
    source.start()
    with _first_picture(source, settings):  # a driver that is slower is read while Textual is imported
        from gpumem_tui.tui import app  # noqa: F401

        if source.latest() is None:  # a driver answers at once that there is no GPU, so there will be one to watch
            from gpumem_tui.tui.monitor import screen  # noqa: F401
        snapshot = source.wait(None, _DECIDE_S)
        if settings.read_only or _worth_watching(snapshot) or _anything_publishes():
            notice = "read-only" if settings.read_only else ""
            return _watch(partial(_monitor_screen, source, settings, notice=notice), settings)
    source.stop()
    from gpumem_tui.options.configuration import Options, configure

    options = Options()
    return open_search(options, configure(options), autostart=False, settings=settings)


def open_monitor(source: Source, settings: Settings, *, notice: str = "") -> int:
    """Open on the Monitor and return the exit code.

    Args:
        source: where snapshots come from; started here, and stopped at the end.
        notice: the header's first words, such as where metrics are.
    """
    _settle_memory()
    source.start()
    with _first_picture(source, settings):
        return _watch(partial(_monitor_screen, source, settings, notice=notice), settings)


def open_replay(replay: Player, settings: Settings) -> int:
    """Open on the recording of a machine, which plays from here on, and return the exit code."""
    _settle_memory()
    replay.start()

    def monitor() -> MainScreen:
        from gpumem_tui.tui.monitor.screen import MonitorScreen

        return MonitorScreen(replay, settings, read_only=True, replay=replay, past=replay.past_snapshots)

    return _watch(monitor, settings)


def open_hosts(fleet: Fleet | Player, settings: Settings, *, allow_signals: bool = False) -> int:
    """Open on several hosts, which are connected to or played from here on, and return the exit code.

    Args:
        allow_signals: offer to end processes there.
    """
    from gpumem_tui.tui.hosts.screen import HostsScreen

    _settle_memory()
    fleet.start()
    return _watch(partial(HostsScreen, fleet, settings, allow_signals=allow_signals), settings)


def open_named_hosts(names: Sequence[str], settings: Settings, *, allow_signals: bool) -> int:
    """Open on the hosts of these names, over the user's ssh, and return the exit code.

    Args:
        allow_signals: as for `open_hosts`.

    Raises:
        OptionError: one is no host's name.
    """
    from gpumem_tui.remote.connection import Fleet
    from gpumem_tui.remote.hosts import parse_host
    from gpumem_tui.remote.ssh import SshOptions

    fleet = Fleet(map(parse_host, names), SshOptions(settings.remote_command, settings.interval_s))
    return open_hosts(fleet, settings, allow_signals=allow_signals)


def open_search(options: Options, config: SearchConfig, *, autostart: bool, settings: Settings | None = None) -> int:
    """Open on the Search screen and return the exit code.

    Args:
        options: what the user typed to get `config`.
        autostart: begin the search at once.
        settings: None for those of the user's file.

    Raises:
        SettingsError: the user's file is invalid.
    """
    _settle_memory()
    settings = settings or load()
    search = partial(_search_screen, options, config, autostart=autostart)
    screens: Screens = {**_usual(settings), "search": search, "plan": partial(_plan_beside, options, config)}
    return _run(screens, "search", settings, config.python)


def open_plan(plan: Plan, config: SearchConfig) -> int:
    """Open on the Plan screen and return the exit code.

    Args:
        config: how the plan is traced.

    Raises:
        OptionError: the plan's numbers do not go together, or the user's settings file is invalid.
    """
    from gpumem_tui.plan.controls import check

    check(plan)
    _settle_memory()
    settings = load()
    screens: Screens = {**_usual(settings), "plan": partial(_plan_screen, plan, config)}
    return _run(screens, "plan", settings, config.python)


def open_command_plan(
    options: Options, config: SearchConfig, batch_size: int, wanted: Sequence[str], *, run_all: bool
) -> int:
    """Open on the Plan screen of a command and return the exit code.

    Args:
        options: what the user typed to get `config`.
        wanted: the changes to try, as they were typed; empty for those that are likely to help.
        run_all: try them at once, not only when asked to.
    """
    _settle_memory()
    settings = load()
    plan = partial(_command_plan_screen, options, config, batch_size, tuple(wanted), run_all=run_all)
    screens: Screens = {**_usual(settings), "plan": plan}
    if config.workload.command is not None and config.workload.command.takes_batch:
        screens = {**screens, "search": partial(_search_screen, options, config)}
    return _run(screens, "plan", settings, config.python)


def open_snapshot(snapshot: MemorySnapshot, analyses: Sequence[Analysis]) -> int:
    """Open on a memory snapshot that was read, and return the exit code.

    Args:
        analyses: its devices, taken apart.
    """
    from gpumem_tui.tui.snapshot.screen import SnapshotScreen

    settings = load()
    return _run({**_usual(settings), "snapshot": lambda: SnapshotScreen(snapshot, analyses)}, "snapshot", settings)


def open_comparison(before: MemorySnapshot, after: MemorySnapshot, found: Sequence[Comparison]) -> int:
    """Open on two memory snapshots that were read, and return the exit code.

    Args:
        found: their devices, compared.
    """
    from gpumem_tui.tui.snapshot.comparison import ComparisonScreen

    settings = load()
    return _run({**_usual(settings), "snapshot": lambda: ComparisonScreen(before, after, found)}, "snapshot", settings)


def open_run(command: TerminalCommand, words: str, settings: Settings) -> tuple[int, Sequence[str]]:
    """Open on a command that runs, with the Monitor on it; the exit code and the last lines that it printed.

    Args:
        command: already started, by this thread; words: how it was typed.
    """
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.tui.run.screen import RunScreen

    _settle_memory()
    source = _sampler(settings)
    source.start()
    made: list[RunScreen] = []

    def make() -> MainScreen:
        screen = RunScreen(source, settings, probes=_live_probes(), notifier=Notifier(settings.notify))
        made.append(screen.of(command, words))
        return made[0]

    code = _run({"monitor": make}, "monitor", settings)
    lines, _ = made[0].printed.since(0) if made else ([], 0)
    return code, [line.text for line in lines]


def _first_picture(source: Source, settings: Settings) -> AbstractContextManager[None]:
    """Draw what a source has, once it is started: what that takes is imported while the driver starts."""
    if _GRAPHICS_ELSEWHERE in os.environ:
        return nullcontext()
    from gpumem_tui.tui.kit.first_picture import first_picture

    return first_picture(source, mine=settings.mine, ascii_only=settings.ascii)


def _settle_memory() -> None:
    """Collect no garbage until the first frame: what is imported stays, and to look takes a seventh of the time.

    Threads share two arenas of glibc's (mallopt(3), M_ARENA_MAX): with one for each, what they freed in between stayed
    resident, 24 MiB of the Monitor's and 14 of the hosts' after an hour (tests/bench/test_soak.py).
    """
    gc.disable()
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _ARENAS)


def _watch(monitor: Callable[[], MainScreen], settings: Settings) -> int:
    from gpumem_tui.tui.kit.main_screen import EVERY_ACT

    screens: Screens = {**_usual(settings), "monitor": monitor}
    if settings.read_only:
        return _run({**screens, "search": _no_search}, "monitor", settings, forbidden=EVERY_ACT)
    return _run(screens, "monitor", settings)


def _usual(settings: Settings) -> Screens:
    """Return how to make each screen that the caller did not make."""
    return {"monitor": partial(_own_monitor, settings), "search": _default_search, "plan": _default_plan}


def _no_search() -> MainScreen:
    from gpumem_tui.tui.kit.main_screen import Act, refusal

    raise OptionError(refusal(Act.SEARCH))


def _run(
    screens: Screens,
    first: ScreenName,
    settings: Settings,
    python: str | None = None,
    *,
    forbidden: frozenset[Act] | None = None,
) -> int:
    """Run it until it is left; who types `search` or `plan` may do so, but touch no process, if the settings say so."""
    from gpumem_tui.tui.app import GpuMemApp, run_app
    from gpumem_tui.tui.kit.main_screen import TO_PROCESSES

    ascii_only = settings.ascii or is_ascii_only()
    if forbidden is None:
        forbidden = TO_PROCESSES if settings.read_only else frozenset()
    app = GpuMemApp(
        screens,
        first,
        ascii_only=ascii_only,
        theme=theme_of(settings),
        keep_theme=partial(keep_theme, settings),
        python=python,
        forbidden=forbidden,
    )
    return run_app(app)


def _monitor_screen(source: Source, settings: Settings, *, notice: str = "") -> MainScreen:
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.tui.monitor.screen import MonitorScreen

    notifier = Notifier(settings.notify)
    return MonitorScreen(source, settings, probes=_live_probes(), notifier=notifier, notice=notice)


def _live_probes() -> LiveProbes:
    from gpumem_tui.watch.live import LiveProbes

    probes = LiveProbes()
    probes.start()
    return probes


def _own_monitor(settings: Settings) -> MainScreen:
    """Return the Monitor of this machine."""
    source = _sampler(settings)
    source.start()
    return _monitor_screen(source, settings)


def _search_screen(options: Options, config: SearchConfig, *, autostart: bool = False) -> MainScreen:
    from gpumem_tui.search import report
    from gpumem_tui.tui.search.screen import SearchScreen

    return SearchScreen(config, options.trained, report.device_line(config.device), autostart=autostart)


def _default_search() -> MainScreen:
    """Search as the bare command has it; raises as `_default_configuration`."""
    return _search_screen(*_default_configuration())


def _plan_screen(plan: Plan, config: SearchConfig) -> MainScreen:
    from gpumem_tui.plan.tracing import BackgroundTracer, TraceOptions
    from gpumem_tui.tui.plan.planned import of_model
    from gpumem_tui.tui.plan.screen import PlanScreen

    return PlanScreen(of_model(plan, lambda on_change: BackgroundTracer(on_change, TraceOptions.of(config))))


def _command_plan_screen(
    options: Options, config: SearchConfig, batch_size: int, wanted: tuple[str, ...], *, run_all: bool
) -> MainScreen:
    from gpumem_tui.formula.techniques import changes_named
    from gpumem_tui.options.configuration import command_plan_line
    from gpumem_tui.plan.command import CommandRuns
    from gpumem_tui.tui.plan.planned import of_command
    from gpumem_tui.tui.plan.screen import PlanScreen

    line = partial(command_plan_line, options, config, batch_size, what_ifs=wanted, run_all=run_all)
    return PlanScreen(of_command(CommandRuns(config, batch_size, changes_named(wanted)), line, run_all=run_all))


def _plan_beside(options: Options, config: SearchConfig) -> MainScreen:
    """Return the Plan of what is searched; of a command one sample, and its what-ifs only when asked for."""
    if config.workload.shape is None and config.workload.command is not None:
        return _command_plan_screen(options, config, 1, (), run_all=False)
    return _plan_screen(_plan_of(options, config), config)


def _plan_of(options: Options, config: SearchConfig) -> Plan:
    """Return a search's settings as a plan; a workload file has no shape, so it is the default model's then."""
    from gpumem_tui.catalog.loader import DEFAULT_MODEL, find_model
    from gpumem_tui.options.configuration import HOW, typed_words
    from gpumem_tui.plan.plan import Plan

    shape = config.workload.shape or find_model(DEFAULT_MODEL)
    return Plan(
        shape,
        config.workload.recipe,
        config.device.gpu,
        headroom=config.headroom,
        target_batch=config.target_batch,
        model_file=config.workload.model_file,
        how=typed_words(options, HOW),
    )


def _default_plan() -> MainScreen:
    """Plan as the bare command has it; raises as `_default_configuration`."""
    return _plan_beside(*_default_configuration())


def _default_configuration() -> tuple[Options, SearchConfig]:
    """Return what the bare command would search.

    Raises:
        OptionError: the environment asks for what cannot be searched or traced.
    """
    from gpumem_tui.options.configuration import Options, configure

    options = Options()
    return options, configure(options)


def _sampler(settings: Settings) -> Source:
    from gpumem_tui.monitor.sampler import Sampler

    return Sampler(settings.interval_s)


def _worth_watching(snapshot: Snapshot | None) -> bool:
    """Return whether a GPU answers, or a driver is there and something is wrong with it."""
    if snapshot is None or snapshot.gpus:
        return True
    return bool(snapshot.problem) and not is_without_driver(snapshot.problem)


def _anything_publishes() -> bool:
    """Return whether a probe inside a running process answers."""
    from gpumem_tui.watch.publishing import PublishingFolders

    if PublishingFolders().are_quiet():
        return False
    from gpumem_tui.watch.reader import Watcher

    return any(process.is_running for process in Watcher().processes())
