"""Which hosts are meant by what was typed, by a file, by the settings, by a Slurm job."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_tui.errors import OptionError
from gpumem_tui.remote.hosts import RemoteHost, expanded, hosts_of, parse_host
from gpumem_tui.remote.ssh import SshOptions


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("a", RemoteHost("a", "a")),
        ("user@b:2222", RemoteHost("user@b:2222", "user@b", 2222)),
        ("gpu-1.lan:22", RemoteHost("gpu-1.lan:22", "gpu-1.lan", 22)),
        ("[2001:db8::7]:2200", RemoteHost("[2001:db8::7]:2200", "2001:db8::7", 2200)),
        ("me@[2001:db8::7]", RemoteHost("me@[2001:db8::7]", "me@2001:db8::7")),
    ],
)
def test_a_host(word: str, host: RemoteHost) -> None:
    assert parse_host(word) == host


@pytest.mark.parametrize("word", ["-oProxyCommand=x", "me@-x", "a b", "a;b", "", "@b", "a:0", "a:99999", "$(x)"])
def test_what_ssh_or_a_shell_would_take_for_something_else_is_no_host(word: str) -> None:
    with pytest.raises(OptionError):
        parse_host(word)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("node[01-03,10]", ["node01", "node02", "node03", "node10"]),
        ("{a,b}.lan", ["a.lan", "b.lan"]),
        ("gpu{1..3}", ["gpu1", "gpu2", "gpu3"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("me@node[1-2]:2222", ["me@node1:2222", "me@node2:2222"]),
        ("[2001:db8::7]:22", ["[2001:db8::7]:22"]),
    ],
)
def test_lists_are_written_as_in_slurm_and_in_shells(word: str, names: list[str]) -> None:
    assert expanded(word) == names


@pytest.mark.parametrize("word", ["node[3-1]", "node[1-99999]", "node[1", "node]", "{a,b", "n[1,,2]", "a[1-900]b[1-9]"])
def test_a_list_that_is_none_is_named(word: str) -> None:
    with pytest.raises(OptionError) as caught:
        expanded(word)
    assert word in str(caught.value)


def test_file_and_groups_each_host_once(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode[1-2]\n\nb  # twice\nme@c:2222\n")
    hosts = hosts_of(["a", "lab"], file=file, groups={"lab": ["b", "node2"]})
    assert [host.name for host in hosts] == ["a", "b", "node2", "node1", "me@c:2222"]


@pytest.mark.parametrize("line", ["bad host name", "a, b", "-oProxyCommand=x", "node[3-1]"])
def test_a_line_that_is_no_host_is_named_with_its_place(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"# mine\na\n{line}\n")
    with pytest.raises(OptionError) as caught:
        hosts_of([], file=file)
    assert str(caught.value).startswith(f"{file}:3: ")


def test_no_host_at_all_and_no_file(tmp_path: Path) -> None:
    empty = tmp_path / "hosts"
    empty.write_text("# nobody\n")
    with pytest.raises(OptionError, match="it names no host"):
        hosts_of([], file=empty)
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        hosts_of([], file=tmp_path / "none")


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, scontrol: str = "exit 1") -> None:
    for name, script in (("squeue", squeue), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_nodes_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expand = 'test "$1 $2 $3" = "show hostnames node[01-02]" && printf "node01\\nnode02\\n"'
    slurm(tmp_path, monkeypatch, 'case "$*" in *--jobs=4711*) echo "node[01-02]";; esac', expand)
    assert [host.name for host in hosts_of([], slurm_job="4711")] == ["node01", "node02"]
    with pytest.raises(OptionError, match="has no node"):
        hosts_of([], slurm_job="4712")


def test_what_slurm_says_against_a_job_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(tmp_path, monkeypatch, 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    with pytest.raises(OptionError, match="Invalid job id specified"):
        hosts_of([], slurm_job="4711")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(OptionError, match="no `squeue` in PATH"):
        hosts_of([], slurm_job="4711")
    with pytest.raises(OptionError, match="is no Slurm job"):
        hosts_of([], slurm_job="--help")


def test_ssh_asks_nothing_and_the_host_is_no_option() -> None:
    command = SshOptions("~/bin/gpumem-tui", 2.5).command(parse_host("me@b:2222"))
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[command.index("-p") + 1] == "2222"
    assert command[-3:] == ["--", "me@b", "~/bin/gpumem-tui monitor --wire --interval 2.5"]
