"""`--metrics`: where they are served, for one machine and for several."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from gpumem_tui.cli.common import complain

if TYPE_CHECKING:
    from gpumem_tui.monitor.metrics import Machines

DEFAULT_METRICS = "127.0.0.1:9820"


class Address(click.ParamType[tuple[str, int]]):
    """HOST:PORT, or PORT alone for this machine only; an IPv6 host stands in brackets."""

    name = "address"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, _, port = value.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            self.fail(f"{value!r} is not HOST:PORT such as {DEFAULT_METRICS}", param, ctx)
        return host.strip("[]") or "127.0.0.1", int(port)


metrics_option = click.option(
    "--metrics", "address", type=Address(), is_flag=False, flag_value=DEFAULT_METRICS, metavar="[HOST:PORT]",
    help=f"Also serve Prometheus metrics (on {DEFAULT_METRICS} unless told otherwise).",
)  # fmt: skip


def serve_metrics(stack: ExitStack, machines: Machines, host: str, port: int) -> str:
    """Serve metrics until the stack is left. Returns where, for the screen to say."""
    from gpumem_tui.addresses import is_loopback
    from gpumem_tui.monitor.metrics import CannotServe, Server

    try:
        server = Server(machines, host, port)
    except CannotServe as error:
        raise click.UsageError(f"--metrics: {error}") from error
    stack.callback(server.stop)
    if not is_loopback(host):
        complain(f"--metrics: everyone who can reach {server.address} can read users and process names", 0)
    return f"metrics on {server.address}"
