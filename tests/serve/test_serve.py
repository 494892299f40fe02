"""`gpumem-tui serve` over real HTTP and websockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from gpumem_tui.serve.visitor import command
from tests.remote.standins import Ssh, reading
from tests.serve.serving import Served, serving, visiting
from tests.waiting import wait_until, wait_until_gone

NOT_TOKENS = ("", "?token=", "?token=wrong", "?token=%ff")


async def _status(url: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def _refused(url: str, **headers: str) -> int:
    """The status that a websocket is refused with."""
    async with aiohttp.ClientSession(headers=headers) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as error:
            await session.ws_connect(url)
    return error.value.status


def _pids(served: Served) -> list[int]:
    return [child.pid for child in served.children()]


def _interrupted(served: Served, number: signal.Signals = signal.SIGINT) -> int:
    served.process.send_signal(number)
    return served.process.wait(60)


async def test_only_the_token_opens_page_and_terminal(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        for wrong in NOT_TOKENS:
            status, text = await _status(f"{served.base}/{wrong}")
            assert (status, "token" in text, "textual-terminal" in text) == (403, True, False)
        for wrong in ("wrong", served.token[:-1], f"{served.token}x"):
            assert await _refused(f"{served.base}/ws/{wrong}?width=80&height=24") == 403
        assert _pids(served) == [], "nobody who is refused is given a process"
        status, page = await _status(served.url)
        assert (status, "textual-terminal" in page) == (200, True)
        for file in ("/static/js/textual.js", "/static/css/xterm.css", "/page.js"):
            assert (await _status(served.base + file))[0] == 200
        assert (await _status(f"{served.base}/static/"))[0] == 403, "no listing"


async def test_pages_of_other_sites_are_refused_even_with_the_token(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        assert (await _status(served.url, Host="evil.example"))[0] == 403, "DNS rebinding"
        assert (await _status(served.url, Origin="http://evil.example"))[0] == 403
        assert await _refused(served.websocket, Origin="http://evil.example") == 403
        assert await _refused(served.websocket, Host="evil.example") == 403
        async with visiting(served, Origin=served.base) as visitor:
            await visitor.see("A100")


async def test_the_page_asks_no_other_server_and_is_kept_nowhere(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        async with aiohttp.ClientSession() as session, session.get(served.url) as answer:
            page, headers = await answer.text(), answer.headers
        assert "https://" not in page
        assert [part for part in page.split('"') if part.startswith(("http:", "//"))] == []
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "default-src 'none'" in headers["Content-Security-Policy"]


async def test_a_visitor_sees_the_monitor_and_may_only_look(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        async with visiting(served) as visitor:
            text = await visitor.see("A100", "20.00", "python")
            assert "read-only" in text
            await visitor.press("\x1b[B")
            text = await visitor.see("enter details")
            assert "kill" not in text
            assert "attach" not in text
            await visitor.press("K2")
            text = await visitor.see("read-only: no search is started")
            assert "esc leaves" not in text, "the K has opened no question"
        assert _interrupted(served) == 0


async def test_allow_actions_permits_them(environment: dict[str, str]) -> None:
    with serving(environment, "--allow-actions") as served:
        async with visiting(served) as visitor:
            text = await visitor.see("A100", "20.00")
            assert "read-only" not in text
            await visitor.press("\x1b[B")
            await visitor.see("K kill")


async def test_who_leaves_ends_his_process_and_what_it_has_started(environment: dict[str, str]) -> None:
    with serving(environment, "--allow-actions") as served:
        async with visiting(served) as visitor:
            await visitor.see("A100")
            await visitor.press("2")
            await visitor.see("s start")
            await visitor.press("s")
            await asyncio.to_thread(wait_until, lambda: len(_pids(served)) > 1, "a process of the search")
            pids = _pids(served)
        await asyncio.to_thread(wait_until_gone, pids)
        assert served.process.poll() is None


async def test_one_more_visitor_than_may_come_gets_a_page_that_says_so(environment: dict[str, str]) -> None:
    with serving(environment, "--visitors", "2") as served:
        async with visiting(served) as first, visiting(served) as second:
            await first.see("A100")
            await second.see("A100")
            status, text = await _status(served.url)
            assert (status, "--visitors 2" in text, "textual-terminal" in text) == (503, True, False)
            assert 'http-equiv="refresh"' in text, "it tries again by itself"
            assert await _refused(served.websocket) == 503
            assert len(_pids(served)) == 2
            await first.leave()
            await asyncio.to_thread(served.wait_for_visitors, 1)
            while (await _status(served.url))[0] == 503:
                await asyncio.sleep(0.05)
            async with visiting(served) as third:
                await third.see("A100")


async def test_q_ends_the_visit(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        async with visiting(served) as visitor:
            await visitor.see("A100")
            await visitor.press("q")
            await visitor.until_closed()
        await asyncio.to_thread(served.wait_for_visitors, 0)


async def test_ctrl_c_in_a_page_copies_the_screen_and_ends_nothing(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        async with visiting(served) as visitor:
            await visitor.see("A100", "20.00")
            await visitor.press("\x03")
            await visitor.see("the screen is copied, as text", "shift, drag over it")
            assert "A100" in visitor.copied
            assert "\x1b" not in visitor.copied
            assert all(line == line.rstrip() for line in visitor.copied.split("\n"))
            await visitor.press("\x03?")
            await visitor.see("esc closes")
            await visitor.press("\x1b[F")
            await visitor.see("copy the screen as text")
            await visitor.press("\x1b")
            await visitor.see_that(lambda text: "esc closes" not in text, "the end of the help")
            await visitor.press("q")
            await visitor.until_closed()


async def test_hosts_in_a_browser(environment: dict[str, str], tmp_path: Path) -> None:
    ssh = Ssh(tmp_path)
    for name, gpus in (("box", 1), ("node01", 2), ("node02", 2)):
        ssh.prints(name, [reading(gpus)])
    config = tmp_path / "config" / "gpumem-tui"
    config.mkdir()
    (config / "settings.toml").write_text('[hosts]\nlab = ["node[01-02]"]\n[notify]\ncommand = "touch told"\n')
    there = {**environment, "PATH": f"{tmp_path}:{environment['PATH']}"}
    with serving(there, "--host", "lab", "--host", "box") as served:
        assert served.process.stdout is not None
        assert served.process.stdout.readline().startswith("3 hosts; read-only")
        async with visiting(served) as visitor:
            text = await visitor.see("3 hosts · 3 live", "node01", "node02", "box")
            assert "e search" not in text, "read-only"
            await visitor.press("\r")
            await visitor.see("esc hosts", "A100")
        assert _interrupted(served) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "lab[1"], "lab[1"),
        (["--hosts", "/nowhere"], "/nowhere"),
        (["--interval", "1"], "--interval is for other hosts: name them with --host, --hosts or --slurm"),
    ],
)
def test_what_is_wrong_with_hosts_is_said_at_once(environment: dict[str, str], options: list[str], said: str) -> None:
    with pytest.raises(AssertionError) as error, serving(environment, *options):
        """It does not get as far."""
    assert said in str(error.value)


async def test_whatever_a_visitor_says_others_go_on(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        async with visiting(served) as other:
            await other.see("A100")
            for said in ("no json", "[]", "7", '["resize", {"width": "a", "height": -3}]', '["stdin", {}]', '["?"]'):
                async with visiting(served) as strange:
                    await strange.send(said)
            await other.press("?")
            await other.see("esc closes")


async def test_who_says_nothing_shuts_nobody_out(environment: dict[str, str]) -> None:
    with serving(environment) as served, contextlib.ExitStack() as stack:
        port = int(served.base.rpartition(":")[2])
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(300)]
        async with visiting(served) as visitor:
            await visitor.see("A100")
            for one in silent[:100]:
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(one.recv, 1) == b""
        assert (await _status(served.url))[0] == 200
        assert _interrupted(served) == 0
        assert served.process.stdout is not None
        assert "Traceback" not in served.process.stdout.read()


async def test_who_reads_no_answer_shuts_nobody_out_and_leaves_nothing(environment: dict[str, str]) -> None:
    with serving(environment, "--visitors", "1") as served:
        server = psutil.Process(served.process.pid)
        before = server.num_fds()
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                deaf = stack.enter_context(socket.socket())
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                deaf.connect(("127.0.0.1", int(served.base.rpartition(":")[2])))
                deaf.sendall(b"GET /static/js/textual.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20)
            async with visiting(served) as visitor:
                await visitor.see("A100")
        await asyncio.to_thread(wait_until, lambda: server.num_fds() <= before, "the end of all connections")
        assert _interrupted(served) == 0
        assert served.process.stdout is not None
        assert "Exception" not in served.process.stdout.read()


@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits are set by Linux alone")
async def test_too_few_descriptors_are_a_line_a_minute(environment: dict[str, str]) -> None:
    with serving(environment) as served, contextlib.ExitStack() as stack:
        psutil.Process(served.process.pid).rlimit(psutil.RLIMIT_NOFILE, (32, 32))
        port = int(served.base.rpartition(":")[2])
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert served.process.stdout is not None
        lines = iter(served.process.stdout.readline, "")
        said = next(line for line in lines if "Too many open files" in line)
        assert said.startswith("gpumem-tui serve: socket.accept() out of system resource: OSError: [Errno 24]")
        assert _interrupted(served) == 0
        assert not [line for line in lines if "Traceback" in line or "Too many" in line]


async def test_an_empty_host_is_a_bad_request(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.base.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost:\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_end_of_the_server_is_everybodys(environment: dict[str, str], number: signal.Signals) -> None:
    with serving(environment) as served:
        async with visiting(served) as first, visiting(served) as second:
            await first.see("A100")
            await second.see("A100")
            pids = _pids(served)
            assert len(pids) == 2
            assert await asyncio.to_thread(_interrupted, served, number) == 0
            wait_until_gone(pids)
        assert served.process.stdout is not None
        assert "Traceback" not in served.process.stdout.read()


async def test_a_server_that_is_killed_leaves_no_process(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        async with visiting(served) as visitor:
            await visitor.see("A100")
            pids = _pids(served)
            served.process.kill()
            await asyncio.to_thread(wait_until_gone, pids)


async def test_over_ssh_it_says_how_to_come_from_there(environment: dict[str, str]) -> None:
    over_ssh = {**environment, "SSH_CONNECTION": "192.0.2.7 50000 192.0.2.8 2222", "LOGNAME": "ada"}
    with serving(over_ssh) as served:
        port = served.base.rpartition(":")[2]
        assert served.process.stdout is not None
        said = [served.process.stdout.readline() for _ in range(3)]
        assert said[-1].strip() == f"ssh -N -L 127.0.0.1:{port}:127.0.0.1:{port} -p 2222 ada@192.0.2.8"


def test_a_port_that_is_taken_is_one_line(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        port = served.base.rpartition(":")[2]
        with pytest.raises(AssertionError) as error, serving(environment, "--port", port):
            """It does not get as far."""
    assert "--port 0 takes one that is free" in str(error.value)


def test_the_process_of_a_visitor_without_a_server_ends_at_once(environment: dict[str, str]) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command(None, read_only=True), stdin=pipe, stdout=pipe, env={**os.environ, **environment}
    )
    process.communicate(timeout=60)
    assert process.returncode == 0
