"""`everstep plugins`: all plugins, where they run and how they are doing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.cli import show
from everstep.cli.options import AgentSocket, ConfigPath, Json


def plugins(*, config: ConfigPath = None, socket: AgentSocket = None, json: Json = False) -> None:
    """List all installed plugins with their state.

    Collectors and detectors run in the agent; when one runs here, it tells how they are doing:
    calls, failures, how long the last call took. For the others, and where no agent runs, it is
    shown what the configuration file makes of them: on, off, unsupported or failed, and why. Hooks
    run in the ranks of a job and are only listed. With --json: a list of objects with kind, name,
    source, runs_in, live, state, why; the live ones with interval_s, calls, failures and last_s
    too.

    Examples:
        everstep plugins
        everstep plugins --config run.toml --json

    Exit codes:
        0   listed, whatever their state
        64  wrong arguments or configuration
    """
    from everstep.cli.local import AgentUnreachableError, ask_agent

    try:
        live = ask_agent("plugins", socket)["plugins"]
    except AgentUnreachableError as exc:
        sys.stderr.write(f"everstep: {exc}; until then this is what the configuration says\n")
        live = []
    facts = [*({**one, "runs_in": "agent", "live": True} for one in live), *_told(config, live)]
    if json:
        show.as_json(facts)
        return
    heads = ("KIND", "NAME", "RUNS IN", "STATE", "CALLS", "FAILED", "LAST", "FROM", "WHY")
    show.table(heads, [_row(one) for one in facts])


def _told(config: Path | None, live: list[Any]) -> Iterator[dict[str, object]]:
    """Yield what the door says of the kinds that no agent has told about."""
    from everstep.sdk import door
    from everstep.sdk.config import ConfigFile

    file = ConfigFile.load(config)
    offers = {"clock": lambda: 0.0, "pages": list}
    known = {one["kind"] for one in live}
    for kind in door.KINDS:
        if kind == "hooks":
            yield from _hooks(file)
        elif kind not in known:
            for one in door.admit(file, kind, offers):
                where = "agent" if kind in ("collectors", "detectors") else "coordinator"
                yield _fact(kind, one.name, one.source, where, one.state, one.why)


def _hooks(file: Any) -> Iterator[dict[str, object]]:
    # Not through the door: it would import torch, and a hook is at home in a rank only.
    from everstep.sdk import door

    door.check(file, "hooks")
    for name, point in sorted(door.installed("hooks").items()):
        enabled, _ = door.table(file, "hooks", name)
        source = point.dist.name if point.dist else point.module
        state, why = ("installed", "runs in ranks") if enabled else ("off", "enabled = false")
        yield _fact("hooks", name, source, "ranks", state, why)


def _fact(
    kind: str, name: str, source: str, runs_in: str, state: str, why: str
) -> dict[str, object]:
    return {
        "kind": kind,
        "name": name,
        "source": source,
        "state": state,
        "why": why,
        "runs_in": runs_in,
        "live": False,
    }


def _row(one: dict[str, Any]) -> list[show.Cell]:
    calls, failed, last = "-", "-", "-"
    if one["live"]:
        calls, failed = str(one["calls"]), str(sum(one["failures"].values()))
        last = f"{1000 * one['last_s']:.1f} ms" if one["calls"] else "-"
    return [
        one["kind"],
        one["name"],
        one["runs_in"],
        show.state(one["state"]),
        calls,
        failed,
        last,
        one["source"],
        one["why"],
    ]
