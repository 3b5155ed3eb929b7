"""`everstep incidents`: what went wrong, and the story of one incident."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer

from everstep.cli import show
from everstep.cli.asked import Asked, me
from everstep.cli.options import ConfigPath, CoordinatorUrl, Json, Reason, Token
from everstep.cli.verbs import application

incidents = application(invoke_without_command=True)

Number = Annotated[int, typer.Argument(metavar="ID", help="The incident's number.")]


@incidents.callback()
def _list(
    context: typer.Context,
    *,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Only those of this job (id or run id).")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Only those that are not closed.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest of them.")] = 50,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """List incidents, oldest first.

    An incident is one failure with all that followed from it; it closes when all ranks step
    again; where a script tells nothing of its steps, half a minute after its ranks were started
    anew. RESUMED is the time from the first sign to the next step. With --json: the answer to
    GET /v1/incidents.

    Examples:
        everstep incidents --open
        everstep incidents --job my-job --json
        everstep incidents show 7

    Exit codes:
        0   answered
        64  no such job; wrong arguments, token or configuration
        69  no coordinator answers
    """
    asked = Asked(coordinator, token, config, json)
    context.obj = asked
    if context.invoked_subcommand is not None:
        return
    answer = asked.api().get("incidents", job=job, limit=limit, open=1 if open_ else None)
    if json:
        show.as_json(answer)
    else:
        show.table(HEADS, [row(one) for one in answer["incidents"]])


@incidents.command("show")
def _show(
    context: typer.Context,
    number: Number,
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Tell the story of one incident in order of time.

    What was seen first and by whom, who only suffered from it, what was decided and why, and how
    long it took until all ranks did a step again. Times are the coordinator's. With --json: the
    answer to GET /v1/incidents/ID.

    Example:
        everstep incidents show 7

    Exit codes:
        0   answered
        64  no such incident; wrong arguments, token or configuration
        69  no coordinator answers
    """
    asked = Asked(coordinator, token, config, json).within(context)
    incident = asked.api().get(f"incidents/{number}")
    if asked.json:
        show.as_json(incident)
    else:
        _tell(incident)


@incidents.command("approve")
def _approve(
    context: typer.Context,
    number: Number,
    *,
    reason: Reason,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Carry out what an incident proposes, where the coordinator's mode is `approve`.

    With --json: the answer to POST /v1/incidents/ID/approve.

    Example:
        everstep incidents approve 7 --reason "node7 is indeed gone"

    Exit codes:
        0   carried out, and journaled
        64  no such incident, or it waits for nobody; wrong arguments, token or configuration
        69  no coordinator answers
    """
    asked = Asked(coordinator, token, config, json).within(context)
    answer = asked.api().post(f"incidents/{number}/approve", reason=reason, by=me())
    if asked.json:
        show.as_json(answer)
    else:
        show.say(f"incident {number}: {_decision(answer['incident'])}")


# --------------------------------------------------------------------------------- one a line

HEADS = ("ID", "DETECTED", "JOB", "GEN", "ROOT", "WHAT", "DECIDED", "RESUMED", "STEPS LOST")


def row(incident: dict[str, Any]) -> list[show.Cell]:
    """Return an incident as a line of a table."""
    open_ = incident["closed_at_s"] is None
    return [
        show.Styled(f"{incident['id']}{' open' if open_ else ''}", "red" if open_ else ""),
        show.moment(incident["detected_at_s"]),
        incident["job"] or "-",
        str(incident["generation"] or "-"),
        culprit(incident),
        summary(incident),
        _decision(incident),
        _resumed(incident),
        "-" if incident["steps_lost"] is None else str(incident["steps_lost"]),
    ]


def culprit(incident: dict[str, Any]) -> str:
    """Return who or what is to blame, as far as it is known."""
    root = incident["root"] or {}
    node, rank = root.get("node") or incident["node"], root.get("rank")
    return " ".join([node or "-", *([f"rank {rank}"] if rank is not None else [])])


def summary(incident: dict[str, Any]) -> str:
    """Return what went wrong in a line."""
    return incident["root"]["summary"] if incident["root"] else str(incident["kind"])


def _decision(incident: dict[str, Any]) -> str:
    decision = incident["decision"]
    words = {"done": "", "would": "would ", "pending": "waits for approval: "}
    target = ", ".join(decision["evicted"]) or decision["node"]
    return f"{words[decision['status']]}{decision['what']}{f' {target}' if target else ''}"


def _resumed(incident: dict[str, Any]) -> str:
    if incident["resumed_at_s"] is None:
        return "-"
    return show.duration(incident["resumed_at_s"] - incident["detected_at_s"])


# ---------------------------------------------------------------------------------- the story


class Line(NamedTuple):
    """One thing that happened. `order` decides where time does not."""

    at_s: float
    order: int
    role: str
    who: str
    what: str


def story(incident: dict[str, Any]) -> list[Line]:
    """Return what happened in order of time: clues, the decision, the new plan, the new step."""
    detected_s = incident["detected_at_s"]
    lines = [
        Line(c["at_s"], 0, c["role"], _place(c), f"{c['what']}{_bound(c)}")
        for c in incident["clues"]
    ]
    lines.append(Line(detected_s, 1, "opened", "coordinator", f"incident {incident['id']}"))
    decision = incident["decision"]
    if decision["what"] != "none" or decision["why"]:
        what = f"{_decision(incident)}: {decision['why']}"
        lines.append(Line(detected_s, 2, "decided", "coordinator", what))
    if incident["committed_at_s"] is not None:
        what = f"generation {incident['next_generation']} is in force"
        lines.append(Line(incident["committed_at_s"], 3, "planned", "coordinator", what))
    if incident["resumed_at_s"] is not None:
        lost = incident["steps_lost"]
        told = "" if lost is None else f"; {lost} steps were done anew"
        lines.append(Line(incident["resumed_at_s"], 4, "resumed", "", f"all ranks step{told}"))
    elif incident["closed_at_s"] is not None:
        lines.append(Line(incident["closed_at_s"], 4, "closed", "", "nothing is left to wait for"))
    return sorted(lines)


def _tell(incident: dict[str, Any]) -> None:
    root = incident["root"] or {}
    began_s = min([incident["detected_at_s"], *(c["at_s"] for c in incident["clues"])])
    resumed_s = incident["resumed_at_s"]
    show.pairs(
        [
            ("incident", f"{incident['id']}: {incident['kind']}"),
            ("what", summary(incident)),
            ("culprit", culprit(incident)),
            ("layer", f"{root['layer']}, {root['category']}" if root else ""),
            ("job", incident["job"] or ""),
            ("generation", str(incident["generation"] or "")),
            ("witnesses", ", ".join(incident["witnesses"])),
            ("first sign", show.moment(began_s)),
            ("next step", show.duration(resumed_s - began_s) + " later" if resumed_s else ""),
            ("state", "closed" if incident["closed_at_s"] is not None else "open"),
        ]
    )
    show.heading("in order of time, from the first sign")
    show.table(
        ("AFTER", "ROLE", "WHERE", "WHAT"),
        [
            (f"{line.at_s - began_s:.3f} s", line.role, line.who, line.what)
            for line in story(incident)
        ],
    )
    if root.get("error"):
        show.heading(f"what {culprit(incident)} said")
        show.verbatim(root["error"])


def _place(clue: dict[str, Any]) -> str:
    return clue["node"] if clue["rank"] is None else f"{clue['node']} rank {clue['rank']}"


def _bound(clue: dict[str, Any]) -> str:
    return f" (give or take {clue['error_s']:.3f} s)" if clue["error_s"] >= 0.001 else ""
