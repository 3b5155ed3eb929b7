"""When a rank came up, put down once and told to the coordinator."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from everstep.trainer.timeline import Timeline, process_began_at_s
from everstep.wire.messages import Phase, RankTimeline


def timeline() -> Timeline:
    ticks = count(10)
    return Timeline(job="j", generation=2, rank=4, began_at_s=9.0, clock=lambda: float(next(ticks)))


def test_the_phases_of_a_run_are_its_moments() -> None:
    line = timeline()
    assert line.mark("grouped_at_s")
    run: list[tuple[Phase, int | None]] = [
        ("restore", None),
        ("first_step", 40),
        ("step", None),
        ("snapshot", None),
        ("step", None),
        ("snapshot", 50),
        ("end", 50),
    ]
    news = [line.enter(phase, step) for phase, step in run]
    assert news == [False, True, True, False, False, False, True]
    assert line.told == RankTimeline(
        nonce="j",
        generation=2,
        rank=4,
        from_step=40,
        began_at_s=9.0,
        opened_at_s=10.0,
        grouped_at_s=11.0,
        restored_at_s=12.0,
        stepped_at_s=13.0,
        saved_at_s=14.0,
    )


def test_a_moment_comes_once() -> None:
    line = timeline()
    assert line.mark("grouped_at_s")
    assert not line.mark("grouped_at_s")
    assert line.told.grouped_at_s == 11.0


def test_a_process_knows_when_its_work_began() -> None:
    before_s = time.time()
    code = (
        "import time; from everstep.trainer.timeline import work_began_at_s as b\n"
        "print(b(), time.time(), b())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    first_s, now_s, second_s = map(float, done.stdout.split())
    assert before_s - 0.5 < first_s < now_s
    assert second_s >= now_s, "formed into a second generation, its work begins anew"


def test_where_that_cannot_be_read_it_is_not_known(tmp_path: Path) -> None:
    assert process_began_at_s(tmp_path / "none") is None
    (tmp_path / "stat").write_text("1 (x) S 1")
    assert process_began_at_s(tmp_path / "stat") is None
