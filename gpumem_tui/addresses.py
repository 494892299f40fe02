"""Network addresses: which only this machine can reach, and how one is written in a URL."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_address(host: str) -> bool:
    """Return whether a host is an address, not a name."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def in_url(host: str, port: int) -> str:
    """Return HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
