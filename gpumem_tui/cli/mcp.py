"""`mcp`: the commands as tools of agents, by the Model Context Protocol. Each call is a process of this program."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from gpumem_tui import __version__
from gpumem_tui.cli.parameters import TakesCommand
from gpumem_tui.cli.sections import SectionedOption
from gpumem_tui.errors import OptionError
from gpumem_tui.manual import text
from gpumem_tui.report.output import on_end

_OLDEST = 2
_COMMAND = 'The training command, a word an item: ["python", "train.py", "--bs", "{batch}"]; {batch} is its batch size.'
_TARGETS, _LOOKED_AT = "targets", "A PID; or the path of a snapshot, or of two to compare."
_LISTS = {
    "command": '["python", "train.py"]',
    "options": '["--through", "eval"]',
    _TARGETS: '["before.pickle", "after.pickle"]',
}
"""By argument that is a list of words, one."""
_RUNS = "The training command really runs, with the user's rights, and files that it writes are kept"
_TOOLS = {
    "predict": f"Predict whether a batch size fits on a GPU, and what holds memory. {_RUNS}: a few simulated steps.",
    "search": f"Find the largest batch that fits, by trials. {_RUNS}: simulated, or for gpu 0 on the real GPU.",
    "plan": f"Find changes that make more fit (checkpointing, LoRA, …) and their cost. {_RUNS}, simulated.",
    "look": "Take apart the memory of a running process's step (PID), or of a PyTorch memory snapshot (path).",
    "monitor": "Read every GPU's memory now, as a ledger, with its processes; of other machines with `host`.",
}
"""By command what it is for. Each prints an object with ``--json``."""
_LEFT_OUT = frozenset(
    ("as_json", "plain", "quiet", "markdown", "wire", "as_csv", "once", "record", "replay", "speed", "address", "bell",
     "read_only", "settings_path", "help_all", "interval_s", "snapshot", "html")
)  # fmt: skip
"""Options that say how something is shown, or that keep running."""
_OUTPUT = "  | "
"""How lines begin on stderr that the training command has printed."""
_SHORT = 20
_LINE_BYTES = 1 << 26
_END_S = 10.0


@click.command
@click.option("--skill", is_flag=True, help="Print the page for agents, SKILL.md, instead.")
def mcp(skill: bool) -> int:
    """Serve agents by the Model Context Protocol on stdin and stdout: predict, search, plan, look, monitor.

    \b
    claude mcp add gpumem -- gpumem-tui mcp   # one client's line
    gpumem-tui mcp --skill                    # how an agent uses it, on a page

    The commands that agents name really run, as yours.
    """
    if skill:
        click.echo(text("SKILL"), nl=False)
        return 0
    try:
        found = version("mcp")
    except PackageNotFoundError as error:
        raise OptionError("mcp: its package is not installed: `pip install 'gpumem-tui[mcp]'`") from error
    if int(found.partition(".")[0]) < _OLDEST:
        raise OptionError(f"mcp: its package is {found}, which is too old: `pip install 'gpumem-tui[mcp]'`")
    import anyio

    on_end(sys.exit)
    anyio.run(_serve)
    return 0


# The tools


def input_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments: the options that `--help` lists of its command."""
    command = _command(name)
    properties: dict[str, Any] = {}
    for param in command.params:
        if isinstance(param, click.Argument):
            properties[_TARGETS] = {"type": "array", "items": {"type": "string"}, "description": _LOOKED_AT}
        elif isinstance(param, click.Option) and _is_offered(param):
            properties[_key(param)] = {**_type_of(param), "description": param.help or ""}
    if isinstance(command, TakesCommand):
        properties["command"] = {"type": "array", "items": {"type": "string"}, "description": _COMMAND}
        properties["directory"] = {"type": "string", "description": "The folder that the command runs in."}
        more = f'Further options as typed, as {_LISTS["options"]}; ["--help-all"] alone lists them.'
        properties["options"] = {"type": "array", "items": {"type": "string"}, "description": more}
    properties["full"] = {"type": "boolean", "description": f"Whole lists; else the first {_SHORT} entries of each."}
    required = [_TARGETS] if _TARGETS in properties else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _key(option: click.Parameter) -> str:
    """Return the name of an argument: the option's, with underscores."""
    return option.opts[-1].lstrip("-").replace("-", "_")


def _command(name: str) -> click.Command:
    found: click.Command = getattr(import_module(f"gpumem_tui.cli.{_MODULE.get(name, name)}"), name)
    return found


_MODULE = {"predict": "search"}


def _is_offered(option: click.Option) -> bool:
    return option.name not in _LEFT_OUT and (option.is_common if isinstance(option, SectionedOption) else True)


def _type_of(option: click.Option) -> dict[str, Any]:
    kind = option.type
    if option.is_flag:
        return {"type": "boolean"}
    found: dict[str, Any] = {"type": "string"}
    if isinstance(kind, click.Choice):
        found = {"enum": list(kind.choices)}
    elif isinstance(kind, click.IntRange):
        found = {"type": "integer", "minimum": kind.min}
    elif isinstance(kind, click.FloatRange):
        found = {"type": "number"}
    return {"type": "array", "items": found} if option.multiple else found


def words_of(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line of a call, after the program's name.

    Raises:
        OptionError: an argument that the tool lacks.
    """
    schema = input_schema(name)["properties"]
    flags = {_key(option): option.opts[-1] for option in _command(name).params}
    for key in arguments.keys() - schema.keys():
        others = "pass others in `options`" if "options" in schema else "leave it out"
        raise OptionError(f"{key}: {name} takes {', '.join(schema)}; {others}")
    words = [name, *(["--once"] if name == "monitor" else []), "--json"]
    for key, value in arguments.items():
        if key in flags and key != _TARGETS:
            words += _typed(flags[key], value)
    words += _listed("options", arguments)
    if targets := _listed(_TARGETS, arguments):
        words += ["--", *targets]
    command = _listed("command", arguments)
    return [*words, "--", *command] if command else words


def _typed(flag: str, value: object) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        if one is True:
            yield flag
        elif one is not None and one is not False:
            yield f"{flag}={one}"


def _listed(key: str, arguments: Mapping[str, Any]) -> list[str]:
    found = arguments.get(key) or []
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise OptionError(f"{key}: give a list with a word an item, such as {_LISTS[key]}")
    if key == "options" and "--" in found:
        raise OptionError("options: end before `--`; pass the training command in `command`")
    return list(map(str, found))


def shortened(body: object) -> object:
    """Return a JSON value with each list cut to its first entries, which are the largest."""
    if isinstance(body, dict):
        return {key: shortened(value) for key, value in body.items()}
    return [shortened(one) for one in body[:_SHORT]] if isinstance(body, list) else body


# The server


async def _serve() -> None:
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

    async def list_tools(_context: Any, _params: Any) -> Any:
        listed = [Tool(name=name, description=words, input_schema=input_schema(name)) for name, words in _TOOLS.items()]
        return ListToolsResult(tools=listed)

    async def call_tool(context: Any, params: Any) -> Any:
        arguments = params.arguments or {}
        try:
            if params.name not in _TOOLS:
                raise OptionError(f"{params.name}: is no tool; use one of {', '.join(_TOOLS)}")
            call = _Call(words_of(params.name, arguments), context.session)
            await call.run(arguments.get("directory"))
        except OptionError as error:
            return CallToolResult(content=[TextContent(text=str(error))], is_error=True)
        if call.found is None and call.printed and not call.code:  # as `--help-all` prints
            return CallToolResult(content=[TextContent(text=call.printed)])
        if call.found is None:
            return CallToolResult(content=[TextContent(text=call.complaint)], is_error=True)
        body: Any = call.found if arguments.get("full") else shortened(call.found)
        answer = body.get("answer") or body.get("message") or json.dumps(body)
        return CallToolResult(content=[TextContent(text=answer)], structured_content=body)

    server: Any = Server("gpumem-tui", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reads, writes):
        await server.run(reads, writes, server.create_initialization_options())


class _Call:
    """A process of this program that answers a call.

    Attributes:
        found: the last object that it has printed; None for none. `printed`: its other lines.
        code: its exit code.
    """

    def __init__(self, words: Sequence[str], session: Any) -> None:
        self._words = words
        self._session = session
        self._told = 0
        self.code: int | None = None
        self.found: dict[str, Any] | None = None
        self.printed = ""
        self._heard = ""

    async def run(self, directory: str | None) -> None:
        """Run it. A cancelled call ends all that it has started.

        Raises:
            OptionError: there is no such folder.
        """
        import anyio

        if directory is not None and not os.path.isdir(directory):
            raise OptionError(f"directory: there is no folder {directory}; check the path")
        line = [sys.executable, "-m", "gpumem_tui", *self._words]
        process = await anyio.open_process(line, stdin=-3, cwd=directory, start_new_session=True)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, process.stdout, self._take)
                tasks.start_soon(self._read, process.stderr, self._hear)
            self.code = await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)

    async def _read(self, stream: Any, take: Any) -> None:
        import anyio
        from anyio.streams.buffered import BufferedByteReceiveStream

        lines = BufferedByteReceiveStream(stream)
        with suppress(anyio.IncompleteRead, anyio.EndOfStream):
            while True:
                await take((await lines.receive_until(b"\n", _LINE_BYTES)).decode(errors="replace"))

    async def _take(self, line: str) -> None:
        """Take in a printed object, and tell each trial of a search as progress."""
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.printed += line
            return
        self.found = found
        if found.get("event") == "trial":
            await self._tell("trial {number}: batch {batch_size} {outcome}".format_map(found))

    async def _hear(self, line: str) -> None:
        if not line.startswith(_OUTPUT):
            self._heard = line
            await self._tell(line)

    @property
    def complaint(self) -> str:
        """Return why there is no answer: the last line on stderr, as the command line prints it."""
        said = self._heard.removeprefix("gpumem-tui: ") or "it printed nothing; see `gpumem-tui doctor`"
        return said if self.code and self.code > 0 else f"gpumem-tui has ended by signal {-(self.code or 0)}: {said}"

    async def _tell(self, words: str) -> None:
        self._told += 1
        await self._session.report_progress(self._told, None, words)


async def _end(process: Any) -> None:
    """End a process: as ctrl+c does, so that it ends what it has started; then by force."""
    import anyio

    with suppress(ProcessLookupError):
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with anyio.move_on_after(_END_S):
                await process.wait()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    await process.aclose()
