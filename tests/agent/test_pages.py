"""Progress pages of real ranks, good ones and others."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.agent.stage import AgentProcess, FakeCoordinator, RawClient, Stage
from tests.waiting import wait_until

from everstep.wire.messages import (
    ClientGone,
    Finding,
    FromClient,
    Heartbeat,
    Hello,
    NodeFinding,
    RankFinding,
    Tally,
)
from everstep.wire.page import PAGE_BYTES, PageWriter, Place, StepRecord

pytestmark = pytest.mark.e2e

NAN = float("nan")
HELLO = Hello(role="rank", job="j", generation=2, rank=1, local_rank=1, world_size=4, page=True)


def record(step: int, step_s: float = 0.01, loss: float = 2.5) -> StepRecord:
    return StepRecord(
        step, time.time(), time.monotonic_ns(), step_s, 0, 0, 0, 0, 0, loss, NAN, 512, 1e-3
    )


@pytest.fixture
def writer() -> Iterator[PageWriter]:
    writer = PageWriter(Place("j", 2, 1, 4, 1, os.getpid()))
    yield writer
    writer.close()


@pytest.fixture
def coordinator(stage: Stage) -> FakeCoordinator:
    return stage.coordinator()


@pytest.fixture
def agent(stage: Stage, coordinator: FakeCoordinator) -> AgentProcess:
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    return agent


def rank(stage: Stage, agent: AgentProcess, writer: PageWriter) -> RawClient:
    client = stage.client(agent)
    client.greet(HELLO, writer.fd)
    return client


def test_heartbeats_tell_what_the_page_says(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess, writer: PageWriter
) -> None:
    rank(stage, agent, writer)
    assert coordinator.bodies(Hello) == [HELLO] or coordinator.expect(FromClient).body == HELLO
    writer.enter("step", step=1)
    for step in range(1, 12):
        done = record(step, step_s=0.5 + step / 100)
        writer.finished(done._replace(data_s=0.5, snapshot_s=0.25, wall_at_s=1e9 + step))
    told = coordinator.rank(lambda r: r.step == 11)
    assert (told.job, told.generation, told.rank, told.phase) == ("j", 2, 1, "step")
    assert (told.pid, told.uid) == (os.getpid(), os.getuid())
    assert (told.loss, told.grad_norm, told.tokens, told.lr) == (2.5, None, 512, 1e-3)
    assert told.step_s == pytest.approx(0.61)
    assert told.p99_step_s == pytest.approx(0.61)
    assert 0 <= told.standing_s < 20
    assert told.tally == Tally(11, 1e9 + 11, 5.5, 2.75)


def test_a_page_leaves_with_its_client(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess, writer: PageWriter
) -> None:
    before = agent.open_files()
    client = rank(stage, agent, writer)
    coordinator.rank()
    writer.finished(record(12, step_s=0.1))
    client.close()
    gone = coordinator.expect(ClientGone)
    assert gone.last is not None
    assert gone.last.step == 12, "what was done since the last heartbeat is told at the end"
    coordinator.forget()
    coordinator.expect(Heartbeat, lambda b: not b.ranks)
    wait_until("the page is unmapped", lambda: agent.open_files() <= before)


def unsealed() -> int:
    fd = os.memfd_create("page", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def shrunk() -> int:
    fd = unsealed()
    os.ftruncate(fd, 100)
    return fd


def sealed_at(size: int) -> int:
    fd = os.memfd_create("page", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, 1033, 0x1 | 0x2 | 0x4 | 0x10)
    return fd


def another_ranks() -> int:
    writer = PageWriter(Place("j", 2, 3, 4, 1, os.getpid()))
    fd = os.dup(writer.fd)
    writer.close()
    return fd


BAD_PAGES = {
    "unsealed": (unsealed, "seals"),
    "shrunk": (shrunk, "seals"),
    "too small": (lambda: sealed_at(100), "size is 100"),
    "too large": (lambda: sealed_at(PAGE_BYTES * 2), "size is"),
    "empty": (lambda: sealed_at(PAGE_BYTES), "header"),
    "of another rank": (another_ranks, "the page says"),
    "no memory file": (lambda: os.open("/dev/zero", os.O_RDONLY), "not a memory file"),
}


@pytest.mark.parametrize("kind", BAD_PAGES)
def test_a_bad_page_costs_the_page_and_nothing_else(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess, kind: str
) -> None:
    make, why = BAD_PAGES[kind]
    fd = make()
    client = stage.client(agent)
    client.greet(HELLO, fd)
    if kind in ("unsealed", "shrunk"):
        os.ftruncate(fd, 0)  # would be a SIGBUS for whoever had mapped it
    os.close(fd)
    found = coordinator.expect(NodeFinding)
    assert (found.plugin, found.finding.name) == ("agent", "page.refused")
    assert (found.finding.severity, found.finding.component) == ("warning", "rank:1")
    assert why in found.finding.summary

    finding = Finding(name="n", component="rank:1", severity="info", summary="s", at_s=1.0)
    client.say(RankFinding(nonce="j", rank=1, step=1, finding=finding))
    coordinator.expect(FromClient, lambda m: isinstance(m.body, RankFinding))
    coordinator.forget()
    assert coordinator.expect(Heartbeat).ranks == []


def test_a_page_that_is_announced_and_does_not_come_is_a_finding_too(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    stage.client(agent).greet(HELLO)
    assert "no descriptor" in coordinator.expect(NodeFinding).finding.summary


def test_a_standstill_is_told_at_once_and_twice_a_second_while_it_lasts(
    stage: Stage, coordinator: FakeCoordinator, writer: PageWriter
) -> None:
    agent = stage.agent(coordinator, config="[agent]\nheartbeat_s = 600\nreply_timeout_s = 600\n")
    coordinator.expect_connected()
    rank(stage, agent, writer)
    writer.enter("step", step=1)
    for step in range(1, 6):
        writer.finished(record(step))
    wait_until("heartbeats out of turn", lambda: len(coordinator.of(Heartbeat)) >= 4)
    beats = [b for b in coordinator.of(Heartbeat) if b.ranks and b.ranks[0].standing_s > 2]
    assert len(beats) >= 3
    assert beats[0].ranks[0].standing_s < 12
    gaps = [b.sent_at_s - a.sent_at_s for a, b in pairwise(beats)]
    assert all(gap > 0.4 for gap in gaps)

    writer.finished(record(6))
    wait_until("the agent sees it move", lambda: agent.status()["ranks"][0]["step"] == 6)
    writer.enter("snapshot")
    coordinator.forget()
    time_passes(agent, 3.0)
    assert coordinator.of(Heartbeat) == []  # a snapshot may take as long as it likes


def time_passes(agent: AgentProcess, seconds: float) -> None:
    """Wait until the agent, by its own word, has lived so much longer."""
    end_s = agent.health()["uptime_s"] + seconds
    wait_until(f"{seconds} s pass", lambda: agent.health()["uptime_s"] > end_s)


def test_an_agent_that_was_stopped_claims_no_standstill_of_the_time_it_slept(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess, writer: PageWriter
) -> None:
    rank(stage, agent, writer)
    writer.enter("step", step=1)
    for step in range(1, 6):
        writer.finished(record(step))
    coordinator.rank(lambda r: r.step == 5)

    agent.signal(signal.SIGSTOP)
    slept_from_s = time.monotonic()
    wait_until("it sleeps for five seconds", lambda: time.monotonic() - slept_from_s > 5)
    coordinator.forget()
    agent.signal(signal.SIGCONT)
    wait_until("it goes on", lambda: len(coordinator.of(Heartbeat)) >= 2)
    first, second = (b.ranks[0].standing_s for b in coordinator.of(Heartbeat)[:2])
    assert first < 1.0  # though the page itself has stood for more than five
    assert second < 4.0
    assert "the agent stood still" in agent.log
