"""The seam: unmodified torchrun, real ranks, plans made by hand."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.launch.scripted import Cluster, alive
from tests.waiting import wait_until

from everstep.wire.messages import GroupSucceeded, Join, Leaving, RankEnded, RanksStarted

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

THIRTY_SECOND_WAIT = "Unable to shutdown process"


def steps(cluster: Cluster, rank: int, generation: int) -> int:
    path = cluster.folder / f"rank{rank}-g{generation}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def let_finish(cluster: Cluster) -> None:
    (cluster.folder / "stop").touch()


def nobody_waited_thirty_seconds(cluster: Cluster) -> None:
    for launcher in cluster.launchers:
        assert THIRTY_SECOND_WAIT not in launcher.text()


def test_two_nodes_train_a_rank_dies_a_spare_takes_over_and_all_end_with_zero(
    cluster: Cluster, all_reduce: Path
) -> None:
    a, b, c = (cluster.node(n) for n in "abc")
    launchers = {n: cluster.torchrun(n, all_reduce) for n in "abc"}
    joins = [agent.expect(Join) for agent in (a, b, c)]
    assert {(j.min_nodes, j.max_nodes, j.local_world_size) for j in joins} == {(1, 4, 1)}

    cluster.commit(1, ["a", "b"])
    started = {agent.node: agent.expect(RanksStarted) for agent in (a, b)}
    assert [started["a"].ranks, started["b"].ranks] == [[0], [1]]
    wait_until("steps of generation 1", lambda: steps(cluster, 1, 1) > 5)

    os.kill(started["b"].pids[0], signal.SIGKILL)
    ended = b.expect(RankEnded)
    assert (ended.rank, ended.signal, ended.exit_code, ended.expected) == (1, 9, None, False)
    cluster.commit(2, ["a", "c"])
    assert a.expect(RanksStarted).generation == 2
    assert c.expect(RanksStarted).ranks == [1]
    wait_until("steps of generation 2", lambda: steps(cluster, 1, 2) > 5)

    let_finish(cluster)
    for agent in (a, c):
        assert agent.expect(GroupSucceeded).generation == 2
    cluster.over()
    assert [launchers[n].wait() for n in "abc"] == [0, 0, 0]
    nobody_waited_thirty_seconds(cluster)


def test_a_stopped_sibling_of_a_killed_rank_costs_two_seconds_not_thirty(
    cluster: Cluster, all_reduce: Path
) -> None:
    a = cluster.node("a")
    launcher = cluster.torchrun("a", all_reduce, nproc=2)
    a.expect(Join)
    cluster.commit(1, ["a"], nproc=2)
    pids = a.expect(RanksStarted).pids
    wait_until("steps", lambda: steps(cluster, 0, 1) > 2)

    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    ended = [a.expect(RankEnded) for _ in range(2)]
    assert [(e.rank, e.signal) for e in ended] == [(1, 9), (0, 9)]
    cluster.commit(2, ["a"], nproc=2)
    a.expect(RanksStarted)
    wait_until("steps again", lambda: steps(cluster, 1, 2) > 2)
    let_finish(cluster)
    a.expect(GroupSucceeded)
    cluster.over()
    assert launcher.wait() == 0
    nobody_waited_thirty_seconds(cluster)


def test_a_newer_plan_stops_ranks_that_ignore_sigterm(cluster: Cluster) -> None:
    script = cluster.folder / "deaf.py"
    script.write_text(
        "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
        "open(os.environ['TMPDIR'] + '/deaf', 'w').close()\ntime.sleep(600)\n"
    )
    a, b = cluster.node("a"), cluster.node("b")
    launcher = cluster.torchrun("a", script)
    cluster.torchrun("b", script)
    a.expect(Join)
    b.expect(Join)
    cluster.commit(1, ["a"])
    (pid,) = a.expect(RanksStarted).pids
    wait_until("a rank that hears no SIGTERM", (cluster.folder / "deaf").exists)
    cluster.commit(2, ["b"], evicted=("a",))
    wait_until("the old rank's end", lambda: not alive(pid))
    ended = a.expect(RankEnded)
    assert (ended.signal, ended.expected) == (9, True)
    wait_until("parked", lambda: "evicted from scripted: a test" in launcher.text())
    b.expect(RanksStarted)
    cluster.over(76, "stopped by an operator")
    assert [x.wait() for x in cluster.launchers] == [76, 76]
    nobody_waited_thirty_seconds(cluster)


def test_a_script_that_ends_with_zero_when_told_to_stop_has_not_succeeded(
    cluster: Cluster,
) -> None:
    script = cluster.folder / "polite.py"
    script.write_text(
        "import os, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\n"
        "open(os.environ['TMPDIR'] + '/polite', 'w').close()\ntime.sleep(600)\n"
    )
    a = cluster.node("a")
    cluster.torchrun("a", script)
    a.expect(Join)
    cluster.commit(1, ["a"])
    a.expect(RanksStarted)
    wait_until("a rank that is polite", (cluster.folder / "polite").exists)
    cluster.commit(2, ["a"])
    assert a.expect(RanksStarted).generation == 2
    assert a.count(GroupSucceeded) == 0


def test_ranks_and_their_strays_do_not_survive_a_killed_launcher(cluster: Cluster) -> None:
    script = cluster.folder / "stray.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "p = subprocess.Popen(sleep, start_new_session=True)\n"
        "open(os.environ['TMPDIR'] + '/stray', 'w').write(str(p.pid))\n"
        "time.sleep(600)\n"
    )
    a = cluster.node("a")
    launcher = cluster.torchrun("a", script)
    a.expect(Join)
    cluster.commit(1, ["a"])
    (pid,) = a.expect(RanksStarted).pids
    note = cluster.folder / "stray"
    wait_until("the stray", lambda: note.exists() and note.read_text())
    stray = int(note.read_text())
    launcher.kill()
    wait_until("the rank's end", lambda: not alive(pid))
    wait_until("the stray's end", lambda: not alive(stray))


def test_ranks_keep_stepping_while_the_agent_is_away_and_the_end_is_still_told(
    cluster: Cluster, all_reduce: Path
) -> None:
    a = cluster.node("a")
    launcher = cluster.torchrun("a", all_reduce)
    a.expect(Join)
    cluster.commit(1, ["a"])
    a.expect(RanksStarted)
    wait_until("steps", lambda: steps(cluster, 0, 1) > 2)
    a.close()
    before = steps(cluster, 0, 1)
    wait_until("steps without an agent", lambda: steps(cluster, 0, 1) > before + 20)
    let_finish(cluster)
    a.path.unlink()
    again = cluster.node("a")
    rejoin = again.expect(Join)
    assert rejoin.nonce == "n0nce"
    again.expect(GroupSucceeded)
    cluster.over()
    assert launcher.wait() == 0
    assert again.count(Leaving) <= 1


def test_a_user_bug_ends_with_its_traceback_and_its_exit_code(cluster: Cluster) -> None:
    script = cluster.folder / "bug.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise SystemExit(7) if 0 else ValueError('a bug of the user')\n"
        "main()\n"
    )
    a = cluster.node("a")
    launcher = cluster.torchrun("a", script)
    a.expect(Join)
    cluster.commit(1, ["a"])
    ended = a.expect(RankEnded)
    assert ended.exit_code == 1
    assert ended.error is not None
    assert "ValueError: a bug of the user" in ended.error
    assert any("a bug of the user" in line for line in ended.stderr_tail)
    cluster.over(ended.exit_code, "rank 0 failed twice the same way", ended.error)
    assert launcher.wait() == 1
    assert "everstep: rank 0 failed twice the same way" in launcher.text()
    assert "in next_rendezvous" not in launcher.text()
    nobody_waited_thirty_seconds(cluster)


@pytest.mark.parametrize("size", [0, 6_000_000])
def test_an_end_is_told_whatever_the_exception_says(cluster: Cluster, size: int) -> None:
    script = cluster.folder / "bug.py"
    script.write_text(
        "import os\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"@record\ndef main():\n    open(os.fsdecode(b'no\\xfc') + 'x' * {size})\n"
        "main()\n"
    )
    a = cluster.node("a")
    cluster.torchrun("a", script, "--role=\udcfc")
    assert "--role=\\udcfc" in a.expect(Join).command
    cluster.commit(1, ["a"])
    ended = a.expect(RankEnded)
    assert ended.exit_code == 1
    assert ended.error is not None
    assert "in main" in ended.error
    assert "no\\udcfc" in ended.error
    assert len(ended.error) < 100_000


def test_a_launcher_that_is_terminated_ends_its_ranks_within_its_grace(
    cluster: Cluster, all_reduce: Path
) -> None:
    a = cluster.node("a")
    launcher = cluster.torchrun("a", all_reduce)
    a.expect(Join)
    cluster.commit(1, ["a"])
    (pid,) = a.expect(RanksStarted).pids
    wait_until("steps", lambda: steps(cluster, 0, 1) > 2)
    launcher.process.terminate()
    assert launcher.wait() != 0
    wait_until("the rank's end", lambda: not alive(pid))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--max-restarts=3"], "pass --max-restarts=1000000"),
        (["--rdzv-id=none"], "pass --rdzv-id=NAME"),
        (["--rdzv-conf=on_evict=explode"], "on_evict must be park or exit"),
        (["--rdzv-conf=colour=red"], "unknown colour; known: join_timeout_s, on_evict"),
        (["--rdzv-conf=join_timeout_s=soon"], "join_timeout_s must be seconds"),
        (["--rdzv-conf=join_timeout_s=nan"], "join_timeout_s must be above 0 and at most"),
        (["--rdzv-conf=join_timeout_s=inf"], "join_timeout_s must be above 0 and at most"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    cluster: Cluster, all_reduce: Path, args: list[str], says: str
) -> None:
    cluster.node("a")
    launcher = cluster.torchrun("a", all_reduce, *args)
    assert launcher.wait() == 64
    assert says.lower() in launcher.text().lower()
    assert "Traceback" not in launcher.text()
