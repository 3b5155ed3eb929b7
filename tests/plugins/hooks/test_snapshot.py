from __future__ import annotations

import time

import pytest
from tests.plugins.hooks.steps import FakeStep

from everstep.plugins.hooks.snapshot import Snapshot, SnapshotConfig
from everstep.sdk import Finding


def no_report(finding: Finding) -> None:
    raise AssertionError(finding)


class FakeSnapshots:
    def __init__(self) -> None:
        self.write_s: float | None = None
        self.asked: list[bool] = []
        self.settings: dict[str, object] = {}

    def ask(self, *, disk: bool = True) -> None:
        self.asked.append(disk)

    def policy(self, *, keep: int, at_end: bool, wait_when_busy: bool, **more: object) -> None:
        self.settings = {"keep": keep, "at_end": at_end, "wait_when_busy": wait_when_busy} | more


def asked_at(config: SnapshotConfig, steps: int, *, disk: bool = True) -> list[int]:
    snapshots = FakeSnapshots()
    hook = Snapshot(config, snapshots, no_report, time.time)
    out = []
    for number in range(1, steps + 1):
        before = len(snapshots.asked)
        hook.before_update(FakeStep(number=number, last=number == steps))
        out += [number for asked in snapshots.asked[before:] if asked is disk]
    return out


def test_it_asks_every_so_many_steps_and_leaves_the_last_to_the_end() -> None:
    assert asked_at(SnapshotConfig(every_steps=5), 20) == [5, 10, 15]


def test_without_one_at_the_end_the_last_step_is_like_any_other() -> None:
    assert asked_at(SnapshotConfig(every_steps=5, at_end=False), 20) == [5, 10, 15, 20]


def test_memory_may_be_asked_for_more_often_than_disk() -> None:
    config = SnapshotConfig(every_steps=6, memory_every_steps=2)
    assert asked_at(config, 13, disk=False) == [2, 4, 8, 10]
    assert asked_at(config, 13) == [6, 12]


def test_the_policy_is_handed_on() -> None:
    snapshots = FakeSnapshots()
    config = SnapshotConfig(keep=4, when_busy="wait", keep_every_steps=50, memory="off")
    Snapshot(config, snapshots, no_report, time.time)
    assert snapshots.settings == {
        "keep": 4,
        "at_end": True,
        "wait_when_busy": True,
        "keep_every_steps": 50,
        "budget_gb": 0.0,
        "in_memory": False,
        "place": "",
    }


def test_more_in_memory_with_memory_off_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_every_steps"):
        SnapshotConfig(memory_every_steps=5, memory="off")


@pytest.mark.parametrize(("key", "value"), [("every_steps", 0), ("keep", 1), ("budget_gb", -1.0)])
def test_settings_that_would_leave_nothing_to_resume_from_are_refused(
    key: str, value: float
) -> None:
    with pytest.raises(ValueError, match=key):
        SnapshotConfig(**{key: value})  # type: ignore[arg-type]  # one of three names
