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
        self.asked = 0
        self.settings: dict[str, object] = {}

    def ask(self) -> None:
        self.asked += 1

    def policy(self, *, keep: int, at_end: bool, wait_when_busy: bool) -> None:
        self.settings = {"keep": keep, "at_end": at_end, "wait_when_busy": wait_when_busy}


def asked_at(config: SnapshotConfig, steps: int) -> list[int]:
    snapshots = FakeSnapshots()
    hook = Snapshot(config, snapshots, no_report, time.time)
    out = []
    for number in range(1, steps + 1):
        before = snapshots.asked
        hook.before_update(FakeStep(number=number, last=number == steps))
        out += [number] * (snapshots.asked - before)
    return out


def test_it_asks_every_so_many_steps_and_leaves_the_last_to_the_end() -> None:
    assert asked_at(SnapshotConfig(every_steps=5), 20) == [5, 10, 15]


def test_without_one_at_the_end_the_last_step_is_like_any_other() -> None:
    assert asked_at(SnapshotConfig(every_steps=5, at_end=False), 20) == [5, 10, 15, 20]


def test_the_policy_is_handed_on() -> None:
    snapshots = FakeSnapshots()
    Snapshot(SnapshotConfig(keep=4, when_busy="wait"), snapshots, no_report, time.time)
    assert snapshots.settings == {"keep": 4, "at_end": True, "wait_when_busy": True}


@pytest.mark.parametrize(("key", "value"), [("every_steps", 0), ("keep", 1)])
def test_settings_that_would_leave_nothing_to_resume_from_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=key):
        SnapshotConfig(**{key: value})  # type: ignore[arg-type]  # one of two names
