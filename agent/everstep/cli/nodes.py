"""`everstep nodes`: all nodes, or all about one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everstep.cli import show
from everstep.cli.asked import Asked
from everstep.cli.options import ConfigPath, CoordinatorUrl, Json, Token
from everstep.cli.verbs import application

nodes = application(invoke_without_command=True)


@nodes.callback()
def _list(
    context: typer.Context,
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """List all nodes that the coordinator ever heard of.

    A node is healthy, cordoned (takes no new part), silent (not heard, which alone proves
    nothing), away (its agent's connection is closed), evicted, testing (on its way back) or
    broken (failed its tests). With --json: the answer to GET /v1/nodes.

    Examples:
        everstep nodes
        everstep nodes --json | jq -r '.nodes[] | select(.state == "evicted").name'
        everstep nodes show node7

    Exit codes:
        0   answered
        64  wrong arguments, token or configuration
        69  no coordinator answers
    """
    asked = Asked(coordinator, token, config, json)
    context.obj = asked
    if context.invoked_subcommand is not None:
        return
    answer = asked.api().get("nodes")
    if json:
        show.as_json(answer)
    else:
        show.table(HEADS, [row(node) for node in answer["nodes"]])


@nodes.command("show")
def _show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The node's name.")],
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Show all about one node: state and why, evidence, findings, clock.

    With --json: the answer to GET /v1/nodes/NAME.

    Example:
        everstep nodes show node7

    Exit codes:
        0   answered
        64  no such node; wrong arguments, token or configuration
        69  no coordinator answers
    """
    from everstep.cli.api import segment

    asked = Asked(coordinator, token, config, json).within(context)
    node = asked.api().get(f"nodes/{segment(name)}")
    if asked.json:
        show.as_json(node)
    else:
        _describe(node)


_DECIDED = ("evicted", "testing", "broken")
HEADS = ("NAME", "STATE", "HEARD", "ADDRESS", "VERSION", "JOBS", "FINDINGS", "WHY")


def row(node: dict[str, Any]) -> list[show.Cell]:
    """Return a node as a line of a table."""
    return [
        node["name"],
        state(node),
        _heard(node),
        node["address"],
        node["version"],
        ", ".join(node["jobs"]) or "-",
        str(len(node["findings"])),
        why(node),
    ]


def state(node: dict[str, Any]) -> show.Styled:
    """Return a node's state; a cordon that another state hides is told too."""
    hidden = node["cordoned"] and node["state"] != "cordoned"
    shown = show.state(node["state"])
    return show.Styled(f"{shown.text}, cordoned", shown.style) if hidden else shown


def why(node: dict[str, Any]) -> str:
    """Return the reason for a state that was decided; that of a cordon is in the journal."""
    return f"{node['why']} ({node['by']})" if node["state"] in _DECIDED else ""


def _heard(node: dict[str, Any]) -> str:
    ago_s = node["heard_s_ago"]
    return "never" if ago_s is None else f"{show.duration(ago_s)} ago"


def _describe(node: dict[str, Any]) -> None:
    show.pairs(
        [
            ("node", node["name"]),
            ("state", state(node)),
            ("why", why(node)),
            ("since", show.moment(node["since_s"]) if node["since_s"] else ""),
            ("heard", _heard(node)),
            ("address", node["address"]),
            ("everstep", node["version"]),
            ("clock", _clock(node)),
            ("jobs", ", ".join(node["jobs"])),
            ("machine", f"{node['machine_id']} boot {node['boot_id']}"),
        ]
    )
    if node["evidence"]:
        show.heading("evidence, oldest first")
        show.table(
            ("AT", "SEEN BY", "WHAT"),
            [(show.moment(e["at_s"]), e["source"], e["what"]) for e in node["evidence"]],
        )
    if node["findings"]:
        show.heading("findings that last")
        show.findings(node["findings"])


def _clock(node: dict[str, Any]) -> str:
    if node["clock_offset_s"] is None:
        return ""
    return f"{node['clock_offset_s']:+.4f} s, give or take {node['clock_error_s'] or 0:.4f} s"
