"""`everstep cordon`, `uncordon`, `evict`, `readmit`: what a person may ask of a node."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli import show
from everstep.cli.asked import Asked, me
from everstep.cli.nodes import state
from everstep.cli.options import ConfigPath, CoordinatorUrl, Json, Reason, Token

Node = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]


def cordon(
    node: Node,
    *,
    reason: Reason,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Let a node take no new part in any job; what runs there goes on.

    With --json: the answer to POST /v1/nodes/NODE/cordon.

    Example:
        everstep cordon node7 --reason "memory test on Monday"

    Exit codes:
        0   done, and journaled
        64  no such node, or it is cordoned already; wrong arguments, token or configuration
        69  no coordinator answers
    """
    _ask("cordon", node, reason, Asked(coordinator, token, config, json))


def uncordon(
    node: Node,
    *,
    reason: Reason,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Let a cordoned node take part again.

    With --json: the answer to POST /v1/nodes/NODE/uncordon.

    Example:
        everstep uncordon node7 --reason "memory test passed"

    Exit codes:
        0   done, and journaled
        64  no such node, or it is not cordoned; wrong arguments, token or configuration
        69  no coordinator answers
    """
    _ask("uncordon", node, reason, Asked(coordinator, token, config, json))


def evict(
    node: Node,
    *,
    reason: Reason,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Put a node out of its jobs now and keep it out until it is readmitted.

    Jobs that it trains in go on with a spare from their newest snapshot, or without it. With
    --json: the answer to POST /v1/nodes/NODE/evict.

    Example:
        everstep evict node7 --reason "fan 3 is dead, it will be pulled at noon"

    Exit codes:
        0   done, and journaled
        64  no such node, or it is evicted already; wrong arguments, token or configuration
        69  no coordinator answers
    """
    _ask("evict", node, reason, Asked(coordinator, token, config, json))


def readmit(
    node: Node,
    *,
    reason: Reason,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Test a node that was evicted or is broken; healthy it takes part again.

    With --json: the answer to POST /v1/nodes/NODE/readmit.

    Example:
        everstep readmit node7 --reason "fan replaced"

    Exit codes:
        0   under test now; `everstep nodes show NODE` tells how it went
        64  no such node, or nobody shut it out; wrong arguments, token or configuration
        69  no coordinator answers
    """
    _ask("readmit", node, reason, Asked(coordinator, token, config, json))


def _ask(verb: str, name: str, reason: str, asked: Asked) -> None:
    from everstep.cli.api import segment

    answer = asked.api().post(f"nodes/{segment(name)}/{verb}", reason=reason, by=me())
    if asked.json:
        show.as_json(answer)
    else:
        show.say(f"{name}: {state(answer['node']).text}")
