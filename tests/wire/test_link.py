"""A client's line to its agent, with a real agent at the other end that is killed and stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.agent.stage import AgentProcess, FakeCoordinator, Stage
from tests.waiting import wait_until

from everstep.wire.link import AgentLink
from everstep.wire.messages import (
    Ack,
    AgentMessage,
    ClientGone,
    ClientMessage,
    FromClient,
    GroupSucceeded,
    Hello,
    Join,
    Joined,
    Leaving,
    Link,
    RankProgress,
    Refused,
    ToClient,
    Welcome,
)
from everstep.wire.page import PageWriter, Place

pytestmark = pytest.mark.e2e

LAUNCHER = Hello(role="launcher")
JOIN = Join(run_id="r", nonce=None, min_nodes=1, max_nodes=1, local_world_size=1)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.fixture
def coordinator(stage: Stage) -> FakeCoordinator:
    return stage.coordinator()


@pytest.fixture
def agent(stage: Stage, coordinator: FakeCoordinator) -> AgentProcess:
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    return agent


class Owner:
    """Whoever uses a link, and what it was told."""

    def __init__(
        self,
        path: Path,
        *greeting: ClientMessage,
        hello: Hello = LAUNCHER,
        page_fd: int | None = None,
    ) -> None:
        self.heard: list[AgentMessage] = []
        self.link = AgentLink(
            path,
            hello,
            on_message=self.heard.append,
            greeting=lambda: greeting,
            page_fd=page_fd,
        )
        self.link.start()

    def of(self, kind: type[AgentMessage]) -> list[AgentMessage]:
        return [m for m in self.heard if isinstance(m, kind)]


@pytest.fixture
def owner(agent: AgentProcess) -> Iterator[Owner]:
    owner = Owner(agent.socket, JOIN)
    yield owner
    owner.link.close()


def seqs(coordinator: FakeCoordinator) -> list[int]:
    return [m.seq for m in coordinator.of(FromClient) if m.seq]


def acknowledge(coordinator: FakeCoordinator, seq: int) -> None:
    """Acknowledge to whoever is the client now."""
    to = coordinator.of(FromClient)[-1].client
    coordinator.say(ToClient(client=to, body=Ack(seq=seq)))


def test_it_greets_and_hears_and_its_owner_is_told(
    coordinator: FakeCoordinator, owner: Owner
) -> None:
    said = coordinator.expect(FromClient)
    assert said.body == JOIN
    coordinator.say(ToClient(client=said.client, body=Joined(nonce="n", node="n1")))
    wait_until("the answer arrives", lambda: owner.of(Joined))
    assert owner.link.connected
    assert owner.link.coordinator_up
    assert owner.link.last_error is None
    assert [type(m) for m in owner.heard[:2]] == [Welcome, Link]


def test_what_was_posted_is_repeated_after_the_agent_was_killed_until_it_is_acknowledged(
    coordinator: FakeCoordinator, agent: AgentProcess, owner: Owner
) -> None:
    coordinator.expect(FromClient)
    for generation in (1, 2, 3):
        owner.link.post(GroupSucceeded(nonce="n", generation=generation))
    wait_until("all three arrive", lambda: seqs(coordinator) == [1, 2, 3])
    acknowledge(coordinator, 1)
    wait_until("the first is done with", lambda: len(owner.link._outbox) == 2)

    agent.kill()
    wait_until("the link notices", lambda: not owner.link.connected)
    owner.link.post(GroupSucceeded(nonce="n", generation=4))
    owner.link.send(Leaving(nonce="n", exit_code=0, why="nobody hears this"))
    coordinator.forget()
    agent.start()
    wait_until("the rest is repeated, in order", lambda: seqs(coordinator) == [2, 3, 4])
    assert coordinator.of(FromClient)[0].body == JOIN  # the greeting goes first
    assert coordinator.bodies(Leaving) == []
    assert not owner.link.flush(0.1)
    acknowledge(coordinator, 4)
    assert owner.link.flush(20)


def test_what_was_posted_is_repeated_when_only_the_coordinator_went_away(
    coordinator: FakeCoordinator, owner: Owner
) -> None:
    coordinator.expect(FromClient)
    coordinator.stop()
    wait_until("the link is told", lambda: not owner.link.coordinator_up)
    owner.link.post(GroupSucceeded(nonce="n", generation=1))
    coordinator.forget()
    coordinator.start()
    wait_until("it arrives", lambda: seqs(coordinator) == [1])
    assert owner.link.connected


def test_a_rank_passes_its_page_again_to_a_new_agent(
    coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    writer = PageWriter(Place("j", 1, 0, 1, 0, os.getpid()))
    hello = Hello(role="rank", job="j", generation=1, rank=0, local_rank=0, page=True)
    owner = Owner(agent.socket, hello, hello=hello, page_fd=writer.fd)
    writer.enter("step", step=5)
    coordinator.rank(lambda r: r.step == 5)
    agent.kill()
    writer.enter("step", step=6)
    coordinator.forget()
    agent.start()

    def goes_on(rank: RankProgress) -> bool:
        return rank.step == 6

    assert coordinator.rank(goes_on).pid == os.getpid()
    assert hello in coordinator.bodies(Hello)
    owner.link.close()
    writer.close()


def test_an_agent_that_is_not_there_costs_nothing_and_is_found_when_it_comes(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    agent = stage.agent(coordinator, start=False)
    owner = Owner(agent.socket, JOIN)
    began_s = time.monotonic()
    for generation in range(100):
        owner.link.post(GroupSucceeded(nonce="n", generation=generation))
    assert time.monotonic() - began_s < 2.0
    wait_until("the reason is known", lambda: owner.link.last_error)
    assert str(agent.socket) in (owner.link.last_error or "")
    assert not owner.link.wait_connected(0.01)
    agent.start()
    assert owner.link.wait_connected(20)
    wait_until("all of it arrives", lambda: seqs(coordinator) == list(range(1, 101)))
    owner.link.close()


def test_a_stopped_agent_costs_its_clients_neither_time_nor_memory(
    coordinator: FakeCoordinator, agent: AgentProcess, owner: Owner
) -> None:
    coordinator.expect(FromClient)
    agent.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    text = "x" * 100_000
    for generation in range(200):
        owner.link.post(Leaving(nonce="n", exit_code=generation, why=text))
    assert time.monotonic() - began_s < 10.0
    assert owner.link._queued_bytes <= 8 * 1024 * 1024
    wait_until("it gives the connection up", lambda: not owner.link.coordinator_up)
    agent.signal(signal.SIGCONT)
    wait_until("nothing of it was lost", lambda: seqs(coordinator)[-200:] == list(range(1, 201)))


def test_closing_flushes_for_as_long_as_it_was_told_and_no_longer(
    coordinator: FakeCoordinator, owner: Owner
) -> None:
    coordinator.expect(FromClient)
    owner.link.post(GroupSucceeded(nonce="n", generation=1))
    owner.link.send(Leaving(nonce="n", exit_code=0, why="bye"))
    began_s = time.monotonic()
    owner.link.close(flush_s=0.5)
    assert 0.4 < time.monotonic() - began_s < 10.0
    assert coordinator.expect(ClientGone).died is False
    assert coordinator.bodies(Leaving)
    assert not owner.link._thread.is_alive()


def test_closing_ends_in_time_though_the_agent_is_stopped(
    agent: AgentProcess, coordinator: FakeCoordinator, owner: Owner
) -> None:
    coordinator.expect(FromClient)
    agent.signal(signal.SIGSTOP)
    for _ in range(20):
        owner.link.send(Leaving(nonce="n", exit_code=0, why="x" * 100_000))
    began_s = time.monotonic()
    owner.link.close()
    assert time.monotonic() - began_s < 10.0
    wait_until("the thread ends", lambda: not owner.link._thread.is_alive())
    agent.signal(signal.SIGCONT)


def test_an_owner_that_raises_loses_one_message_and_not_the_link(
    coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    heard: list[AgentMessage] = []

    def stumble(message: AgentMessage) -> None:
        heard.append(message)
        raise RuntimeError("a bug of the owner")

    link = AgentLink(
        agent.socket, Hello(role="launcher"), on_message=stumble, greeting=lambda: [JOIN]
    )
    link.start()
    to = coordinator.expect(FromClient).client
    for nonce in ("a", "b"):
        coordinator.say(ToClient(client=to, body=Joined(nonce=nonce, node="n1")))
    wait_until("both arrive", lambda: sum(isinstance(m, Joined) for m in heard) == 2)
    assert link.connected
    link.close()


def test_a_message_that_no_agent_takes_holds_up_nothing(
    coordinator: FakeCoordinator, owner: Owner
) -> None:
    coordinator.expect(FromClient)
    owner.link.post(Leaving(nonce="n", exit_code=1, why="x" * 3_000_000))
    owner.link.post(GroupSucceeded(nonce="n", generation=1))
    assert coordinator.expect(FromClient, lambda m: isinstance(m.body, GroupSucceeded)).seq == 1


def test_a_refused_client_does_not_hammer_the_agent(agent: AgentProcess) -> None:
    refused: list[float] = []

    def note(message: AgentMessage) -> None:
        if isinstance(message, Refused):
            refused.append(time.monotonic())

    link = AgentLink(agent.socket, Hello(role="launcher", schema=99), on_message=note)
    link.start()
    wait_until("several refusals", lambda: len(refused) >= 5)
    link.close()
    assert refused[4] - refused[0] > 0.7  # 0.1, 0.2, 0.4, 0.8 s, each at least half


def test_a_forked_worker_does_not_hold_the_connection(
    coordinator: FakeCoordinator, stage: Stage, agent: AgentProcess
) -> None:
    code = """
import os, sys, time
from pathlib import Path
from everstep.wire.link import AgentLink
from everstep.wire.messages import Hello, Join, GroupSucceeded
join = Join(run_id="r", nonce=None, min_nodes=1, max_nodes=1, local_world_size=1)
hello = Hello(role="launcher")
link = AgentLink(Path(sys.argv[1]), hello, on_message=print, greeting=lambda: [join])
link.start()
while not link.coordinator_up: time.sleep(0.01)
if os.fork() == 0:
    link.post(GroupSucceeded(nonce="from the child", generation=1))
    link.close()
    print("child is fine", flush=True)
    time.sleep(300)
    os._exit(0)
sys.stdin.readline()
link.close()  # the connection ends here, although the worker lives
sys.stdin.readline()
"""
    parent = stage.run("import os; os.setpgid(0, 0)\n" + code, agent.socket)
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        while "child is fine" not in (line := parent.stdout.readline()):
            assert line
        parent.stdin.write("\n")
        parent.stdin.flush()
        gone = coordinator.expect(ClientGone)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
    assert not gone.died
    assert coordinator.bodies(GroupSucceeded) == []


def test_many_links_come_and_go_without_leaving_a_thread_or_a_descriptor(
    agent: AgentProcess, coordinator: FakeCoordinator
) -> None:
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        owner = Owner(agent.socket)
        assert owner.link.wait_connected(20)
        owner.link.close()
    AgentLink(agent.socket, Hello(role="rank"), on_message=print).close()  # never started
    assert coordinator.connected
    assert settled(threading.active_count, threads)
    assert settled(lambda: len(list(Path("/proc/self/fd").iterdir())), files)


def settled(count: Callable[[], int], most: int) -> bool:
    wait_until("everything is given back", lambda: count() <= most)
    return True
