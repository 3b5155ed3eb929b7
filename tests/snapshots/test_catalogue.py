"""Which snapshot to begin from, and which may be deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.snapshots import catalogue, marker
from everstep.snapshots.catalogue import Entry, candidates, doomed
from everstep.snapshots.marker import Marker
from everstep.snapshots.orders import Policy
from everstep.wire.ids import SnapshotId


def entry(
    step: int,
    generation: int,
    *,
    job: str | None = "j",
    at_s: float = 0.0,
    size: int = 0,
    suspect: bool = False,
) -> Entry:
    return Entry(
        SnapshotId(step, generation),
        committed=job is not None,
        job=job,
        committed_at_s=at_s,
        bytes=size,
        suspect=suspect,
    )


def names(ids: list[SnapshotId]) -> list[str]:
    return [str(i) for i in ids]


def test_without_a_plan_the_newest_generation_comes_before_the_highest_step() -> None:
    found = [entry(100, 1), entry(130, 1), entry(110, 2), entry(140, 2, job=None)]
    assert names(candidates(found, job="j", named=None)) == [
        "s000110-g2",
        "s000130-g1",
        "s000100-g1",
    ]


def test_a_plan_decides() -> None:
    named = [SnapshotId(100, 1), SnapshotId(90, 1)]
    assert candidates([entry(110, 2)], job="j", named=named) == named


def test_a_plan_without_snapshots_means_those_of_an_earlier_job_or_the_beginning() -> None:
    found = [entry(50, 1), entry(90, 7, job="old", at_s=1.0), entry(95, 2, job="later", at_s=2.0)]
    assert names(candidates(found, job="j", named=())) == ["s000095-g2", "s000090-g7"]
    assert candidates([entry(50, 1)], job="j", named=()) == []


def gone(found: list[Entry], *, generation: int = 1, keep: int = 2, newest: Entry) -> list[str]:
    return names(
        doomed(found, job="j", generation=generation, policy=Policy(keep=keep), newest=newest.id)
    )


def test_the_newest_are_kept() -> None:
    found = [entry(s, 1) for s in (10, 20, 30, 40)]
    assert gone(found, newest=found[-1]) == ["s000010-g1", "s000020-g1"]


def test_a_rollback_makes_older_generations_older_whatever_their_steps() -> None:
    found = [entry(100, 1), entry(130, 1), entry(110, 2), entry(120, 2)]
    assert gone(found, generation=2, newest=found[-1]) == ["s000100-g1", "s000130-g1"]


def test_unfinished_ones_go_when_their_generation_is_over() -> None:
    found = [entry(10, 1, job=None), entry(20, 2), entry(30, 2), entry(40, 2, job=None)]
    assert gone(found, generation=2, newest=found[2]) == ["s000010-g1"]
    found.append(entry(50, 3, job=None))
    assert "s000050-g3" not in gone(found, generation=2, newest=found[2])


def test_a_stale_writer_deletes_nothing() -> None:
    found = [entry(s, 1) for s in (10, 20, 30)] + [entry(25, 2)]
    assert gone(found, generation=1, newest=found[2]) == []


def test_an_earlier_jobs_snapshots_stay_until_this_job_has_enough_of_its_own() -> None:
    old = [entry(10, 8, job="old"), entry(20, 8, job="old")]
    assert gone([*old, entry(30, 1)], newest=entry(30, 1)) == []
    found = [*old, entry(30, 1), entry(40, 1)]
    assert gone(found, newest=found[-1]) == ["s000010-g8", "s000020-g8"]


def left(found: list[Entry], *, newest: Entry, **more: Any) -> list[int]:
    """Return the steps that stay."""
    gone = doomed(found, job="j", generation=newest.id.generation, newest=newest.id, **more)
    return [e.id.step for e in found if e.id not in gone]


def test_every_nth_stays_unless_it_is_suspect() -> None:
    found = [entry(s, 1, suspect=s == 40) for s in range(10, 110, 10)]
    policy = Policy(keep=1, keep_every_steps=20)
    assert left(found, newest=found[-1], policy=policy) == [20, 60, 80, 100]


def test_the_newest_good_one_stays_however_old_it_is() -> None:
    found = [entry(s, 1, suspect=s > 20) for s in (10, 20, 30, 40, 50)]
    assert left(found, newest=found[-1], policy=Policy(keep=2)) == [20, 40, 50]
    said = {"s000020-g1", "s000010-g1"}
    alone = [entry(5, 9, job="old"), *found]
    assert left(alone, newest=found[-1], policy=Policy(keep=1), suspects=said) == [5, 50]


def test_a_budget_takes_the_oldest_and_never_the_newest_good_one() -> None:
    found = [entry(s, 1, size=100) for s in (10, 20, 30, 40)]
    assert left(found, newest=found[-1], policy=Policy(keep=9, budget_bytes=250)) == [30, 40]
    assert left(found, newest=found[-1], policy=Policy(keep=9, budget_bytes=1)) == [40]
    found[-1] = entry(40, 1, size=100, suspect=True)
    assert left(found, newest=found[-1], policy=Policy(keep=9, budget_bytes=1)) == [30, 40]


def test_a_budget_takes_earlier_jobs_snapshots_first() -> None:
    old = [entry(90, 7, job="old", at_s=1.0, size=100), entry(95, 7, job="old", at_s=2.0, size=100)]
    found = [*old, entry(10, 1, at_s=3.0, size=100), entry(20, 1, at_s=4.0, size=100)]
    assert left(found, newest=found[-1], policy=Policy(keep=9, budget_bytes=300)) == [95, 10, 20]


def test_of_this_generation_only_what_is_in_flight_may_be_unfinished() -> None:
    found = [entry(10, 2, job=None), entry(20, 2, job=None), entry(30, 2), entry(40, 2, job=None)]
    policy = Policy(keep=3)
    assert left(found, newest=found[2], policy=policy) == [10, 20, 30, 40], "nobody knows"
    flying = {"s000020-g2"}
    assert left(found, newest=found[2], policy=policy, in_flight=flying) == [20, 30, 40]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.integers(1, 3),
            st.sampled_from(["j", "old", None]),
            st.booleans(),
            st.integers(0, 100),
        ),
        min_size=1,
        unique_by=lambda t: t[:2],
    ),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 200),
)
def test_whatever_the_numbers_say_a_good_one_stays(
    drawn: list[tuple[int, int, str | None, bool, int]], keep: int, every: int, budget: int
) -> None:
    found = [
        entry(step, generation, job=job, suspect=suspect and job is not None, size=size, at_s=at)
        for at, (step, generation, job, suspect, size) in enumerate(drawn)
    ]
    mine = [e for e in found if e.job == "j"]
    if not mine:
        return
    newest = max(mine, key=lambda e: e.place)
    policy = Policy(keep=keep, keep_every_steps=every, budget_bytes=budget)
    gone = doomed(found, job="j", generation=newest.id.generation, newest=newest.id, policy=policy)
    assert newest.id not in gone
    good = [e for e in found if e.committed and not e.suspect]
    assert not good or any(e.id not in gone for e in good)
    if any(not e.suspect for e in mine):
        assert max((e for e in mine if not e.suspect), key=lambda e: e.place).id not in gone
    assert gone == sorted(gone, key=lambda i: (i.generation, i.step))


def test_the_folder_is_read_as_it_is(tmp_path: Path) -> None:
    for name in ("s000010-g1", "s000020-g1", "s000030-g1", "notes", "s000010-g1.aside"):
        (tmp_path / name).mkdir()
    facts = Marker(
        id="s000010-g1", step=10, generation=1, job="j", world_size=1, seed=0, samples=120
    )
    marker.write(tmp_path / "s000010-g1", facts)
    (tmp_path / "s000020-g1" / marker.NAME).write_text("{")
    found = catalogue.entries(tmp_path)
    assert [(str(e.id), e.committed, e.job) for e in found] == [
        ("s000010-g1", True, "j"),
        ("s000020-g1", True, None),
        ("s000030-g1", False, None),
    ]
    assert catalogue.entries(tmp_path / "nothing") == []
