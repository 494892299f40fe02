"""The cost of the Monitor's first frame and of each later picture, counted: no test here reads a clock."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from msgspec import structs
from textual.css.stylesheet import Stylesheet
from textual.widget import Widget

from gpumem_tui.tui.kit.lines import Lines
from tests.scenes import monitor as scene

_WAITED_FOR = """
import dataclasses, json, sys
generated, process = [], dataclasses._process_class
def counted(kind, *rest):
    generated.append(kind.__module__)
    return process(kind, *rest)
dataclasses._process_class = counted
import gpumem_tui.cli, gpumem_tui.tui.start, gpumem_tui.tui.kit.first_picture, gpumem_tui.monitor.sampler
import gpumem_tui.monitor.processes, gpumem_tui.monitor.vendors.nvidia.backend, gpumem_tui.watch.live
import gpumem_tui.tui.app, gpumem_tui.tui.monitor.screen, gpumem_tui.monitor.notify
ours = [name for name in sys.modules if name.startswith("gpumem_tui")]
print(json.dumps([ours, [name for name in generated if name.startswith("gpumem_tui")], [*sys.modules]]))
"""
_LATER = ("probe", "step", "launchers", "watch.reader", "watch.publishing", "watch.hosts", "tui.process", "recording",
          "remote", "plan", "search", "options", "catalog", "snapshots")  # fmt: skip
"""Rooms and modules that are needed once a probe, a key or another screen asks for them."""


def test_the_first_frame_waits_for_few_modules_and_few_generated_classes() -> None:
    done = subprocess.run([sys.executable, "-c", _WAITED_FOR], capture_output=True, text=True, check=True)
    ours, generated, every = json.loads(done.stdout)
    late = [name for name in ours if name.removeprefix("gpumem_tui.").startswith(_LATER)]
    assert not late, "imported before the first frame"
    assert not {"click", "tomllib", "importlib.metadata", "prometheus_client"} & set(every)
    assert len(ours) <= 85, f"{len(ours)} modules of ours"
    assert len(generated) <= 6, f"a generated dataclass takes ten times as long as a struct: {generated}"


async def test_no_style_sheet_is_parsed_again_and_few_widgets_are_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    sheets: list[Stylesheet] = []
    parse = Stylesheet.parse

    def counted(sheet: Stylesheet) -> None:
        sheets.append(sheet)
        parse(sheet)

    monkeypatch.setattr(Stylesheet, "parse", counted)
    app = scene.app(scene.at(0, 8))
    async with app.run_test(size=(120, 40)):
        assert {id(sheet) for sheet in sheets} == {id(app.stylesheet)}, "another sheet has to parse all of it"
        assert len(app.screen.query(Widget)) <= 12
        sheets.clear()
        app.refresh_css()
        assert not sheets, "the same colours, nothing new"
        app.theme = "gpumem-light"
        app.refresh_css()
        assert sheets, "other colours"


async def test_a_picture_draws_only_the_rows_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = scene.app(scene.at(0, 8))
    async with app.run_test(size=(120, 40)) as pilot:
        screen = scene.screen_of(app)
        await pilot.pause()
        drawn: list[int] = []
        render = Lines.render_line
        monkeypatch.setattr(Lines, "render_line", lambda self, y: drawn.append(y) or render(self, y))  # type: ignore[func-returns-value]
        shown = screen.state.snapshot
        assert shown is not None
        screen.feed.source.show(structs.replace(shown))  # type: ignore[attr-defined]
        assert screen.look()
        await pilot.pause()
        assert not drawn, "the same figures again"
