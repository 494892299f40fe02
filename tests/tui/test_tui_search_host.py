"""A search on another machine on the screen: where it is, and what cannot be done from here."""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.tui.search.state import Failure, SearchState, Stage
from gpumem_tui.tui.search.verdict import verdict_view
from gpumem_tui.tui.search.workload import device_words, workload_lines
from tests.search.test_wire import OF_COMMAND

THERE = replace(OF_COMMAND, device=replace(OF_COMMAND.device, host="box"))


def test_it_says_where() -> None:
    assert device_words(THERE)[0] == "box: NVIDIA T4"
    assert ("in", "/home/me") in list(workload_lines(THERE))
    assert device_words(OF_COMMAND)[0] == "NVIDIA T4"
    assert "in" not in dict(workload_lines(OF_COMMAND))


def test_only_what_is_here_can_be_edited() -> None:
    for config, edits in ((THERE, False), (OF_COMMAND, True)):
        idle = SearchState(config)
        failed = replace(idle, stage=Stage.FAILED, failure=Failure("box: lost", 4))
        said = [verdict_view(state) for state in (idle, failed)]
        assert ["e edits" in " ".join((view.headline, *view.details)) for view in said] == [edits, edits]
