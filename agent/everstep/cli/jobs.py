"""`everstep jobs`: all jobs, all about one, and stopping one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everstep.cli import job_time, show
from everstep.cli.asked import Asked, me
from everstep.cli.options import ConfigPath, CoordinatorUrl, Json, Reason, Token
from everstep.cli.verbs import application

jobs = application(invoke_without_command=True)

Job = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's id, or its run id: the newest of that name.")
]


@jobs.callback()
def _list(
    context: typer.Context,
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """List all jobs, oldest first.

    A job is forming, running, recovering, or over: done, failed or stopped. STEP is the last that
    all its ranks have finished. With --json: the answer to GET /v1/jobs.

    Examples:
        everstep jobs
        everstep jobs show my-job
        everstep jobs stop my-job --reason "wrong learning rate"

    Exit codes:
        0   answered
        64  wrong arguments, token or configuration
        69  no coordinator answers
    """
    asked = Asked(coordinator, token, config, json)
    context.obj = asked
    if context.invoked_subcommand is not None:
        return
    answer = asked.api().get("jobs")
    if json:
        show.as_json(answer)
    else:
        show.table(HEADS, [row(job) for job in answer["jobs"]])


@jobs.command("show")
def _show(
    context: typer.Context,
    job: Job,
    *,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Show all about one job: ranks, where its time went, snapshots, findings, incidents.

    With --json: the answer to GET /v1/jobs/JOB.

    Example:
        everstep jobs show my-job

    Exit codes:
        0   answered
        64  no such job; wrong arguments, token or configuration
        69  no coordinator answers
    """
    from everstep.cli.api import segment

    asked = Asked(coordinator, token, config, json).within(context)
    found = asked.api().get(f"jobs/{segment(job)}")
    if asked.json:
        show.as_json(found)
    else:
        _describe(found)


@jobs.command("stop")
def _stop(
    context: typer.Context,
    job: Job,
    *,
    reason: Reason,
    coordinator: CoordinatorUrl = None,
    token: Token = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Stop a job for good: its launchers end with exit code 76.

    With --json: the answer to POST /v1/jobs/JOB/stop.

    Example:
        everstep jobs stop my-job --reason "wrong learning rate"

    Exit codes:
        0   stopped, and journaled
        64  no such job, or it is over; wrong arguments, token or configuration
        69  no coordinator answers
    """
    from everstep.cli.api import segment

    asked = Asked(coordinator, token, config, json).within(context)
    answer = asked.api().post(f"jobs/{segment(job)}/stop", reason=reason, by=me())
    if asked.json:
        show.as_json(answer)
    else:
        show.say(f"{answer['job']['run_id']} ({answer['job']['id']}): {answer['job']['state']}")


HEADS = (
    "ID", "RUN", "STATE", "GEN", "NODES", "SPARES", "RANKS", "STEP", "LOSS", "SNAPSHOT",
    "OPEN INCIDENTS", "WHY",
)  # fmt: skip


def row(job: dict[str, Any]) -> list[show.Cell]:
    """Return a job as a line of a table."""
    return [
        job["id"],
        job["run_id"],
        show.state(job["state"]),
        str(job["generation"]),
        f"{len(job['members'])} of {_range(job)}",
        str(len(job["spares"])),
        str(job["world_size"]),
        _number(job["step"]),
        "-" if job["loss"] is None else f"{job['loss']:.4f}",
        job["newest_snapshot"] or "-",
        ", ".join(map(str, job["open_incidents"])) or "-",
        why(job),
    ]


def why(job: dict[str, Any]) -> str:
    """Return what a job waits for, or why it is over."""
    return str(job["over"]["why"] if job["over"] else job["waiting_for"])


def _range(job: dict[str, Any]) -> str:
    least, most = job["min_nodes"], job["max_nodes"]
    return str(most) if least == most else f"{least} to {most}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _describe(job: dict[str, Any]) -> None:
    over = job["over"]
    show.pairs(
        [
            ("job", f"{job['id']} (run {job['run_id']} of user {job['uid']})"),
            ("state", show.state(job["state"])),
            ("why", why(job)),
            ("exit code", str(over["exit_code"]) if over else ""),
            ("command", job["command"]),
            ("began", show.moment(job["created_at_s"])),
            ("generation", f"{job['generation']}: {', '.join(job['members']) or 'nobody'}"),
            ("spares", ", ".join(job["spares"])),
            ("step", f"{_number(job['step'])} ({job['phase']})" if job["phase"] else ""),
            ("loss", "" if job["loss"] is None else f"{job['loss']:.4f}"),
        ]
    )
    if over and over["error"]:
        show.heading("the error that ended it")
        show.verbatim(over["error"])
    _list_seats(job)
    _list_ranks(job["ranks"])
    if "time" in job:  # not from a coordinator of the version before
        job_time.describe(job["time"])
    _list_history(job)


def _list_seats(job: dict[str, Any]) -> None:
    show.heading("launchers")
    show.table(
        ("NODE", "PID", "STATE", "JOINED", "LEFT"),
        [
            (
                s["node"],
                str(s["pid"]),
                s["standing"] or "-",
                show.moment(s["joined_at_s"]),
                _left(s),
            )
            for s in job["seats"]
        ],
    )


def _left(seat: dict[str, Any]) -> str:
    at_s = seat["left_at_s"]
    return "" if at_s is None else f"{show.moment(at_s)}: {seat['left_why']}"


def _list_ranks(ranks: list[dict[str, Any]]) -> None:
    if not ranks:
        return
    show.heading("ranks")
    show.table(
        ("RANK", "NODE", "PID", "PHASE", "STEP", "LOSS", "STANDS FOR", "HEARD"),
        [
            (
                str(r["rank"]),
                r["node"],
                str(r["pid"]),
                r["phase"],
                str(r["step"]),
                "-" if r["loss"] is None else f"{r['loss']:.4f}",
                show.duration(r["standing_s"]),
                f"{show.duration(r['heard_s_ago'])} ago",
            )
            for r in ranks
        ],
    )


def _snapshot(taken: dict[str, Any]) -> tuple[str, ...]:
    doubt = taken["suspect"] or ""
    if taken["suspect_in_memory"] and not doubt:
        doubt = f"in memory only: {taken['suspect_in_memory']}"
    tiers = ", ".join(taken["tiers"])
    if "path" not in taken:
        return (taken["id"], tiers, ", ".join(taken["in_memory_of"]), "-", "-", "-", doubt)
    return (
        taken["id"],
        tiers,
        taken["node"],
        str(taken["bytes"]),
        show.duration(taken["write_s"]),
        taken["path"],
        doubt,
    )


def _list_history(job: dict[str, Any]) -> None:
    from everstep.cli.incidents import HEADS as INCIDENT_HEADS
    from everstep.cli.incidents import row as incident_row

    show.heading("generations")
    show.table(
        ("GEN", "FROM", "MEMBERS", "RESUMED FROM", "ASKED BY", "WHY"),
        [
            (
                str(g["generation"]),
                show.moment(g["committed_at_s"]),
                ", ".join(g["members"]),
                next(iter(g["resume"]), "no snapshot yet"),
                g["asked_by"],
                g["why"],
            )
            for g in job["generations"]
        ],
    )
    if job["snapshots"]:
        show.heading("snapshots")
        show.table(
            ("ID", "TIERS", "TAKEN BY", "BYTES", "WRITTEN IN", "PATH", "SUSPECT"),
            [_snapshot(s) for s in job["snapshots"]],
        )
    if job["findings"]:
        show.heading("what its ranks found")
        show.findings(job["findings"])
    if job["incidents"]:
        show.heading("incidents")
        show.table(INCIDENT_HEADS, [incident_row(i) for i in job["incidents"]])
