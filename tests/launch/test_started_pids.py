from __future__ import annotations

from types import SimpleNamespace

from everstep.launch.crew import started_pids


def workers(*pids: int | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(id=pid) for pid in pids]


def test_the_pids_of_the_generation_that_ended_are_never_taken_for_the_new_ones() -> None:
    before = workers(11, 12)
    assert started_pids(before, before) == []
    assert started_pids(workers(None, None), before) == []
    assert started_pids(workers(21, None), before) == []
    assert started_pids(workers(21, 22), before) == [21, 22]
