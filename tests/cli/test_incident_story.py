from __future__ import annotations

from typing import Any

from everstep.cli.incidents import culprit, row, story
from everstep.coordinator.incidents import Clue, Decision, Incident, Root
from everstep.coordinator.views import incident_detail, incident_summary

LOST = Incident(
    id=7,
    kind="failure",
    job="ab12",
    generation=3,
    detected_at_s=102.0,
    root=Root(layer="host", category="lost", summary="node2 is lost: silent", node="node2"),
    clues=[
        Clue(at_s=100.0, kind="silent", node="node2", what="agent not heard", role="confirmation"),
        Clue(at_s=101.5, kind="broken", node="node1", rank=0, what="peer gone", error_s=0.004),
        Clue(at_s=102.0, kind="lost", node="node2", what="node2 is lost", role="root"),
    ],
    witnesses=["node1"],
    decision=Decision(what="swap", why="node2 is lost", node="node2", evicted=["node2"]),
    next_generation=4,
    committed_at_s=102.3,
    resumed_at_s=104.0,
    closed_at_s=104.0,
    steps_lost=2,
)


def told(incident: Incident) -> list[tuple[float, str, str]]:
    detail: dict[str, Any] = incident_detail(incident)
    return [(line.at_s, line.role, line.what) for line in story(detail)]


def test_the_story_goes_from_the_first_sign_to_the_next_step() -> None:
    assert told(LOST) == [
        (100.0, "confirmation", "agent not heard"),
        (101.5, "candidate", "peer gone (give or take 0.004 s)"),
        (102.0, "root", "node2 is lost"),
        (102.0, "opened", "incident 7"),
        (102.0, "decided", "swap node2: node2 is lost"),
        (102.3, "planned", "generation 4 is in force"),
        (104.0, "resumed", "all ranks step; 2 steps were done anew"),
    ]


def test_an_incident_that_is_going_on_ends_with_what_is_known() -> None:
    open_one = Incident(id=8, kind="silence", node="n1", detected_at_s=5.0)
    assert told(open_one) == [(5.0, "opened", "incident 8")]
    assert culprit(incident_detail(open_one)) == "n1"


def test_one_that_was_closed_without_a_step_says_so() -> None:
    closed = Incident(id=8, kind="silence", detected_at_s=5.0, closed_at_s=9.0)
    assert told(closed)[-1] == (9.0, "closed", "nothing is left to wait for")


def test_a_decision_that_was_not_carried_out_says_so() -> None:
    def decided(status: Any) -> Any:
        decision = Decision(what="evict", why="w", node="n2", status=status)
        made = Incident(id=1, kind="hang", detected_at_s=1.0, decision=decision)
        return row(incident_summary(made))[6]

    assert decided("would") == "would evict n2"
    assert decided("pending") == "waits for approval: evict n2"
    assert decided("done") == "evict n2"


def test_a_line_tells_how_long_the_job_stood() -> None:
    cells = row(incident_summary(LOST))
    assert cells[2:] == [
        "ab12",
        "3",
        "node2",
        "node2 is lost: silent",
        "swap node2",
        "2.00 s",
        "2",
    ]
