"""Where this program was installed from, as `uvx --from` and `pipx run --spec` take it."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

ANYWHERE = "WHEEL"
"""In the place of a source that only this machine has: a folder, a file, a copy that was never installed."""


@cache
def installed_from(package: str = "gpumem-tui") -> str:
    """A requirement by which another machine can get the same; `ANYWHERE` where there is none.

    What it was installed from stands in direct_url.json, which is absent where that was an index (PEP 610, "Recording
    the Direct URL Origin of installed distributions"). Only then its name on an index is known to be its own.
    """
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ANYWHERE
    origin = found.read_text("direct_url.json")
    return f"{package}=={found.version}" if origin is None else _of_url(origin)


def _of_url(said: str) -> str:
    """The requirement that a direct_url.json means.

    >>> _of_url('{"url": "https://h/p.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}')
    'git+https://h/p.git@ab12'
    >>> _of_url('{"url": "https://h/p.whl", "archive_info": {}}'), _of_url('{"url": "file:///here", "dir_info": {}}')
    ('https://h/p.whl', 'WHEEL')
    """
    origin = json.loads(said)
    url, repository = str(origin["url"]), origin.get("vcs_info")
    if url.startswith("file:"):
        return ANYWHERE
    return url if repository is None else f"{repository['vcs']}+{url}@{repository['commit_id']}"
