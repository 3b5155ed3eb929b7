"""Keeps the incidents: one for each generation that failed, from the first clue to the new step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from everstep.coordinator import facts
from everstep.coordinator.incidents import MAX_CLUES, Clue, Decision, Incident
from everstep.coordinator.verdict import judge

if TYPE_CHECKING:
    from everstep.coordinator.incidents import IncidentKind
    from everstep.coordinator.job import Job
    from everstep.coordinator.turn import Turn

_CASCADES = frozenset({"broken", "stopped"})


def of_generation(job: Job, generation: int | None = None) -> Incident | None:
    """Return the incident of a generation, by default of the one in force."""
    number = job.book.generation if generation is None else generation
    return job.books.incidents.get(job.book.incidents.get(number, 0))


def add_clue(
    turn: Turn,
    job: Job,
    clue: Clue,
    *,
    kind: IncidentKind = "failure",
    generation: int | None = None,
) -> Incident:
    """Enter a clue into a generation's incident, opening it with the first; judge anew."""
    incident = of_generation(job, generation)
    if incident is None:
        return _open(turn, job, clue, kind)
    if clue.kind in _CASCADES and len(incident.clues) >= MAX_CLUES:
        return incident
    verdict = judge([*incident.clues, clue])
    return rewrite(
        turn, incident, clues=verdict.clues, root=verdict.root, witnesses=verdict.witnesses
    )


def decide(turn: Turn, incident: Incident, decision: Decision) -> Incident:
    """Put down what is done about an incident and hand it to the actions."""
    what = {"incident": incident.id, "job": incident.job, "node": incident.node}
    turn.tell("actions", {**what, **as_dict(decision)})
    return rewrite(turn, incident, decision=decision)


def close(turn: Turn, incident: Incident, **changes: Any) -> Incident:
    """Close an incident and tell people."""
    closed = rewrite(turn, incident, closed_at_s=turn.now_s, **changes)
    turn.tell("notifiers", as_dict(closed))
    return closed


def open_for_nodes(turn: Turn, kind: IncidentKind, node: str | None, clues: list[Clue]) -> Incident:
    """Open an incident that belongs to no job."""
    return _write_new(turn, _judged(turn, kind, clues, node=node))


def rewrite(turn: Turn, incident: Incident, **changes: Any) -> Incident:
    """Record an incident with changes."""
    new = msgspec.structs.replace(incident, **changes)
    turn.record(facts.IncidentWritten(at_s=turn.now_s, incident=new, job=new.job, node=new.node))
    return new


def as_dict(value: msgspec.Struct) -> dict[str, object]:
    """Return an incident or a decision as plain values."""
    plain: dict[str, object] = msgspec.to_builtins(value)
    return plain


def _open(turn: Turn, job: Job, clue: Clue, kind: IncidentKind) -> Incident:
    clues = [clue, *_context(turn, job)]
    generation = job.book.generation
    return _write_new(turn, _judged(turn, kind, clues, job=job.book.id, generation=generation))


def _judged(turn: Turn, kind: IncidentKind, clues: list[Clue], **fields: Any) -> Incident:
    verdict = judge(clues)
    return Incident(
        id=turn.books.next_incident,
        kind=kind,
        detected_at_s=turn.now_s,
        root=verdict.root,
        clues=verdict.clues,
        witnesses=verdict.witnesses,
        **fields,
    )


def _write_new(turn: Turn, incident: Incident) -> Incident:
    turn.record(
        facts.IncidentWritten(
            at_s=turn.now_s, incident=incident, job=incident.job, node=incident.node
        )
    )
    turn.tell("notifiers", as_dict(incident))
    return incident


def _context(turn: Turn, job: Job) -> list[Clue]:
    """Return what else is wrong on the members now: it may confirm, it does not accuse."""
    clues = []
    for name in job.book.members[:MAX_CLUES]:
        node = turn.books.node(name)
        for finding in node.findings.values():
            if finding.severity in ("error", "fatal"):
                what = f"{finding.name}: {finding.summary}"
                clues.append(Clue(at_s=finding.at_s, kind="finding", node=name, what=what))
        if (since_s := job.nodes.away_since(name, turn.now_s)) is not None:
            what = f"agent of {name} is not heard"
            clues.append(Clue(at_s=since_s, kind="silent", node=name, what=what))
    return clues
