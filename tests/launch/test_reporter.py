"""What a rank of a script that knows nothing of everstep shows of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.launch.scripted import Cluster
from tests.waiting import wait_until

from everstep.launch.warm import reporter
from everstep.launch.warm.reporter import LOOK_S, QUIET_S, Reporter
from everstep.wire.messages import Hello

ENVIRON = {"EVERSTEP_JOB": "n", "EVERSTEP_GENERATION": "3", "RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def watched(cluster: Cluster) -> Iterator[tuple[Reporter, list[int], Any]]:
    agent = cluster.node("a")
    count = [0]
    environ = {**ENVIRON, "LOCAL_RANK": "1", "EVERSTEP_SOCKET": str(agent.path)}
    made = Reporter(environ, lambda: count[0])
    yield made, count, agent
    made.withdraw()


def test_nothing_is_shown_before_a_collective_has_finished(
    watched: tuple[Reporter, list[int], Any],
) -> None:
    made, count, agent = watched
    made.look()
    assert agent.count(Hello) == 0
    count[0] = 5
    made.look()
    hello = agent.expect(Hello)
    assert (hello.role, hello.job, hello.generation, hello.rank) == ("rank", "n", 3, 1)
    assert hello.page


def test_a_counter_that_stands_is_withdrawn_and_shown_again_when_it_moves(
    watched: tuple[Reporter, list[int], Any],
) -> None:
    made, count, agent = watched
    count[0] = 1
    made.look()
    agent.expect(Hello)
    for _ in range(int(QUIET_S / LOOK_S)):
        made.look()
    assert made._page is None
    count[0] = 2
    made.look()
    agent.expect(Hello)


def test_finished_collectives_of_all_groups_are_counted() -> None:
    script = (
        "import time, torch, torch.distributed as dist\n"
        "from everstep.launch.warm.reporter import finished_collectives as count\n"
        "assert count() == 0\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "other = dist.new_group()\n"
        "ones, end = torch.ones(2), time.monotonic() + 20\n"
        "for group in (None, other):\n"
        "    before = count()\n"
        # torch's two threads may put their counts down in the wrong order: the next one mends it.
        "    while count() <= before and time.monotonic() < end:\n"
        "        dist.all_reduce(ones, group=group)\n"
        "    print(count() > before)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout == "True\nTrue\n"


def test_without_a_job_there_is_no_thread() -> None:
    reporter.start({})
    import threading

    assert not [t for t in threading.enumerate() if t.name == "everstep-reporter"]


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_plain_script_under_torchrun_is_seen(cluster: Cluster, all_reduce: Path) -> None:
    from everstep.wire.messages import Join, RanksStarted

    a = cluster.node("a")
    launcher = cluster.torchrun("a", all_reduce, nproc=2)
    a.expect(Join)
    cluster.commit(1, ["a"], nproc=2)
    a.expect(RanksStarted)

    def seen() -> set[int | None]:
        return {m.rank for m in a.got if isinstance(m, Hello) and m.role == "rank"}

    wait_until("both ranks", lambda: seen() == {0, 1})
    os.close(os.open(cluster.folder / "stop", os.O_CREAT))
    cluster.over()
    assert launcher.wait() == 0
    assert "everstep-reporter" not in launcher.text()
