"""Access control: requests with the token, from a page of this machine's own address.

A server on loopback is reached by every user of the machine, and by every web page that one of them opens: the page's
script may ask it directly (then ``Origin`` names the page's site), or have its own host name point to 127.0.0.1 (DNS
rebinding; then ``Host`` names that). The token keeps out the first, the two headers the others.
"""

from __future__ import annotations

import hmac
import secrets
from urllib.parse import urlsplit

from gpumem_tui.addresses import is_loopback

_TOKEN_BYTES = 24


def new_token() -> str:
    """Return a token that cannot be guessed, fit for a URL."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


class Access:
    """Tells why a request is refused.

    Args:
        token: what a visitor must know.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def foreign(self, host: str, origin: str | None) -> str:
        """Return why a request does not come from a page of this server, by its headers; empty if it does.

        The port may be any: over ``ssh -L`` it is another than the server's.

        Args:
            host, origin: the headers of that name; no origin where it is not a page that asks.
        """
        name = _name_of(f"//{host}")
        if name is None or not is_loopback(name):
            return f"the address must be one of this machine's own, such as 127.0.0.1, not {host!r}"
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return f"a page of {origin!r} asks, not one of this server"
        return ""

    def knows_token(self, given: str) -> bool:
        """Return whether `given` is the token; takes as long for any text that is not."""
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)


def _name_of(url: str) -> str | None:
    """Return the host of a URL; None if it is no URL."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
