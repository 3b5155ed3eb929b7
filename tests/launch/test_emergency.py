"""The launcher's side of an emergency snapshot: whom it asks, how long it waits, what it says."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from tests.launch.scripted import Cluster, alive
from tests.waiting import DEADLINE_S, wait_until

from everstep.launch.control import Armed, Emergency, End, Saved, Signalled, ToRank
from everstep.launch.emergency import Emergency as Asking
from everstep.launch.emergency import grace_s, outcome
from everstep.sdk.config import ConfigError
from everstep.wire.messages import Join, Leaving, RankEnded, RanksStarted


class FakeLine:
    """What the launcher sees of a rank's connection."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sent: list[ToRank] = []
        self.news = threading.Event()

    def send(self, order: ToRank) -> bool:
        self.sent.append(order)
        self.news.set()
        return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def armed(asking: Asking, *lines: FakeLine) -> None:
    for number, line in enumerate(lines):
        asking.heard(line, Armed(generation=1, local_rank=number))  # type: ignore[arg-type]  # a fake


def saved(number: int, **more: object) -> Saved:
    facts = {"id": "s000007-g1", "step": 7} | more
    return Saved(generation=1, local_rank=number, **facts)  # type: ignore[arg-type]  # a test's


def test_all_armed_ranks_are_asked_once_and_their_answers_come_in_order() -> None:
    lines = [FakeLine(pid) for pid in (10, 11)]
    asking = Asking(25.0, ending=lambda: False)
    armed(asking, *lines)
    assert asking.ask() == 2
    assert asking.ask() == 0, "a second time nobody is asked"
    for line in lines:
        (order,) = line.sent
        assert isinstance(order, Emergency)
        assert 20 < order.grace_s <= 25
    asking.heard(lines[1], saved(1))  # type: ignore[arg-type]  # a fake
    asking.heard(lines[0], saved(0))  # type: ignore[arg-type]  # a fake
    assert [a.local_rank for a in asking.wait()] == [0, 1]


def test_a_rank_that_hangs_up_is_not_waited_for_nor_one_that_is_slower_than_the_grace() -> None:
    clock = Clock()
    asking = Asking(25.0, ending=lambda: False, clock=clock)
    gone, slow = FakeLine(10), FakeLine(11)
    armed(asking, gone, slow)
    asking.ask()
    asking.heard(gone, None)  # type: ignore[arg-type]  # a fake
    clock.now_s = 25.0
    assert asking.wait() == []
    assert asking.left_s() == 0.0


def test_a_rank_that_is_armed_later_is_asked_then() -> None:
    asking = Asking(25.0, ending=lambda: False)
    assert asking.ask() == 0
    late = FakeLine(10)
    armed(asking, late)
    assert isinstance(late.sent[0], Emergency)


def test_a_second_signal_ends_the_wait() -> None:
    asking = Asking(3600.0, ending=lambda: False)
    armed(asking, FakeLine(10))
    asking.ask()
    threading.Timer(0.05, asking.abort).start()
    assert asking.wait() == []
    assert asking.left_s() == 0.0


def test_sigterm_in_a_rank_that_torchrun_restarts_means_its_end() -> None:
    asking, line = Asking(25.0, ending=lambda: True), FakeLine(10)
    armed(asking, line)
    asking.heard(line, Signalled(generation=1))  # type: ignore[arg-type]  # a fake
    assert line.sent == [End(generation=1)]


def test_sigterm_without_a_reason_may_be_the_launchers_a_moment_later() -> None:
    asking, line = Asking(25.0, ending=lambda: False), FakeLine(10)
    armed(asking, line)
    asking.heard(line, Signalled(generation=1))  # type: ignore[arg-type]  # a fake
    asking.ask()
    assert [type(order) for order in line.sent] == [Emergency]
    other = Asking(25.0, ending=lambda: False)
    alone = FakeLine(11)
    other.heard(alone, Signalled(generation=1))  # type: ignore[arg-type]  # a fake
    assert alone.news.wait(DEADLINE_S)
    assert alone.sent == [End(generation=1)]


def test_with_a_grace_of_nothing_nobody_is_asked() -> None:
    asking, line = Asking(0.0, ending=lambda: False), FakeLine(10)
    armed(asking, line)
    assert asking.ask() == 0
    asking.heard(line, Signalled(generation=1))  # type: ignore[arg-type]  # a fake
    assert line.sent == [End(generation=1)]


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_grace_that_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="EVERSTEP_GRACE_S"):
        grace_s({"EVERSTEP_GRACE_S": text})
    assert grace_s({}) == 25.0
    assert grace_s({"EVERSTEP_GRACE_S": "0"}) == 0.0


def test_what_went_wrong_is_said_with_what_stays() -> None:
    told = outcome([saved(0), saved(1, id="s000008-g1")], 3, written_s=1.0, late="")
    assert "1 of 3 ranks" in told
    assert "different steps (s000007-g1, s000008-g1)" in told
    assert told.endswith("The last good one stays")
    told = outcome([saved(0, id="", why="no step yet")], 1, written_s=0.0, late="")
    assert told == "no emergency snapshot: local rank 0: no step yet. The last good one stays"


ARMED = """
import os, signal, socket, time
from everstep.launch.control import Armed
from everstep.wire.codec import frame
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sock = socket.socket(socket.AF_UNIX)
sock.connect(os.environ["EVERSTEP_CONTROL"])
sock.sendall(frame(Armed(generation=1, local_rank=0)))
open(os.environ["TMPDIR"] + "/armed", "w").close()
time.sleep(3600)
"""


def hung(cluster: Cluster) -> int:
    """Start a rank that is armed and never answers; return its pid."""
    script = cluster.folder / "armed.py"
    script.write_text(ARMED)
    node = cluster.node("a")
    cluster.torchrun("a", script)
    node.expect(Join)
    cluster.commit(1, ["a"])
    (pid,) = node.expect(RanksStarted).pids
    wait_until("an armed rank", (cluster.folder / "armed").exists)
    time.sleep(0.2)  # its word is on its way
    return pid


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_when_the_grace_is_over_the_launcher_gives_up_and_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_GRACE_S", "1.5")
    pid = hung(cluster)
    (launcher,) = cluster.launchers
    launcher.process.send_signal(signal.SIGTERM)
    leaving = cluster.agents["a"].expect(Leaving)
    assert (leaving.why, leaving.exit_code) == ("SIGTERM", 143)
    assert launcher.wait() == 1
    assert "an emergency snapshot is asked of 1 local rank(s), within 1.5 s" in launcher.text()
    assert "no emergency snapshot: 1 of 1 ranks ended or did not answer" in launcher.text()
    assert not alive(pid)
    ended = cluster.agents["a"].got
    assert all(e.expected for e in ended if isinstance(e, RankEnded))


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_second_sigterm_ends_the_launcher_and_its_ranks_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_GRACE_S", "3600")
    pid = hung(cluster)
    (launcher,) = cluster.launchers
    launcher.process.send_signal(signal.SIGTERM)
    wait_until("the question", lambda: "an emergency snapshot is asked" in launcher.text())
    launcher.process.send_signal(signal.SIGTERM)
    begin_s = time.monotonic()
    assert launcher.wait() == 1
    assert time.monotonic() - begin_s < 20, "far from the grace, and from torchrun's 30 s"
    wait_until("the rank's end", lambda: not alive(pid))
