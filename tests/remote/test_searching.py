"""A search on a host, seen from here: what the host prints becomes the events of a search, or one line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from gpumem_tui.errors import EXIT_FAILED, OptionError
from gpumem_tui.options.configuration import Options
from gpumem_tui.remote import searching
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.searching import RemoteSearch
from gpumem_tui.remote.ssh import LinkLost
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import Failed
from gpumem_tui.search.runner import SearchFinished, TrialFinished, TrialStarted
from gpumem_tui.search.verdict import cancelled
from gpumem_tui.search.wire import Configured, Reply, encode_reply
from tests.remote.standins import DENIED, UNKNOWN_KEY, Ssh
from tests.search.test_wire import CONFIG, DONE, VERDICT

CONFIGURED = Configured(CONFIG, "/home/me")


@pytest.fixture
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ssh]:
    yield Ssh(tmp_path_factory.mktemp("ssh"))
    while MADE:
        MADE.pop().end()


MADE: list[RemoteSearch] = []
"""Ended with the test."""


def there(ssh: Ssh, directory: str = "") -> RemoteSearch:
    MADE.append(RemoteSearch(parse_host("box"), ssh.options, directory, Options(gpu="sim:a100-80gb")))
    return MADE[-1]


def answers(ssh: Ssh, before: str = ":", **replies: list[Reply]) -> None:
    """A host that prints these replies when it is asked to, and notes what it was asked."""
    cases = []
    for action, listed in replies.items():
        file = ssh.folder / action
        file.write_bytes(b"".join(map(encode_reply, listed)))
        cases.append(f'*\'"action": "{action}"\'*) cat {shlex.quote(str(file))};;')
    asked = shlex.quote(str(ssh.folder / "asked"))
    loop = ['while read -r line; do printf "%s\\n" "$line" >> ' + asked, 'case "$line" in', *cases, "esac", "done"]
    ssh.host("box", before, *loop)


def asked_of(ssh: Ssh) -> str:
    return (ssh.folder / "asked").read_text()


def test_the_events_are_those_of_the_search_there(ssh: Ssh) -> None:
    events: list[Reply] = [TrialStarted(1, 4), TrialFinished(1, DONE), SearchFinished(VERDICT)]
    answers(ssh, "echo Welcome; echo '{not json'", configure=[CONFIGURED], search=events)
    remote = there(ssh, "runs/a b")
    found = remote.configure()
    assert found.config.device.host == "box"
    assert found.config.workload == CONFIG.workload
    assert list(remote.search(found.config)) == events
    assert list(remote.search(found.config)) == events, "again, by the same connection"
    remote.end()
    assert len(ssh.called) == 1
    assert searching.COMMAND in ssh.called[0]
    assert '"directory": "runs/a b"' in asked_of(ssh)
    assert '"gpu": "sim:a100-80gb"' in asked_of(ssh)


def test_after_a_lost_connection_the_next_search_connects_again(ssh: Ssh) -> None:
    answers(ssh, configure=[CONFIGURED], search=[SearchFinished(VERDICT)])
    remote = there(ssh)
    config = remote.configure().config
    remote.end()
    assert list(remote.search(config)) == [SearchFinished(VERDICT)]
    remote.end()
    assert len(ssh.called) == 2


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"echo '{UNKNOWN_KEY}' >&2; exit 255", "its host key is not known: `ssh box` once"),
        (f"echo '{DENIED}' >&2; exit 255", "no key is accepted, and a password cannot be asked for"),
        ("echo 'sh: 1: gpumem-tui: not found' >&2; exit 127", "gpumem-tui is not in its PATH"),
        ("echo 'gpumem-tui: No such command' >&2; exit 2", "its gpumem-tui is of another version"),
        ("exec yes garbage", "prints “garbage”, which is no answer"),
    ],
)
def test_one_line_says_why_there_is_no_search(ssh: Ssh, script: str, said: str) -> None:
    ssh.host("box", script)
    with pytest.raises(LinkLost) as caught:
        there(ssh).configure()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_any_answer_it_gives_up(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_FIRST_ANSWER_S", 0.5)
    ssh.host("box", "cat > /dev/null")
    with pytest.raises(LinkLost, match="no answer within"):
        there(ssh).configure()


def test_options_that_are_wrong_there_are_named_with_the_host(ssh: Ssh) -> None:
    from gpumem_tui.search.wire import NotSearchable

    answers(ssh, configure=[NotSearchable("--gpu 7: there is no such GPU")])
    with pytest.raises(OptionError, match="box: --gpu 7: there is no such GPU"):
        there(ssh).configure()


def test_what_fails_there_fails_here_with_the_words_of_the_host(ssh: Ssh) -> None:
    answers(ssh, configure=[CONFIGURED], search=[Failed("torch", "python has no torch")])
    remote = there(ssh)
    with pytest.raises(Unusable, match="box: python has no torch") as caught:
        list(remote.search(remote.configure().config))
    assert caught.value.kind == "torch"


def test_a_connection_lost_in_mid_search_is_a_verdict_with_what_ran(ssh: Ssh) -> None:
    answers(ssh, configure=[CONFIGURED], search=[TrialFinished(1, DONE)])
    script = (ssh.folder / "box").read_text()
    (ssh.folder / "box").write_text(script.replace("search;;", "search; echo 'Connection reset' >&2; exit 255;;"))
    remote = there(ssh)
    *_, last = remote.search(remote.configure().config)
    assert isinstance(last, SearchFinished)
    assert last.verdict.exit_code == EXIT_FAILED
    assert last.verdict.max_batch_size == DONE.batch_size
    assert last.verdict.message.startswith("box: Connection reset")


def test_a_connection_lost_before_the_first_trial_is_one_line(ssh: Ssh) -> None:
    answers(ssh, configure=[CONFIGURED], search=[TrialStarted(1, 4)])
    script = (ssh.folder / "box").read_text()
    (ssh.folder / "box").write_text(script.replace("search;;", "search; exit 255;;"))
    remote = there(ssh)
    with pytest.raises(Unusable, match="box: ssh failed and printed no reason") as caught:
        list(remote.search(remote.configure().config))
    assert caught.value.exit_code == EXIT_FAILED


def test_keys_act_there(ssh: Ssh) -> None:
    over = SearchFinished(cancelled([]))
    answers(ssh, configure=[CONFIGURED], search=[TrialStarted(1, 4)], pause=[TrialStarted(2, 8)], cancel=[over])
    remote, control = there(ssh), Control()
    events = remote.search(remote.configure().config, control)
    assert next(events) == TrialStarted(1, 4)
    control.pause()
    assert next(events) == TrialStarted(2, 8), "only `pause` makes the host say so"
    control.resume()
    control.cancel()
    assert list(events) == [over]
    actions = [line.split('"')[3] for line in asked_of(ssh).splitlines()]
    assert actions == ["configure", "search", "pause", "resume", "cancel"]


def test_a_host_that_does_not_hear_of_the_end_is_left(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_CANCEL_S", 0.2)
    answers(ssh, configure=[CONFIGURED], search=[TrialStarted(1, 4)])
    remote, control = there(ssh), Control()
    events = remote.search(remote.configure().config, control)
    next(events)
    control.cancel()
    (last,) = events
    assert isinstance(last, SearchFinished)
    assert last.verdict.outcome == "cancelled"
