"""`everstep agent`: the daemon of one node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.options import ConfigPath


def agent(
    *,
    config: ConfigPath = None,
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
            help="Where /metrics and /healthz are served; port 0 takes a free one. "
            "Default: 127.0.0.1:9464.",
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

    Examples:
        everstep agent --with-coordinator         all that a single machine needs
        everstep agent --coordinator head:7070    a node of a cluster

    Exit codes:
        0   stopped by SIGTERM or Ctrl-C
        64  wrong arguments or configuration
        69  it cannot run here, e.g. socket or port taken
    """
    from everstep.agent import daemon
    from everstep.agent.config import Overrides

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
