"""The tools of agents: their arguments, and once each by the package's own client."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.cli.mcp import _Call, input_schema, shortened, words_of
from gpumem_tui.cli.schema import COMMANDS
from gpumem_tui.errors import OptionError
from tests.cli.conftest import Program
from tests.cli.test_schema import faults
from tests.snapshots import files
from tests.snapshots.files import written

TOOLS = ["predict", "search", "plan", "look", "monitor"]


@pytest.mark.parametrize("name", TOOLS)
def test_the_arguments_are_the_options_of_the_command(name: str) -> None:
    properties = input_schema(name)["properties"]
    assert all(one["description"] for one in properties.values())
    if name in ("predict", "search", "plan"):
        assert properties["precision"]["enum"][0] == "fp32"
        assert {"gpu", "model", "command", "directory", "options"} <= properties.keys()
    assert not {"as_json", "plain", "quiet", "interval_s"} & properties.keys()


def test_a_call_is_a_command_line() -> None:
    given = {"gpu": "sim:h100", "batch_size": 4, "command": ["python", "a b.py"], "options": ["--steps", "2"]}
    line = ["predict", "--json", "--gpu=sim:h100", "--batch-size=4", "--steps", "2", "--", "python", "a b.py"]
    assert words_of("predict", given) == line
    assert words_of("monitor", {"mine": True, "host": ["a", "b"]}) == [
        "monitor", "--once", "--json", "--mine", "--host=a", "--host=b",
    ]  # fmt: skip
    assert words_of("look", {"targets": ["12"], "by": "module"}) == ["look", "--json", "--by=module", "--", "12"]
    assert words_of("plan", {"what_if": ["lora"], "full": False}) == ["plan", "--json", "--what-if=lora"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus_": 1}, "gpus_: predict takes model"),
        ({"options": "--json"}, 'options: give a list with a word an item, such as ["--through", "eval"]'),
        ({"command": "python train.py"}, 'command: give a list with a word an item, such as ["python", "train.py"]'),
        ({"options": ["--", "rm"]}, "options: end before `--`"),
    ],
)
def test_a_wrong_argument_is_a_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as raised:
        words_of("predict", given)
    assert words in str(raised.value)


def test_what_a_tool_without_options_refuses_names_none() -> None:
    with pytest.raises(OptionError, match="target: look takes targets, by, timeout, full; leave it out"):
        words_of("look", {"target": "a.pickle"})
    with pytest.raises(OptionError, match=r'targets: give a list .*, such as \["before.pickle", "after.pickle"\]'):
        words_of("look", {"targets": "a.pickle"})


def test_lines_that_are_no_object_are_kept_as_text() -> None:
    """As `--help-all` prints, which the tools' own descriptions name."""
    call = _Call(["predict"], None)
    for line in ("Usage: gpumem-tui predict\n", "12\n", '{"schema": 1}\n', "\n"):
        asyncio.run(call._take(line))
    assert (call.found, call.printed) == ({"schema": 1}, "Usage: gpumem-tui predict\n12\n\n")


def test_long_lists_are_cut() -> None:
    assert shortened({"a": [{"b": list(range(99))}] * 99}) == {"a": [{"b": list(range(20))}] * 20}


def test_the_page_for_agents_is_printed(program: Program) -> None:
    done = program("mcp", "--skill")
    assert done.out.startswith("---\nname: gpumem-tui\n")
    assert len(done.out.splitlines()) <= 40


def test_without_the_package_a_line_says_how_to_get_it(tmp_path: Path) -> None:
    code = (
        "import sys; from importlib import metadata; real = metadata.version\n"
        "def version(name):\n    if name == 'mcp': raise metadata.PackageNotFoundError(name)\n    return real(name)\n"
        "metadata.version = version; sys.argv = ['gpumem-tui', 'mcp']; from gpumem_tui.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpumem-tui: mcp: its package is not installed: `pip install 'gpumem-tui[mcp]'`\n"


SCRIPT = """
import sys, torch
net = torch.nn.Linear(512, 512).cuda()
print("a line of the script's own")
for _ in range(5):
    net(torch.empty(int(sys.argv[1]), 512, device="cuda")).square().mean().backward()
    net.zero_grad()
"""
ENDLESS = "import os, pathlib, time, torch\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"


@pytest.mark.slow
def test_each_tool_by_the_packages_own_client(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "endless.py").write_text(ENDLESS)
    snapshot = written(tmp_path, files.training())
    asyncio.run(_try_each(tmp_path, snapshot))


async def _try_each(folder: Path, snapshot: Path) -> None:
    from mcp import ClientSession, StdioServerParameters, stdio_client

    server = StdioServerParameters(command=sys.executable, args=["-m", "gpumem_tui", "mcp"], env=dict(os.environ))
    told: list[str] = []

    async def hear(_done: float, _total: float | None, message: str | None) -> None:
        told.append(message or "")

    async with stdio_client(server) as (reads, writes), ClientSession(reads, writes) as session:
        await session.initialize()

        async def call(tool: str, **given: Any) -> Any:
            return await session.call_tool(tool, given, progress_callback=hear)

        assert [tool.name for tool in (await session.list_tools()).tools] == TOOLS
        run = {"gpu": "sim:rtx-4090", "directory": str(folder), "steps": 2}
        command = [sys.executable, "train.py", "64"]
        found = {"predict": await call("predict", **run, command=command, full=True)}
        run["options"] = ["--limit", "300MiB"]
        found["search"] = await call("search", **run, command=[*command[:2], "{batch}"])
        found["plan"] = await call("plan", model="gpt2", gpu="sim:rtx-4090", options=["--no-trace"], full=True)
        found["look"] = await call("look", targets=[str(snapshot)], full=True)
        found["monitor"] = await call("monitor")
        for tool, result in found.items():
            assert not result.is_error, (tool, result.content)
            assert tool not in COMMANDS or faults(result.structured_content, tool) == []
        assert found["predict"].content[0].text.startswith("Its own batch fits on NVIDIA GeForce RTX 4090")
        assert found["search"].structured_content["max_batch_size"] > 0
        assert any(line.startswith("trial 1: batch ") for line in told)
        assert not any("a line of the script's own" in line for line in told)
        wrong = await call("predict", gpu="sim:none", command=command)
        assert wrong.is_error
        assert wrong.content[0].text.startswith("--gpu: unknown GPU 'none'")
        assert (await call("dance")).is_error
        listed = await call("predict", options=["--help-all"])
        assert not listed.is_error
        assert "--kv-cache-dtype" in listed.content[0].text
        endless = asyncio.create_task(call("predict", command=[sys.executable, "endless.py"], directory=str(folder)))
        pid = await _pid_in(folder)
        endless.cancel()
        await _gone(pid)
        (folder / "pid").unlink()
        left = asyncio.create_task(call("predict", command=[sys.executable, "endless.py"], directory=str(folder)))
        pid = await _pid_in(folder)
    await _gone(pid)
    await asyncio.gather(endless, left, return_exceptions=True)


async def _pid_in(folder: Path) -> int:
    file, until = folder / "pid", time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until, "the command has not begun"
        await asyncio.sleep(0.1)
    return int(file.read_text())


async def _gone(pid: int) -> None:
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until, "the command runs on"
        await asyncio.sleep(0.1)
