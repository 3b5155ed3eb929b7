"""An incident is written when it opens and when it closes, in one line each."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from everstep.plugins.notifiers.journal import JournalNotifier

# As the coordinator hands it over.
INCIDENT: dict[str, Any] = {
    "id": 7,
    "kind": "failure",
    "detected_at_s": 100.5,
    "job": "job-a",
    "node": None,
    "generation": 3,
    "root": {
        "layer": "host",
        "category": "node_lost",
        "summary": "n3 vanished",
        "node": "n3",
        "rank": None,
        "error": "Traceback\n" + "x" * 5000,
    },
    "clues": [
        {"at_s": 100.0, "kind": "lost", "node": "n3", "what": "not heard for 2.1 s"},
        {"at_s": 100.1, "kind": "broken", "node": "n1", "what": "rank 0: connection reset"},
    ],
    "witnesses": [],
    "decision": {"what": "evict", "why": "a spare is there", "evicted": ["n3"]},
    "closed_at_s": None,
}


def written(
    incident: dict[str, Any], caplog: pytest.LogCaptureFixture, **config: Any
) -> tuple[str, str, dict[str, Any]]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        JournalNotifier(JournalNotifier.Config(**config)).notify(incident)
    (record,) = caplog.records
    fields = {
        key.removeprefix("incident_"): value
        for key, value in vars(record).items()
        if key.startswith("incident_")
    }
    return record.levelname, record.getMessage(), fields


def test_an_incident_that_opens_is_a_warning_with_its_root_and_evidence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    level, event, fields = written(INCIDENT, caplog)
    assert (level, event) == ("WARNING", "incident opened")
    assert (fields["id"], fields["job"], fields["root_summary"]) == (7, "job-a", "n3 vanished")
    assert fields["decision_what"] == "evict"
    assert fields["clues"] == "n3: not heard for 2.1 s; n1: rank 0: connection reset"
    assert "node" not in fields  # it has none
    assert "witnesses" not in fields


def test_an_incident_that_closes_is_said_as_such(caplog: pytest.LogCaptureFixture) -> None:
    closed = {**INCIDENT, "closed_at_s": 103.0, "steps_lost": 0}
    level, event, fields = written(closed, caplog)
    assert (level, event) == ("INFO", "incident closed")
    assert (fields["closed_at_s"], fields["steps_lost"]) == (103.0, 0)


def test_a_long_traceback_does_not_fill_the_journal(caplog: pytest.LogCaptureFixture) -> None:
    _, _, fields = written(INCIDENT, caplog)
    assert len(fields["root_error"]) == 300
    assert fields["root_error"].endswith("...")


def test_evidence_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    _, _, fields = written(INCIDENT, caplog, evidence=False)
    assert "clues" not in fields
    assert fields["root_summary"] == "n3 vanished"


@pytest.mark.parametrize("incident", [{}, {"name": 1, "args": [], "message": {"exc_info": 2}}])
def test_an_incident_of_another_form_is_written_all_the_same(
    incident: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert written(incident, caplog)[1] == "incident opened"


def test_evidence_of_another_form_is_written_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    _, _, fields = written({"clues": ["a", {"b": 1}]}, caplog)
    assert fields["clues"] == "a; {'b': 1}"
