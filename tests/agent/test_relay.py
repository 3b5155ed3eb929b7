"""Clients, agent and coordinator, as real processes and sockets."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tests.agent.stage import AgentProcess, FakeCoordinator, Stage
from tests.waiting import wait_until

from everstep.agent.peer import boot_id, start_ticks
from everstep.wire.codec import SCHEMA
from everstep.wire.messages import (
    Ack,
    Ask,
    ClientGone,
    Committed,
    Facts,
    FromClient,
    GroupSucceeded,
    Hello,
    Join,
    Leaving,
    Link,
    Numbered,
    Plan,
    Refused,
    SnapshotCommitted,
    ToClient,
    Welcome,
)

pytestmark = pytest.mark.e2e

LAUNCHER = Hello(role="launcher")
JOIN = Join(run_id="r", nonce=None, min_nodes=1, max_nodes=1, local_world_size=1)


def snapshot(step: int) -> SnapshotCommitted:
    return SnapshotCommitted(
        nonce="j", id=f"s{step:06d}-g1", step=step, generation=1, path="/s", world_size=1,
        bytes=1, write_s=0.1,
    )  # fmt: skip


@pytest.fixture
def coordinator(stage: Stage) -> FakeCoordinator:
    return stage.coordinator()


@pytest.fixture
def agent(stage: Stage, coordinator: FakeCoordinator) -> AgentProcess:
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    return agent


def test_a_launcher_is_welcomed_and_its_join_goes_up_with_the_kernels_word_on_who_it_is(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    welcome = client.greet(LAUNCHER)
    assert (welcome.node, welcome.schema, welcome.coordinator) == ("n1", SCHEMA, True)
    assert client.expect(Link).up

    client.say(JOIN)
    said = coordinator.expect(FromClient)
    assert said.body == JOIN
    assert said.seq == 0
    assert (said.peer.pid, said.peer.uid, said.peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert said.peer.start_ticks == start_ticks(os.getpid())
    assert said.peer.boot_id == boot_id()
    assert coordinator.bodies(Hello) == []


def test_two_clients_are_told_apart_and_each_gets_its_own_answers(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    one, two = stage.client(agent), stage.client(agent)
    one.greet(LAUNCHER)
    two.greet(LAUNCHER)
    one.say(Numbered(seq=7, body=snapshot(1)))
    two.say(Numbered(seq=9, body=snapshot(2)))
    first = coordinator.expect(FromClient, lambda m: m.body == snapshot(1))
    second = coordinator.expect(FromClient, lambda m: m.body == snapshot(2))
    assert first.client != second.client
    assert (first.seq, second.seq) == (7, 9)

    coordinator.say(ToClient(client=second.client, body=Ack(seq=9)))
    coordinator.say(ToClient(client=first.client, body=Ack(seq=7)))
    assert two.expect(Ack).seq == 9
    assert one.expect(Ack).seq == 7


def test_a_large_plan_reaches_its_launcher_whole(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say(JOIN)
    to = coordinator.expect(FromClient).client
    plan = Plan(job="j", run_id="r", generation=1, epoch=1, members=[], why="x" * 3_000_000)
    coordinator.say(ToClient(client=to, body=Committed(plan=plan)))
    assert client.expect(Committed).plan == plan


def test_a_message_for_a_client_that_is_gone_harms_nobody(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    coordinator.say(ToClient(client="c999", body=Ack(seq=1)))
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say(JOIN)
    coordinator.expect(FromClient)


def test_while_no_coordinator_is_reached_messages_are_dropped_and_clients_know_it(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    coordinator.stop()
    client.expect(Link, lambda m: not m.up)
    client.say(GroupSucceeded(nonce="lost", generation=1))
    client.say(Ask(what="status"))
    client.expect(Facts)  # so the one before has been looked at
    client.forget()

    coordinator.start()
    client.expect(Link, lambda m: m.up)
    client.say(GroupSucceeded(nonce="kept", generation=1))
    coordinator.expect(FromClient)
    assert [m.nonce for m in coordinator.bodies(GroupSucceeded)] == ["kept"]


def test_an_agent_without_a_coordinator_serves_its_clients(stage: Stage) -> None:
    client = stage.client(stage.agent())
    welcome = client.greet(LAUNCHER)
    assert not welcome.coordinator
    assert not client.expect(Link).up


def test_the_command_line_is_answered_here_and_the_coordinator_hears_nothing_of_it(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(Hello(role="cli"))
    client.say(Ask(what="status"))
    status = json.loads(client.expect(Facts).json)
    assert status["node"] == "n1"
    assert status["coordinator"]["connected"]
    assert [c["role"] for c in status["clients"]] == ["cli"]

    client.forget()
    client.say(Ask(what="plugins"))
    plugins = json.loads(client.expect(Facts).json)["plugins"]
    assert {p["name"] for p in plugins} >= {"host", "progress"}
    client.say(JOIN)  # not for a command line to say
    client.close()
    second = stage.client(agent)
    second.greet(LAUNCHER)
    second.say(JOIN)
    assert coordinator.expect(FromClient).client != status["clients"][0]["client"]
    assert coordinator.of(ClientGone) == []


def test_whoever_does_not_say_hello_first_is_refused(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.say(JOIN)
    assert "Hello" in client.expect(Refused).why
    client.expect_hang_up()
    assert coordinator.bodies(Join) == []


@pytest.mark.parametrize("schema", [SCHEMA + 2, SCHEMA - 2])
def test_a_client_two_schemas_away_is_refused_and_told_which_side_to_upgrade(
    stage: Stage, agent: AgentProcess, schema: int
) -> None:
    client = stage.client(agent)
    client.say(Hello(role="launcher", schema=schema))
    assert "upgrade" in client.expect(Refused).why
    client.expect_hang_up()


@pytest.mark.parametrize("schema", [SCHEMA + 1, SCHEMA - 1])
def test_a_client_one_schema_away_is_welcome(
    stage: Stage, agent: AgentProcess, schema: int
) -> None:
    stage.client(agent).greet(Hello(role="launcher", schema=schema))


SPEAKER = """
import os, socket, sys, time
from everstep.wire.codec import frame
from everstep.wire.messages import Hello, Leaving, GroupSucceeded
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(frame(Hello(role="launcher")))
if os.fork() == 0:
    time.sleep(300)  # a DataLoader worker: it has inherited the socket
print("ready", flush=True)
sys.stdin.readline()
for n in range(200):
    sock.sendall(frame(GroupSucceeded(nonce="last words", generation=n)))
os.kill(os.getpid(), 9)
"""


def test_a_killed_client_is_seen_at_once_though_its_child_holds_the_socket_and_after_all_it_said(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.run("import os; os.setpgid(0, 0)\n" + SPEAKER, agent.socket)
    assert client.stdout is not None
    assert client.stdin is not None
    try:
        assert client.stdout.readline() == "ready\n"
        client.stdin.write("\n")
        client.stdin.flush()
        gone = coordinator.expect(ClientGone)
    finally:
        os.killpg(client.pid, signal.SIGKILL)
    assert gone.died
    assert gone.peer.pid == client.pid
    said = [m for m in coordinator.heard if isinstance(m, FromClient | ClientGone)]
    assert said[-1] is gone
    assert [m.generation for m in coordinator.bodies(GroupSucceeded)] == list(range(200))


def test_a_client_that_hangs_up_and_lives_is_gone_but_has_not_died(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say(Leaving(nonce=None, exit_code=0, why="done"))
    client.close()
    gone = coordinator.expect(ClientGone)
    assert not gone.died
    assert gone.client == coordinator.expect(FromClient).client


def test_a_stopped_agent_says_nothing_about_its_clients(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say(JOIN)
    coordinator.expect(FromClient)
    assert agent.stop() == 0
    client.expect_hang_up()
    wait_until("the coordinator sees the connection closed", lambda: not coordinator.connected)
    assert coordinator.of(ClientGone) == []


def test_clients_welcomed_before_the_coordinator_came_are_told_when_it_does(stage: Stage) -> None:
    coordinator = stage.coordinator()
    coordinator.stop()
    agent = stage.agent(coordinator)
    client = stage.client(agent)
    assert not client.greet(LAUNCHER).coordinator
    coordinator.start()
    client.expect(Link, lambda m: m.up)
    assert client.expect(Welcome).node == "n1"
