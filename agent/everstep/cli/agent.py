"""`everstep agent`: the daemon of one node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.agent import daemon
from everstep.agent.config import DEFAULT_LISTEN, Overrides


def agent(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file (TOML). Default: /etc/everstep/everstep.toml if it exists.",
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="This node's name, unique in the cluster. Default: hostname.")
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(
            help="Unix socket for the node's jobs. Default: /run/everstep/agent.sock for root, "
            "else below $XDG_RUNTIME_DIR.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Where /metrics and /healthz are served; port 0 takes a free one. "
            f"Default: {DEFAULT_LISTEN}.",
        ),
    ] = None,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the coordinator listens; repeat it for several."
        ),
    ] = None,
    with_coordinator: Annotated[
        bool,
        typer.Option(
            "--with-coordinator",
            help="Run a coordinator in this process too: all that a single machine needs.",
        ),
    ] = False,
) -> None:
    """Run the agent of this node: it watches ranks and hardware and serves the node's jobs.

    It runs until SIGTERM or Ctrl-C. It needs no coordinator to start: it looks for one for as long
    as it takes. Options win over the file's table [agent].

    Exit codes: 0 stopped; 64 wrong arguments or configuration; 69 it cannot run here (socket or
    port taken).
    """
    if with_coordinator and coordinator:
        raise typer.BadParameter(
            "--with-coordinator is its own coordinator: leave --coordinator out"
        )
    overrides = Overrides(node, socket, listen, tuple(coordinator or ()))
    beside = None
    if with_coordinator:
        # Only here: an agent of a cluster never loads the journal's database library.
        from everstep.coordinator.daemon import serve

        beside = serve
    daemon.run(config, overrides, beside=beside)
