"""One small file by HTTP, within a time that holds for all of it. Standard library only."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from gpumem_tui.text import printable


@dataclass
class Fetched:
    """The answer of a server.

    Attributes:
        body: of the file; empty where it was not sent.
        status: of HTTP; 0 for no answer.
        reason: why it was not sent; empty where it was.
        headers: by name in small letters, those of redirections on the way too; the first of a name counts.
    """

    body: bytes = b""
    status: int = 0
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def take(self, headers: Message) -> None:
        """Take headers over."""
        for name, value in headers.items():
            self.headers.setdefault(name.lower(), printable(value))


def fetch(address: str, token: str, *, within_s: float, most_bytes: int) -> Fetched:
    """Return what an address answers.

    Finding the address of a host knows no time-out, so all of it is done in a thread that nobody waits for any longer.

    Args:
        token: of the user; empty for none. Hosts that are redirected to do not get it.
        within_s: so long is waited for.
        most_bytes: that are read.
    """
    found, done = Fetched(), threading.Event()

    def ask() -> None:
        try:
            _ask(address, token, found, within_s, most_bytes)
        except HTTPError as error:
            found.take(error.headers)
            found.status, found.reason = error.code, printable(str(error.reason))
        except (OSError, HTTPException, ValueError) as error:
            why = error.reason if isinstance(error, URLError) else error
            found.reason = printable(getattr(why, "strerror", None) or str(why) or type(why).__name__)
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    if not done.wait(within_s):
        return Fetched(reason=f"no answer within {within_s:g} s")
    return found


def _ask(address: str, token: str, found: Fetched, within_s: float, most_bytes: int) -> None:
    if urlsplit(address).scheme not in ("http", "https"):
        raise ValueError("HF_ENDPOINT is no address of the web, such as https://huggingface.co")
    request = Request(  # noqa: S310 - its scheme is looked at
        address, headers={"User-Agent": "gpumem-tui", "Accept": "application/json"}
    )
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with build_opener(_Redirections(found)).open(request, timeout=within_s) as response:
        found.take(response.headers)
        found.status, body = response.status, response.read(most_bytes + 1)
    if len(body) > most_bytes:
        found.reason = f"has more than {most_bytes >> 20} MiB"
    else:
        found.body = body


class _Redirections(HTTPRedirectHandler):
    """Follows them, and takes over what they say."""

    def __init__(self, found: Fetched) -> None:
        self._found = found

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """Return the request of where the answer is."""
        self._found.take(headers)
        target = urljoin(req.full_url, newurl)
        request = super().redirect_request(req, fp, code, msg, headers, target)
        if request is not None and urlsplit(target)[:2] != urlsplit(req.full_url)[:2]:
            request.remove_header("Authorization")
        return request

    http_error_308 = HTTPRedirectHandler.http_error_302
    """Older Pythons than 3.11 do not follow it."""
