"""A search on another machine on the screen: where it is, and the form in which the machine is typed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input, Static

from gpumem_tui.search.runner import SearchFinished, TrialFinished, TrialStarted
from gpumem_tui.search.wire import Configured, NotSearchable, Reply
from gpumem_tui.tui.kit.choice import ChoiceField
from gpumem_tui.tui.search.form import EditScreen
from gpumem_tui.tui.search.panels import device_words, workload_lines
from gpumem_tui.tui.search.state import Stage
from tests.remote.standins import Ssh
from tests.remote.test_searching import answers, asked_of
from tests.scenes import search as scene
from tests.scenes.pictures import until
from tests.search.test_wire import CONFIG as TAKEN
from tests.search.test_wire import DONE, OF_COMMAND, VERDICT

THERE = replace(OF_COMMAND, device=replace(OF_COMMAND.device, host="box"))
HERE = scene.config()
SIZE = (120, 40)
SEARCHED: list[Reply] = [TrialStarted(1, 4), TrialFinished(1, DONE), SearchFinished(VERDICT)]


def test_it_says_where() -> None:
    assert device_words(THERE)[0] == "box: NVIDIA T4"
    assert ("in", "/home/me") in list(workload_lines(THERE))
    assert device_words(OF_COMMAND)[0] == "NVIDIA T4"
    assert "in" not in dict(workload_lines(OF_COMMAND))


@pytest.fixture
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Ssh:
    return Ssh(tmp_path_factory.mktemp("ssh"))


async def form_of(pilot: Pilot[int]) -> EditScreen:
    await until(pilot, lambda: isinstance(pilot.app.screen, EditScreen))
    form = pilot.app.screen
    assert isinstance(form, EditScreen)
    await until(pilot, lambda: all(node.is_mounted for node in form.walk_children(Widget, with_self=True)))
    return form


def typed(form: EditScreen, name: str) -> str:
    return form.query_one(f"#{name}", Input).value


def said(form: EditScreen, name: str) -> str:
    return str(form.query_one(f"#{name}", Static).render())


async def test_a_command_typed_here_is_searched_there(ssh: Ssh) -> None:
    answers(ssh, configure=[Configured(OF_COMMAND, "/home/me/runs")], search=SEARCHED)
    async with scene.app(HERE, scene.missing_torch, autostart=False).run_test(size=SIZE) as pilot:
        screen = scene.search_screen(pilot.app)
        assert not screen.take_over(("box", ssh.options))
        form = await form_of(pilot)
        await until(pilot, lambda: form.query_one("#gpu", ChoiceField).value == "free")
        form.query_one("#kind", ChoiceField).value = "command"
        form.query_one("#command", Input).value = "no-such-program-here --bs {batch}"
        form.query_one("#remote_directory", Input).value = "runs"
        form.query_one("#gpu", ChoiceField).value = "1"
        await until(pilot, lambda: "box is asked" in said(form, "preview"))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: pilot.app.screen is screen)
        assert screen.state.config.device.host == "box"
        assert all(word in asked_of(ssh) for word in ('"directory": "runs"', '"gpu": "1"', '"no-such-program-here"'))
        await pilot.press("s")
        await until(pilot, lambda: screen.state.stage is Stage.FOUND)
        assert screen.state.verdict == VERDICT
        await pilot.press("e")
        again = await form_of(pilot)
        assert (typed(again, "host"), typed(again, "remote_directory")) == ("box", "runs")
        assert again.query_one("#gpu", ChoiceField).value == "1"


async def test_what_the_host_refuses_stands_beside_its_field(ssh: Ssh) -> None:
    answers(ssh, configure=[NotSearchable("--limit: the device has only 15.00 GiB")])
    async with scene.app(HERE, scene.missing_torch, autostart=False).run_test(size=SIZE) as pilot:
        scene.search_screen(pilot.app).take_over(("box", ssh.options))
        form = await form_of(pilot)
        form.query_one("#limit_bytes", Input).value = "20GiB"
        await until(pilot, lambda: "box is asked" in said(form, "preview"))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: said(form, "limit_bytes-error") == "the device has only 15.00 GiB")
        assert pilot.app.screen is form
        ssh.host("box", "echo 'Host key verification failed.' >&2; exit 255")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "its host key is not known" in said(form, "host-error"))
        form.query_one("#host", Input).value = "-oProxyCommand=x"
        await pilot.pause()
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "is no host" in said(form, "host-error"))


async def test_without_the_host_it_is_searched_here_again(ssh: Ssh) -> None:
    answers(ssh, configure=[Configured(TAKEN, "/home/me")])
    app = scene.app(HERE, scene.scripted(scene.found(HERE)), autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.search_screen(pilot.app)
        screen.take_over(("box", ssh.options))
        form = await form_of(pilot)
        await until(pilot, lambda: "box is asked" in said(form, "preview"))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: pilot.app.screen is screen and screen.state.config.device.host == "box")
        await pilot.press("e")
        form = await form_of(pilot)
        form.query_one("#host", Input).value = ""
        await until(pilot, lambda: "box" not in said(form, "preview"))
        assert not form.query_one("#remote_directory-field").display
        await pilot.press("ctrl+s")
        await until(pilot, lambda: pilot.app.screen is screen)
        assert screen.state.config.device.host == ""
        assert screen.state.config.device.simulated
        await pilot.press("s")
        await until(pilot, lambda: screen.state.stage is Stage.FOUND)


async def test_who_leaves_the_form_does_not_wait_for_the_host(ssh: Ssh) -> None:
    answered = ssh.folder / "answered"
    answers(ssh, f"while [ ! -e {answered} ]; do sleep 0.1; done", configure=[Configured(TAKEN, "/home/me")])
    async with scene.app(HERE, scene.missing_torch, autostart=False).run_test(size=SIZE) as pilot:
        screen = scene.search_screen(pilot.app)
        screen.take_over(("box", ssh.options))
        form = await form_of(pilot)
        await until(pilot, lambda: "box is asked" in said(form, "preview"))
        await pilot.press("ctrl+s")
        assert "connecting to box" in said(form, "preview")
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.screen is screen)
        answered.touch()
        await until(pilot, lambda: (ssh.folder / "asked").exists())
        assert screen.state.config == HERE
