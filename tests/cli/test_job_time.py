"""Where a job's time went, as a person reads it."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.cli import job_time

TIME: dict[str, Any] = {
    "wall_s": 200.0,
    "kinds": {"start": 20.0, "productive": 150.0, "lost_work": 30.0, "unknown": 0.0},
    "goodput": 0.75,
    "ettr": 0.751,
    "mttr_s": 1.5,
    "recoveries": [
        {
            "incident": 3,
            "generation": 2,
            "decision": "restart",
            "node": "a",
            "rank": 1,
            "began_at_s": 1e9,
            "took_s": 1.5,
            "steps_lost": None,
            "phases": [{"phase": "detection", "s": 0.5}, {"phase": "first_step", "s": 1.0}],
        }
    ],
}


def test_the_kinds_are_drawn_with_the_longest_first_and_none_that_took_no_time() -> None:
    rows = job_time.rows(TIME)
    assert [(r[0], r[1], r[2]) for r in rows] == [
        ("productive", "2 min", "75.0 %"),
        ("lost work", "30.0 s", "15.0 %"),
        ("start", "20.0 s", "10.0 %"),
    ]
    assert [len(r[3]) for r in rows] == [22, 4, 3]


def test_ratios_and_recoveries_follow(capsys: pytest.CaptureFixture[str]) -> None:
    job_time.describe(TIME)
    out = capsys.readouterr().out
    for part in ("goodput  75.0 %", "MTTR     1.50 s", "detection 0.50 s, first step 1.00 s"):
        assert part in out


def test_a_job_that_has_just_been_made_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    job_time.describe({**TIME, "wall_s": 0.0})
    assert capsys.readouterr().out == ""
