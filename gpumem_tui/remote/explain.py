"""Why a connection ended, in one line: from ssh's exit status and words (OpenSSH's ssh(1), ssh.c, sshconnect*.c)."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.source import ANYWHERE, installed_from
from gpumem_tui.remote.ssh import OFFERS, PROGRAM, SshOptions
from gpumem_tui.text import shortened

_SSH_FAILED = 255
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_NOISE = ("Warning: Permanently added", "hint: ", "Connection to ", "Killed by signal", "debug1:", "Pseudo-terminal")


def explained(code: int | None, errors: Sequence[str], host: RemoteHost, options: SshOptions) -> tuple[str, bool]:
    """One line with the remedy where there is one, and whether a person has to see to it.

    Args:
        code: of the ssh process; negative for a signal; None where it had not ended.
        errors: the last lines that it wrote.
    """
    said = "\n".join(errors)
    by_hand = f"`ssh {'' if host.port is None else f'-p {host.port} '}{host.destination}`"
    if code == _SSH_FAILED:
        if "IDENTIFICATION HAS CHANGED" in said:
            return f"its host key has changed: {by_hand} shows it; remove the old one if that is right", True
        if "Host key verification failed" in said:
            return f"its host key is not known: {by_hand} once shows it and asks", True
        if "Permission denied (" in said:
            return f"no key is accepted, and a password cannot be asked for: see that {by_hand} asks for none", True
    last = next((line for line in reversed(errors) if not line.startswith(_NOISE)), "")
    command = shortened(options.called, 30)
    if code == _NOT_FOUND:
        return _not_found(command, last, options), True
    if code == _NOT_EXECUTABLE:
        return f"{command} cannot be executed there: {last}", True
    if code == _SSH_FAILED:
        return shortened(last.removeprefix("ssh: "), 160) or "ssh failed and printed no reason", False
    if code is None or code < 0:
        return "ssh was ended" if code else "the connection was closed", False
    if "No such option" in said or "No such command" in said or "invalid choice" in said:
        return f"its gpumem-tui is of another version: {shortened(last, 120)}", True
    return shortened(last.removeprefix("gpumem-tui: "), 160) or f"{command} ended with code {code}", False


def _not_found(command: str, last: str, options: SshOptions) -> str:
    if options.remote_command:
        return f"{command} is not in its PATH: install it there, or say where with --remote-command"
    if last.startswith(OFFERS):
        runner = shortened(last.removeprefix(OFFERS), 30)
        run = f"{runner} run --spec" if runner.endswith("pipx") else f"{runner} --from"
        source = installed_from()
        where = f", {ANYWHERE} being its wheel there" if source == ANYWHERE else " has it fetched"
        return f"has no {PROGRAM}, but {runner}: --remote-command '{run} {source} {PROGRAM}'{where}"
    return f"{command} is not in its PATH nor in ~/.local/bin: install it there, or say where with --remote-command"
