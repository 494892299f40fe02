"""Drawing styles of the screen: without colours, with ASCII only, by the terminal's locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.style import Style

import gpumem_tui
from gpumem_tui.ascii import _without_coercion, to_ascii, wants_ascii
from gpumem_tui.memory import GIB
from gpumem_tui.settings import Settings
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.filters import AsciiFilter, PlainFilter
from gpumem_tui.tui.kit.manual import ManualApp
from gpumem_tui.tui.monitor.screen import MonitorScreen
from tests.monitor import snapshots as scene
from tests.monitor.scripted import Scripted
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, Scenario

_C = {"LC_ALL": "C"}
_WRITTEN = (".py", ".toml", ".json", ".md", ".yml")


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (_C, True),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, True),
        ({"LC_ALL": "", "LC_CTYPE": "", "LANG": "POSIX"}, True),
        ({"LANG": "de_DE.ISO-8859-1"}, True),
        ({"LANG": "de_DE"}, True),
        ({"LANG": "C", "LC_CTYPE": "en_US.utf8"}, False),
        ({"LANG": "C.UTF-8"}, False),
        ({"LC_ALL": "C", "GPUMEM_TUI_ASCII": "0"}, False),
    ],
)
def test_the_locale_decides_as_for_other_programs(environ: dict[str, str], wanted: bool) -> None:
    assert wants_ascii(environ) is wanted


def test_what_python_sets_by_itself_is_not_the_users() -> None:
    coerced = {"LANG": "C", "LC_CTYPE": "C.UTF-8"}
    assert wants_ascii(_without_coercion(coerced, "\0LANG=C\0"))
    assert not wants_ascii(_without_coercion(coerced, "\0LANG=C\0LC_CTYPE=C.UTF-8\0"))
    assert not wants_ascii(_without_coercion(coerced, ""))


@pytest.mark.parametrize(
    ("drawn", "plain"),
    [("△ GPU 3", "* GPU 3"), ("▲ GPU 3", "! GPU 3"), ("▾GPU MEM", "-GPU MEM"), ("▴GPU", "+GPU"), ("61°C", "61 C"),
     ("61 °C", "61 C "), ("▪▪", ";;"), ("“a”", '"a"'), ("≥ 2", "> 2")],
)  # fmt: skip
def test_each_of_our_characters_has_a_sign(drawn: str, plain: str) -> None:
    assert to_ascii(drawn) == plain


def test_no_character_of_the_programs_own_is_a_question_mark() -> None:
    files = (path for path in Path(gpumem_tui.__file__).parent.rglob("*") if path.suffix in _WRITTEN)
    found = {character for path in files for character in set(path.read_text("utf-8")) if "?" in to_ascii(character)}
    assert found == {"?", "‖"}, "the second is in a comment's formula"


_PRINTED = {
    "monitor --once": 0, "monitor --json --once": 0, "--help": 0, "predict --help-all": 0, "manual monitor": 0,
    "settings": 0, "predict --model gpt2 --gpu sim:nothing…": 2,
}  # fmt: skip


def _environ(**more: str) -> dict[str, str]:
    names = ("LC_ALL", "LC_CTYPE", "LANG", "GPUMEM_TUI_ASCII", "XDG_CONFIG_HOME")
    return {**{name: value for name, value in os.environ.items() if name not in names}, "LC_ALL": "C.UTF-8", **more}


@pytest.mark.parametrize("line", _PRINTED)
def test_all_that_is_printed_is_ascii_where_the_settings_have_it(
    line: str, fake_machine: FakeMachine, tmp_path: Path
) -> None:
    fake_machine.show(Scenario(gpus=[FakeGpu(name="NVIDIA Größe", used_bytes=79 * GIB, temperature_c=95)]))
    (tmp_path / "gpumem-tui").mkdir()
    (tmp_path / "gpumem-tui/settings.toml").write_text("ascii = true\n")
    command = [sys.executable, "-m", "gpumem_tui", *line.split()]
    environ = _environ(**{**fake_machine.environment, "XDG_CONFIG_HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    assert done.returncode == _PRINTED[line], done.stderr
    assert (done.stdout + done.stderr).isascii()
    if "--json" in line:
        assert json.loads(done.stdout)["gpus"][0]["name"] == "NVIDIA Größe"


def test_the_settings_that_are_named_count_and_the_environment_goes_before_the_file(
    fake_machine: FakeMachine, tmp_path: Path
) -> None:
    fake_machine.show(Scenario(gpus=[FakeGpu(used_bytes=79 * GIB)]))
    (tmp_path / "gpumem-tui").mkdir()
    named = tmp_path / "gpumem-tui/settings.toml"
    named.write_text("ascii = true\n")

    def printed(*words: str, **more: str) -> bytes:
        environ = _environ(**{**fake_machine.environment, **more})
        command = [sys.executable, "-m", "gpumem_tui", "monitor", "--once", *words]
        return subprocess.run(command, env=environ, capture_output=True, check=True).stdout

    assert printed("--settings", str(named)).isascii()
    assert not printed(XDG_CONFIG_HOME=str(tmp_path), GPUMEM_TUI_ASCII="0").isascii()


@pytest.mark.parametrize("variable", ["LC_ALL", "LANG"])
def test_lines_are_ascii_where_the_locale_is_not_utf8(variable: str) -> None:
    program = """
from gpumem_tui.ascii import fit_streams, is_ascii_only
from gpumem_tui.report.output import Printer, complain
fit_streams(ascii_only=is_ascii_only())
Printer(as_json=False).show(lines=lambda: ['61 °C ▲ …'])
complain('61 °C', 1)
"""
    others = {name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LC_CTYPE", "LANG")}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**others, variable: "C"}, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"61 C  ! .\n", b"gpumem-tui: 61 C \n")


def test_a_character_that_an_encoding_lacks_has_a_sign_and_others_stay() -> None:
    program = "from gpumem_tui.ascii import fit_streams; fit_streams(ascii_only=False); print('é 61 °C ▲')"
    environ = _environ(PYTHONIOENCODING="latin-1", GPUMEM_TUI_ASCII="0")
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True)
    assert done.stdout.decode("latin-1") == "é 61 °C !\n"


def test_the_manual_alone_is_ascii_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_tui.tui.kit.manual.is_ascii_only", lambda: True)
    assert any(isinstance(each, AsciiFilter) for each in ManualApp("monitor").get_line_filters())


def test_without_colours_what_alarms_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    source = Scripted(scene.machine())
    app = GpuMemApp({"monitor": lambda: MonitorScreen(source, Settings())}, "monitor")
    (plain,) = [each for each in app.get_line_filters() if isinstance(each, PlainFilter)]
    colours = app.theme_variables

    def drawn(text: str, colour: str) -> Style:
        from rich.segment import Segment
        from textual.color import Color

        (segment,) = plain.apply([Segment(text, Style(color=Color.parse(colour).rich_color))], Color.parse("black"))
        assert segment.style is not None
        return segment.style

    ordinary, warning, error = (drawn("99%", colours[name]) for name in ("foreground", "warning", "error"))
    assert warning.color == error.color == ordinary.color
    assert warning.bold
    assert error.bold
    assert error.reverse
    assert not ordinary.bold
    heavy = drawn("99%", colours["load-heavy"])
    assert heavy.color == ordinary.color
    assert not heavy.bold
    border = drawn("╭──", colours["error"])
    assert border.bold
    assert not border.reverse
