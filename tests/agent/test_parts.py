"""The smaller parts of the agent, each alone."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.clock_offset import ClockOffset
from everstep.agent.config import AgentConfig, Overrides, settle
from everstep.agent.findings import REPEAT_S, Findings
from everstep.agent.logs import KeyValue
from everstep.agent.metrics import Exposition
from everstep.agent.peer import (
    PeerGoneError,
    has_ended,
    identify,
    pidfd_by_number,
    start_ticks,
)
from everstep.agent.readings import Readings
from everstep.sdk.config import ConfigFile
from everstep.wire.messages import Finding, NodeFinding, Reading, Severity

OpenPidfd = Callable[[socket.socket, int], int]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


# ------------------------------------------------------------------------------ clock offsets


@given(
    offset=st.floats(-1e5, 1e5),
    trips=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5)), min_size=1),
)
def test_the_true_offset_is_always_within_the_bound(
    offset: float, trips: list[tuple[float, float, float]]
) -> None:
    clock = ClockOffset()
    now = 1000.0
    for there, work, back in trips:
        sent = now
        received = sent + there + offset
        answered = received + work
        now = sent + there + work + back
        clock.add(sent, received, answered, now, mono_s=now)
    best = clock.best(mono_s=now)
    assert best is not None
    assert abs(best.offset_s - offset) <= best.error_s + 1e-6


def test_the_quickest_round_trip_is_believed_and_grows_doubtful_with_age() -> None:
    clock = ClockOffset()
    clock.add(0.0, 10.0, 10.0, 2.0, mono_s=2.0)
    clock.add(3.0, 12.01, 12.01, 3.02, mono_s=3.02)
    best = clock.best(mono_s=3.02)
    assert best is not None
    assert best.error_s == pytest.approx(0.01)
    old = clock.best(mono_s=1003.02)
    assert old is not None
    assert old.error_s == pytest.approx(0.11)


def test_when_this_nodes_clock_is_set_what_was_learned_before_is_forgotten() -> None:
    clock = ClockOffset()
    clock.add(0.0, 10.0, 10.0, 0.01, mono_s=0.01)
    clock.add(3600.0, 11.0, 11.0, 3600.5, mono_s=1.5)
    best = clock.best(mono_s=1.5)
    assert best is not None
    assert best.offset_s == pytest.approx(-3589.25)


def test_a_clock_set_in_the_middle_of_a_trip_teaches_nothing() -> None:
    clock = ClockOffset()
    clock.add(100.0, 10.0, 10.0, 50.0, mono_s=1.0)
    clock.add(100.0, float("nan"), float("inf"), 101.0, mono_s=2.0)
    assert clock.best(mono_s=1.0) is None


# ------------------------------------------------------------------------------------ findings


def finding(name: str = "hot", *, resolved: bool = False, severity: Severity = "error") -> Finding:
    return Finding(
        name=name, component="host", severity=severity, summary="s", at_s=1.0, resolved=resolved
    )


def test_the_same_finding_is_told_again_only_after_a_minute_or_when_it_changes() -> None:
    sent: list[NodeFinding] = []
    clock = Clock()
    findings = Findings(sent.append, clock)
    findings.add("p", finding())
    findings.add("p", finding())
    findings.add("q", finding())
    findings.add("p", finding(severity="fatal"))
    assert [(m.plugin, m.finding.severity) for m in sent] == [
        ("p", "error"), ("q", "error"), ("p", "fatal"),
    ]  # fmt: skip
    clock.now_s = REPEAT_S + 1
    findings.add("q", finding())
    assert len(sent) == 4
    assert [m.seq for m in sent] == [1, 2, 3, 4]


def test_an_end_closes_the_finding_and_a_new_beginning_opens_it() -> None:
    sent: list[NodeFinding] = []
    findings = Findings(sent.append, Clock())
    findings.add("p", finding())
    assert [f.name for _, f in findings.open()] == ["hot"]
    findings.add("p", finding(resolved=True))
    assert findings.open() == []
    findings.add("p", finding())
    assert [m.finding.resolved for m in sent] == [False, True, False]


def test_findings_that_nobody_takes_are_bounded_and_the_loss_is_known() -> None:
    clock = Clock()
    findings = Findings(lambda _: None, clock)
    for n in range(1100):
        clock.now_s += 1.0
        findings.add("p", finding(f"f{n}"))
    assert findings.unacknowledged == 1000
    assert findings.dropped == 100
    findings.ack(1100)
    assert findings.unacknowledged == 0


# ------------------------------------------------------------------------- readings, metrics


def test_readings_of_a_source_that_no_longer_speaks_grow_too_old() -> None:
    clock = Clock()
    table = Readings(clock=clock)
    table.put("a", [Reading(name="x", value=1.0)], keep_s=5.0)
    table.put("b", [Reading(name="y", value=1.0)], keep_s=50.0)
    clock.now_s = 6.0
    assert [r.name for r in table.latest()] == ["y"]


def test_jobs_come_and_go_and_the_exposition_stays_small() -> None:
    readings: list[Reading] = []
    exposition = Exposition({"service.name": "x"}, lambda: readings, stale_series=50)
    for job in range(100):
        readings[:] = [
            Reading(name="rank.step", value=job, attributes={"job": f"j{job}", "rank": str(r)})
            for r in range(8)
        ]
        readings.append(Reading(name="job.count", value=job, counter=True))
        text = exposition.text().decode()
        assert text.count("rank_step{") == 8
        assert f"job_count_total {float(job)}" in text
    assert len(exposition._known) <= 70


def test_two_shapes_of_one_name_do_not_spoil_the_page() -> None:
    readings = [
        Reading(name="a.b", value=1.0, unit="s"),
        Reading(name="a.b", value=2.0, unit="By", attributes={"x": "y"}),
        Reading(name="a.b", value=3.0, unit="s", counter=True, attributes={"x": "z"}),
        Reading(name="a_b", value=4.0, unit="s"),
        Reading(name="a.b", value=None, unit="s", attributes={"x": "unsupported"}),
    ]
    text = Exposition({}, lambda: readings).text().decode()
    lines = [line for line in text.splitlines() if line.startswith("a_b")]
    assert lines == ["a_b_seconds 1.0"]


# ------------------------------------------------------------------------------------- peers


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


@pytest.mark.parametrize("open_pidfd", [None, pidfd_by_number], ids=["SO_PEERPIDFD", "by number"])
def test_the_kernel_names_the_peer(open_pidfd: OpenPidfd | None) -> None:
    ours, theirs = pair()
    with ours, theirs:
        identity = identify(ours, open_pidfd=open_pidfd)
        assert identity.peer.pid == os.getpid()
        assert identity.peer.start_ticks == start_ticks(os.getpid())
        assert not has_ended(identity.pidfd)
        os.close(identity.pidfd)


def test_a_number_that_went_to_another_process_is_not_believed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ours, theirs = pair()

    def ended_meanwhile(_: socket.socket, __: int) -> int:
        pidfd = os.pidfd_open(child.pid)
        child.kill()
        child.wait()
        return pidfd

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a count
    with ours, theirs, pytest.raises(PeerGoneError):
        identify(ours, open_pidfd=ended_meanwhile)
    assert len(os.listdir("/proc/self/fd")) == before - 2  # noqa: PTH208  a count


def test_a_name_with_parentheses_does_not_confuse_the_start_time() -> None:
    code = (
        "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, b') R 1 (x', 0, 0, 0);"
        "print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert abs(start_ticks(child.pid) - start_ticks(os.getpid())) < 100 * 3600 * 24
        child.kill()
        child.stdout.close()
    with pytest.raises(PeerGoneError):
        start_ticks(child.pid)


# ------------------------------------------------------------------------------ settings, logs


def test_the_command_line_goes_before_the_file_and_the_file_before_the_environment() -> None:
    file = ConfigFile(None, {"agent": {"node": "f", "socket": "/f", "listen": "127.0.0.1:1"}})
    environ = {"EVERSTEP_SOCKET": "/e"}
    given = settle(file, Overrides("c", Path("/c"), "[::1]:2", ("h:3",)), environ)
    assert (given.node, str(given.socket), given.host, given.port) == ("c", "/c", "::1", 2)
    assert given.coordinators == ("ws://h:3/v1/agent",)
    from_file = settle(file, Overrides(), environ)
    assert (from_file.node, str(from_file.socket), from_file.port) == ("f", "/f", 1)
    default = settle(ConfigFile(), Overrides(), environ)
    assert (default.node, str(default.socket)) == (socket.gethostname(), "/e")


def test_every_key_of_the_table_is_explained_in_the_readme() -> None:
    readme = Path(__file__).parents[2] / "agent" / "README.md"
    table = readme.read_text().split("[agent]")[1].split("[collectors")[0]
    keys = set(AgentConfig.__struct_fields__) - {"token"}  # a secret belongs into a file of its own
    assert {line.split(" =")[0] for line in table.splitlines() if " = " in line} == keys


def test_a_log_line_is_one_event_and_cannot_be_forged() -> None:
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "client: %s", ("a\nb",), None)
    record.__dict__.update({"pid": 7, "why": 'he said "no"\n<0>kernel: panic'})
    assert (
        KeyValue(journal=True).format(record)
        == '<4>warning client: a\\nb pid=7 why="he said \\"no\\"\\n<0>kernel: panic"'
    )
