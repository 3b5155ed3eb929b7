"""`everstep doctor`, the verb."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from everstep.cli import show
from everstep.cli.options import AgentSocket, ConfigPath, CoordinatorUrl, Json, Token
from everstep.wire.exit_codes import UNAVAILABLE

if TYPE_CHECKING:
    from everstep.cli.doctor.checks import Patient


def doctor(
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    socket: AgentSocket = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Say what this machine and your rights allow, and what to do about the rest.

    Run it as the user, and with the environment, of what you want to know about: the agent, the
    coordinator or a job. Each line says what was found, what that is for and what to do. A line
    is `warn` where everstep goes on without it, `missing` where it cannot. With --json: a list of
    objects with name, state, found, purpose, advice and broken.

    Examples:
        everstep doctor
        sudo -u everstep everstep doctor --coordinator head:7070

    Exit codes:
        0   nothing that is needed is broken
        64  wrong arguments
        69  something that is needed is broken
    """
    from everstep.cli.doctor.checks import diagnose
    from everstep.cli.doctor.examination import CHECKS

    patient = _patient(coordinator, token, socket, config)
    found = list(diagnose(CHECKS, patient))
    if json:
        show.as_json([asdict(one) for one in found])
    else:
        heads = ("STATE", "WHAT", "FOUND", "FOR", "TO DO")
        show.table(
            heads,
            [(show.state(d.state), d.name, d.found, d.purpose, d.advice) for d in found],
        )
    if any(one.broken for one in found):
        raise typer.Exit(UNAVAILABLE)


def _patient(
    coordinator: str | None, token: str | None, socket: Path | None, config: Path | None
) -> Patient:
    from everstep.cli.api import DEFAULT_URL, Api
    from everstep.cli.doctor.checks import Patient
    from everstep.sdk.config import ConfigError, ConfigFile

    file: ConfigFile | ConfigError
    try:
        file = ConfigFile.load(config)
        api = Api.from_environ(coordinator, token, config=file)
    except ConfigError as exc:  # a check of its own says so; the others are still worth a look
        file = exc
        api = Api.from_environ(coordinator, token, config=ConfigFile())
    named = bool(coordinator or os.environ.get("EVERSTEP_COORDINATOR")) or api.url != DEFAULT_URL
    return Patient(os.environ, file, api, socket, os.geteuid() == 0, named)
