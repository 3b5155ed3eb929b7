"""`everstep coordinator`: the daemon that decides who trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.options import ConfigPath


def coordinator(
    *,
    config: ConfigPath = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where agents, the HTTP API and /metrics are served; port 0 takes a free one. "
            "Beyond this machine it needs a token. Default: 127.0.0.1:7070.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the journal. Default: /var/lib/everstep for root, "
            "else below $XDG_STATE_HOME.",
        ),
    ] = None,
) -> None:
    """Run the coordinator of a cluster: it decides who trains, and from which snapshot.

    It runs until SIGTERM or Ctrl-C. Killed and started again it goes on from its journal; running
    jobs do not notice. Options win over the file's table [coordinator].

    Examples:
        everstep coordinator                        for agents on this machine
        everstep coordinator --listen 0.0.0.0:7070  for a cluster; set token_file in [coordinator]

    Exit codes:
        0   stopped by SIGTERM or Ctrl-C
        64  wrong arguments or configuration
        69  it cannot run here, e.g. the port is taken or the journal is in use
    """
    from everstep.agent import logs
    from everstep.coordinator import daemon

    logs.set_up()
    daemon.run(config, listen=listen, state_dir=state_dir)
