"""Who is let in: by token, and only from a page of this machine."""

from __future__ import annotations

import pytest

from gpumem_tui.serve.access import Access, new_token


def test_every_server_has_another_token_which_cannot_be_guessed() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) >= 32 for token in tokens)


@pytest.mark.parametrize("given", ["", "secre", "secrets", "SECRET", "sécret", "\udcff"])
def test_what_is_not_the_token_does_not_let_in(given: str) -> None:
    assert not Access("secret").knows_token(given)


def test_the_token_lets_in() -> None:
    assert Access("secret").knows_token("secret")


@pytest.mark.parametrize("host", ["127.0.0.1:9821", "localhost:9000", "[::1]:9821", "127.0.0.1", "LOCALHOST:1"])
def test_a_page_of_this_machine_is_no_stranger_whatever_its_port(host: str) -> None:
    """Over ``ssh -L`` the port is another than the server's."""
    access = Access("secret")
    assert access.foreign(host, None) == ""
    assert access.foreign(host, f"http://{host}") == ""


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:9821", None),
        ("evil.example:9821", "http://evil.example:9821"),
        ("localhost.evil.example", None),
        ("127.0.0.1.evil.example", None),
        ("10.0.0.5:9821", None),
        ("", None),
        ("[::1", None),
        ("127.0.0.1:9821", "http://evil.example"),
        ("127.0.0.1:9821", "http://127.0.0.1:8888"),
        ("127.0.0.1:9821", "null"),
        ("127.0.0.1:9821", ""),
    ],
)
def test_a_strange_page_is_refused_in_one_line(host: str, origin: str | None) -> None:
    reason = Access("secret").foreign(host, origin)
    assert reason
    assert "\n" not in reason
