"""The options that verbs share, each worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CoordinatorUrl = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="URL",
        help="The coordinator's address. Default: $EVERSTEP_COORDINATOR, else what the "
        "configuration says, else http://127.0.0.1:7070.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        help="The coordinator's token. Default: $EVERSTEP_TOKEN, else the configuration's.",
    ),
]
ConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Configuration file (TOML). Default: /etc/everstep/everstep.toml if it exists.",
    ),
]
AgentSocket = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="The local agent's socket. Default: $EVERSTEP_SOCKET, else "
        "/run/everstep/agent.sock, else below $XDG_RUNTIME_DIR.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Reason = Annotated[
    str,
    typer.Option(metavar="TEXT", help="Why; it is journaled and shown with the incident."),
]
