"""`everstep status`: how it stands, on one screen."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from everstep.cli import show
from everstep.cli.asked import Asked
from everstep.cli.options import AgentSocket, ConfigPath, CoordinatorUrl, Json, Token
from everstep.wire.exit_codes import UNAVAILABLE

if TYPE_CHECKING:
    from everstep.cli.api import Api, ApiError

_SHOWN_OVER = 3


def status(
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    socket: AgentSocket = None,
    json: Json = False,
) -> None:
    """Show how it stands: coordinator, nodes by state, jobs, open incidents.

    Without a coordinator it shows what the agent of this machine knows: its ranks go on all the
    same. With --json: coordinator (GET /v1/status), nodes, jobs and incidents (the open ones) as
    the API gives them; without a coordinator coordinator is null, why says why, and agent is what
    the agent tells.

    Examples:
        everstep status
        everstep status --coordinator head:7070 --json

    Exit codes:
        0   the coordinator answered
        64  wrong arguments, token or configuration
        69  no coordinator answers, whether or not there is an agent
    """
    from everstep.cli.api import ApiError, ApiRefusedError

    asked = Asked(coordinator, token, config, json)
    api = asked.api()
    try:
        facts = _ask(api)
    except ApiRefusedError:
        raise
    except ApiError as exc:
        _without(exc, socket, json=json)
        raise typer.Exit(UNAVAILABLE) from exc
    if json:
        show.as_json(facts)
    else:
        _print(api.url, facts)


def _ask(api: Api) -> dict[str, Any]:
    return {
        "coordinator": api.get("status"),
        "nodes": api.get("nodes")["nodes"],
        "jobs": api.get("jobs")["jobs"],
        "incidents": api.get("incidents", open=1)["incidents"],
    }


# -------------------------------------------------------------------------- with a coordinator


def _print(url: str, facts: dict[str, Any]) -> None:
    from everstep.cli import incidents, jobs, nodes

    journal = facts["coordinator"]["journal"]
    failing = f"cannot be written, so nothing is decided: {journal['error']}"
    show.pairs(
        [
            ("coordinator", _coordinator(url, facts["coordinator"])),
            ("journal", show.Styled(failing if journal["error"] else "", "red")),
            ("nodes", by_state(facts["nodes"]) or "none yet"),
        ]
    )
    unwell = [node for node in facts["nodes"] if node["state"] != "healthy"]
    if unwell:
        show.table(nodes.HEADS, [nodes.row(node) for node in unwell])
    shown = worth_showing(facts["jobs"])
    show.heading(f"jobs: {by_state(facts['jobs']) or 'none yet'}")
    if shown:
        show.table(jobs.HEADS, [jobs.row(job) for job in shown])
    show.heading(f"open incidents: {len(facts['incidents']) or 'none'}")
    if facts["incidents"]:
        show.table(incidents.HEADS, [incidents.row(one) for one in facts["incidents"]])


def by_state(things: list[dict[str, Any]]) -> str:
    """Return how many there are of each state.

    >>> by_state([{"state": "healthy"}, {"state": "evicted"}, {"state": "healthy"}])
    '3: 2 healthy, 1 evicted'
    """
    if not things:
        return ""
    counts = Counter(thing["state"] for thing in things)
    return f"{len(things)}: {', '.join(f'{n} {state}' for state, n in counts.most_common())}"


def worth_showing(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the jobs that are not over, and the few that ended last."""
    over = sorted((job for job in jobs if job["over"]), key=lambda job: job["over"]["at_s"])
    return [*over[-_SHOWN_OVER:], *(job for job in jobs if not job["over"])]


def _coordinator(url: str, own: dict[str, Any]) -> str:
    up = show.duration(max(0.0, own["now_s"] - own["started_at_s"]))
    return (
        f"{url}, everstep {own['version']}, mode {own['mode']}, up {up} (start {own['epoch']}), "
        f"agents connected: {own['agents_connected']}"
    )


# ----------------------------------------------------------------------- without a coordinator


def _without(exc: ApiError, socket: Any, *, json: bool) -> None:
    """Show what the local agent knows, if there is one."""
    from everstep.cli.local import AgentUnreachableError, ask_agent

    try:
        agent: dict[str, Any] | None = ask_agent("status", socket)
        why = str(exc)
    except AgentUnreachableError as no_agent:
        agent, why = None, f"{exc}; and {no_agent}"
    sys.stderr.write(f"everstep: {why}\n")
    if json:
        show.as_json({"coordinator": None, "why": why, "agent": agent})
    elif agent is not None:
        _print_agent(agent)


def _print_agent(agent: dict[str, Any]) -> None:
    show.say("What the agent of this machine knows:")
    show.pairs(
        [
            ("node", f"{agent['node']}, everstep {agent['version']}, pid {agent['pid']}"),
            ("coordinator", _link(agent["coordinator"])),
            ("metrics", f"http://{agent['listen']}/metrics"),
            ("clients", by_role(agent["clients"])),
        ]
    )
    for reason in agent["reasons"]:
        show.say(reason, style="red")
    if agent["ranks"]:
        show.heading("ranks on this machine")
        show.table(
            ("JOB", "GEN", "RANK", "PID", "PHASE", "STEP", "LOSS", "STANDS FOR"),
            [_rank(rank) for rank in agent["ranks"]],
        )
    if agent.get("memory"):
        show.heading("snapshots held in this machine's memory")
        show.table(("JOB", "USER", "RANKS", "BYTES"), [_held(held) for held in agent["memory"]])
    if agent["findings"]:
        show.heading("findings that last")
        show.findings(agent["findings"])


def by_role(clients: list[dict[str, Any]]) -> str:
    """Return how many clients of each kind there are; who asks just now does not count.

    >>> by_role([{"role": "rank"}, {"role": "launcher"}, {"role": "rank"}, {"role": "cli"}])
    '1 launcher, 2 rank'
    """
    counts = Counter(
        client["role"] for client in clients if client["role"] not in ("cli", "memory")
    )
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items())) or "none"


def _link(link: dict[str, Any]) -> str:
    if link["connected"]:
        return f"{link['url']} is reached by the agent: name it with --coordinator"
    tried = ", ".join(link["configured"])
    return f"not reached: {tried} ({link['error']})" if tried else "none configured"


def _rank(rank: dict[str, Any]) -> list[show.Cell]:
    return [
        rank["job"],
        str(rank["generation"]),
        str(rank["rank"]),
        str(rank["pid"]),
        rank["phase"],
        str(rank["step"]),
        "-" if rank["loss"] is None else f"{rank['loss']:.4f}",
        show.duration(rank["standing_s"]),
    ]


def _held(held: dict[str, Any]) -> list[show.Cell]:
    ranks = ", ".join(map(str, held["ranks"]))
    return [held["job"], str(held["uid"]), ranks, str(held["bytes"])]
