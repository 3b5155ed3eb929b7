"""`everstep plugins`: all plugins, where they run and how they are doing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from everstep.cli import show
from everstep.cli.asked import Asked
from everstep.cli.errors import VerbError
from everstep.cli.options import AgentSocket, ConfigPath, CoordinatorUrl, Json, Token

if TYPE_CHECKING:
    from everstep.sdk.config import ConfigFile
    from everstep.sdk.door import Kind

Fact: TypeAlias = dict[str, Any]

_RUNS_IN: Mapping[Kind, str] = {
    "collectors": "agent",
    "detectors": "agent",
    "actions": "coordinator",
    "notifiers": "coordinator",
}


def plugins(
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    socket: AgentSocket = None,
    json: Json = False,
) -> None:
    """List all installed plugins with their state.

    Collectors and detectors run in the agent, actions and notifiers in the coordinator. Where
    these answer, they tell how their plugins are doing: calls, failures, how long the last call
    took. For the rest it is shown what the configuration file makes of them here: on, off,
    unsupported or failed, and why. Hooks run in the ranks of a job and are only listed. With
    --json: a list of objects with kind, name, source, runs_in, live, state and why; the live ones
    have calls and failures too, and those of the agent interval_s and last_s.

    Examples:
        everstep plugins
        everstep plugins --config run.toml --json

    Exit codes:
        0   listed, whatever their state
        64  wrong arguments or configuration
    """
    live = [*_of_agent(socket), *_of_coordinator(Asked(coordinator, token, config))]
    facts = [*live, *_of_configuration(config, {str(one["kind"]) for one in live})]
    if json:
        show.as_json(facts)
        return
    heads = ("KIND", "NAME", "RUNS IN", "STATE", "CALLS", "FAILED", "LAST", "FROM", "WHY")
    show.table(heads, [_row(one) for one in facts])


def _of_agent(socket: Path | None) -> list[Fact]:
    from everstep.cli.local import AgentUnreachableError, ask_agent

    try:
        told = ask_agent("plugins", socket)["plugins"]
    except AgentUnreachableError as exc:
        return _nothing(exc)
    return [{**one, "runs_in": "agent", "live": True} for one in told]


def _of_coordinator(asked: Asked) -> list[Fact]:
    from everstep.cli.api import ApiError

    try:
        told = asked.api().get("status")["plugins"]
    except ApiError as exc:
        return _nothing(exc)
    return [{**one, "runs_in": "coordinator", "live": True} for one in told]


def _nothing(exc: VerbError) -> list[Fact]:
    sys.stderr.write(f"everstep: {exc}. What follows is from the configuration file.\n")
    return []


def _of_configuration(config: Path | None, known: set[str]) -> Iterator[Fact]:
    """Yield what the door says of the kinds that are not known yet."""
    from everstep.sdk import door
    from everstep.sdk.config import ConfigFile

    file = ConfigFile.load(config)
    offers = {"clock": time.time, "pages": list}
    for kind, runs_in in _RUNS_IN.items():
        if kind not in known:
            for one in door.admit(file, kind, offers):
                yield _fact(kind, one.name, one.source, runs_in, one.state, one.why)
    yield from _hooks(file)


def _hooks(file: ConfigFile) -> Iterator[Fact]:
    # Not through the door: it would import torch, and a hook is at home in a rank only.
    from everstep.sdk import door

    door.check(file, "hooks")
    for name, point in sorted(door.installed("hooks").items()):
        enabled, _ = door.table(file, "hooks", name)
        source = point.dist.name if point.dist else point.module
        state, why = ("installed", "runs in ranks") if enabled else ("off", "enabled = false")
        yield _fact("hooks", name, source, "ranks", state, why)


def _fact(kind: str, name: str, source: str, runs_in: str, state: str, why: str) -> Fact:
    return {
        "kind": kind,
        "name": name,
        "source": source,
        "state": state,
        "why": why,
        "runs_in": runs_in,
        "live": False,
    }


def _row(one: Fact) -> list[show.Cell]:
    calls, failures = one.get("calls"), one.get("failures") or {}
    return [
        one["kind"],
        one["name"],
        one["runs_in"],
        show.state(one["state"]),
        "-" if calls is None else str(calls),
        "-" if calls is None else str(sum(failures.values())),
        f"{1000 * one['last_s']:.1f} ms" if calls and "last_s" in one else "-",
        one["source"],
        one["why"],
    ]
