"""Which hosts are meant: what was typed, a file, groups of the settings, the nodes of a Slurm job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumem_tui.errors import OptionError
from gpumem_tui.remote.slurm import slurm_nodes
from gpumem_tui.text import shortened

MOST_HOSTS = 1024
_RANGES = re.compile(r"\[([^\[\]]*)\]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_SPAN = re.compile(r"(\d+)(?:-|\.\.)(\d+)")
_NAME = re.compile(r"[\w.@%+:\[\]-]+")
_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:]+):(?P<port>\d+)")


@dataclass(frozen=True)
class RemoteHost:
    """A host as ssh is called for it.

    Attributes:
        name: as the user wrote it, which is how the screen calls it.
        destination: ``[user@]hostname``, or an alias of the user's ssh configuration.
        port: None for the one that ssh would take.
    """

    name: str
    destination: str
    port: int | None = None

    @property
    def by_hand(self) -> str:
        """Return what a person types to be there."""
        return f"`ssh {'' if self.port is None else f'-p {self.port} '}{self.destination}`"


def hosts_of(
    written: Iterable[str],
    *,
    file: Path | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    slurm_job: str = "",
) -> tuple[RemoteHost, ...]:
    """Return every host once, in the order in which they were named.

    Args:
        written: as on the command line: a host, a list such as ``node[01-16,20]`` or ``{a,b}.lan``, or a group's name.
        file: a host or a list a line; what follows a # is a comment.
        groups: lists of hosts by name.
        slurm_job: the nodes of this job too, asked of Slurm's own commands.

    Raises:
        OptionError: no host at all or too many, a name that is none, a file that cannot be read, Slurm answers no.
    """
    groups = groups or {}
    words = [each for word in written for each in groups.get(word, (word,))]
    words += _of_file(file) if file is not None else []
    words += slurm_nodes(slurm_job) if slurm_job else []
    names = list(dict.fromkeys(name for word in words for name in expanded(word)))
    if not names:
        raise OptionError(
            f"{file}: it names no host; write one a line" if file is not None else "no host; name one with --host HOST"
        )
    if len(names) > MOST_HOSTS:
        raise OptionError(f"{len(names)} hosts: at most {MOST_HOSTS} can be watched at once; name fewer")
    return tuple(map(parse_host, names))


def parse_host(word: str) -> RemoteHost:
    """Parse a single host: ``a``, ``user@b:2222``, ``[2001:db8::7]:22``.

    Raises:
        OptionError: it is none; ssh would take it for an option, for instance.
    """
    if word.startswith("-") or "@-" in word or not _NAME.fullmatch(word):
        raise OptionError(f"{shortened(word)!r} is no host; write HOST, USER@HOST or USER@HOST:PORT")
    user, at, rest = word.rpartition("@")
    found = _PORT.fullmatch(rest)
    host = found["host"] if found else rest
    port = int(found["port"]) if found else None
    if port is not None and not 0 < port < 65536:
        raise OptionError(f"{word!r}: write a port from 1 to 65535")
    if not host.strip("[]") or (at and not user):
        raise OptionError(f"{word!r} is no host; write HOST, USER@HOST or USER@HOST:PORT")
    return RemoteHost(word, f"{user}{at}{host.strip('[]')}", port)


def expanded(word: str) -> list[str]:
    """Expand a list of hosts as Slurm and shells write it: ``node[01-03,7]``, ``{a,b}.lan``, ``gpu{1..4}``.

    Raises:
        OptionError: a bracket without its other half, a range that runs backward or is too long.
    """
    if word.startswith("["):  # an IPv6 address
        return [word]
    found = next((match for match in (_BRACES.search(word), _RANGES.search(word)) if match), None)
    if found is None or (found[0].startswith("[") and ":" in found[1]):
        if any(mark in word for mark in "{}") or (word.count("[") != word.count("]")):
            raise OptionError(f"{word!r}: a bracket without its other half; write node[01-16] or {{a,b}}.lan")
        return [word]
    listed: list[str] = []
    for part in found[1].split(","):
        for one in _span(part.strip(), word):
            listed += expanded(f"{word[: found.start()]}{one}{word[found.end() :]}")
            if len(listed) > MOST_HOSTS:
                raise OptionError(f"{word!r}: more than {MOST_HOSTS} hosts; name fewer")
    return listed


def _span(part: str, word: str) -> list[str]:
    """Expand ``01-03`` to its numbers, as wide as the first one is written; anything else is itself."""
    if not part:
        raise OptionError(f"{word!r}: nothing between two commas or brackets; write node[01-16]")
    found = _SPAN.fullmatch(part)
    if found is None:
        return [part]
    first, last = int(found[1]), int(found[2])
    if last < first or last - first >= MOST_HOSTS:
        raise OptionError(f"{word!r}: {part} is no range of at most {MOST_HOSTS} hosts; write node[01-16]")
    return [str(number).zfill(len(found[1])) for number in range(first, last + 1)]


def _of_file(path: Path) -> list[str]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: is not UTF-8; write it as plain text, a host a line") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [word for number, line in enumerate(lines, 1) if line for word in _of_line(line, f"{path}:{number}")]


def _of_line(line: str, place: str) -> list[str]:
    """Return the hosts of one line.

    Raises:
        OptionError: it is none, or several; `place` shows where it is.
    """
    try:
        names = expanded(line)
        for name in names:
            parse_host(name)
    except OptionError as error:
        raise OptionError(f"{place}: {error}") from error
    return names
