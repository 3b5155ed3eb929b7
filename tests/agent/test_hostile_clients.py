"""What a client may get wrong, by mistake or on purpose, and what it costs the others: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agent.stage import AgentProcess, FakeCoordinator, RawClient, Stage
from tests.waiting import wait_until

from everstep.wire.codec import encode, frame
from everstep.wire.messages import (
    Ack,
    Ask,
    Facts,
    FromClient,
    GroupSucceeded,
    Hello,
    Join,
    Refused,
    ToClient,
)

pytestmark = pytest.mark.e2e

LAUNCHER = Hello(role="launcher")
CLI = Hello(role="cli")
JOIN = Join(run_id="r", nonce=None, min_nodes=1, max_nodes=1, local_world_size=1)


@pytest.fixture
def coordinator(stage: Stage) -> FakeCoordinator:
    return stage.coordinator()


@pytest.fixture
def agent(stage: Stage, coordinator: FakeCoordinator) -> AgentProcess:
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    return agent


@pytest.fixture
def others_are_served(stage: Stage, agent: AgentProcess) -> Iterator[None]:
    """Whatever the test does, another client is answered at once afterwards."""
    yield
    client = stage.client(agent)
    client.greet(CLI)
    began_s = time.monotonic()
    client.say(Ask(what="status"))
    client.expect(Facts)
    assert time.monotonic() - began_s < 5.0


def raw(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.usefixtures("others_are_served")
def test_a_malformed_message_is_skipped_and_the_next_one_counts(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say_bytes(raw(b"\xc1not msgpack"))
    client.say_bytes(raw(encode(JOIN).replace(b"Join", b"Jion")))
    client.say_bytes(raw(b"") + raw(b"\x80"))
    client.say(JOIN)
    assert coordinator.expect(FromClient).body == JOIN
    assert agent.log.count("malformed message") == 1  # said once for each client, counted always
    metrics = agent.get("/metrics")[1]
    wait_until(
        f"the faults are counted: {metrics}",
        lambda: (
            'everstep_client_faults_total{error_type="malformed message"} 4.0'
            in agent.get("/metrics")[1]
        ),
    )


@pytest.mark.usefixtures("others_are_served")
def test_a_client_that_sends_nothing_but_nonsense_is_hung_up_on(
    stage: Stage, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    with contextlib.suppress(OSError):
        for _ in range(2000):
            client.say_bytes(raw(os.urandom(16)))
    client.expect_hang_up()


@pytest.mark.usefixtures("others_are_served")
@pytest.mark.parametrize("hello", [LAUNCHER, None], ids=["after hello", "before hello"])
def test_a_frame_of_absurd_length_ends_the_connection(
    stage: Stage, agent: AgentProcess, hello: Hello | None
) -> None:
    client = stage.client(agent)
    if hello:
        client.greet(hello)
    client.say_bytes(b"GET / HTTP/1.1\r\n\r\n")
    client.expect_hang_up()


@pytest.mark.usefixtures("others_are_served")
def test_a_stranger_cannot_make_the_agent_buffer_megabytes(
    stage: Stage, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    with contextlib.suppress(OSError):
        client.say_bytes(struct.pack("<I", 16 * 1024 * 1024) + b"x" * 1_000_000)
    client.expect_hang_up()


@pytest.mark.usefixtures("others_are_served")
def test_a_message_that_would_not_fit_into_a_frame_to_the_coordinator_is_dropped_here(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say(GroupSucceeded(nonce="x" * 8_000_000, generation=1))
    client.say(JOIN)
    assert coordinator.expect(FromClient).body == JOIN
    assert len(coordinator.hellos) == 1
    assert "message too large" in agent.log


@pytest.mark.usefixtures("others_are_served")
def test_descriptors_where_none_belong_are_closed(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    before = agent.open_files()
    with Path("/dev/null").open("rb") as null:
        for _ in range(30):
            client.say(JOIN, *[null.fileno()] * 3)
    wait_until("the messages themselves count", lambda: len(coordinator.of(FromClient)) == 30)
    wait_until("the descriptors are closed", lambda: agent.open_files() <= before)
    assert agent.log.count("descriptor where none belongs") == 1


@pytest.mark.usefixtures("others_are_served")
def test_descriptors_with_a_hello_that_has_no_page_are_closed(
    stage: Stage, agent: AgentProcess
) -> None:
    before = agent.open_files()
    client = stage.client(agent)
    with Path("/dev/null").open("rb") as null:
        client.greet(LAUNCHER, *[null.fileno()] * 200)
    client.close()
    wait_until("the descriptors are closed", lambda: agent.open_files() <= before)


@pytest.fixture
def lingering() -> Iterator[socket.socket]:
    """A TCP socket whose last close waits two minutes for data that nobody reads."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = socket.create_connection(listener.getsockname())
        reader, _ = listener.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 120))
    sender.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(b"x" * 65536)
    with reader:
        yield sender


@pytest.mark.usefixtures("others_are_served")
def test_a_descriptor_whose_close_blocks_does_not_block_the_agent(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess, lingering: socket.socket
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    agent.signal(signal.SIGSTOP)
    client.say(JOIN, lingering.fileno())
    lingering.close()  # the last one now is the one on its way, so it is the agent that lingers
    agent.signal(signal.SIGCONT)
    coordinator.expect(FromClient)


@pytest.mark.usefixtures("others_are_served")
def test_a_client_that_does_not_read_is_hung_up_on(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say(JOIN)
    to = coordinator.expect(FromClient).client
    for _ in range(10):
        coordinator.say(ToClient(client=to, body=Refused(why="x" * 1_000_000)))
    wait_until("the agent gives up on it", lambda: "does not read" in agent.log)
    client.expect_hang_up()


@pytest.mark.usefixtures("others_are_served")
def test_a_flood_of_good_messages_is_held_back_and_loses_nothing(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    flooder = stage.client(agent)
    flooder.greet(LAUNCHER)
    flood = b"".join(frame(GroupSucceeded(nonce="n", generation=g)) for g in range(3200))
    flooder.say_bytes(flood)
    other = stage.client(agent)
    other.greet(LAUNCHER)
    other.say(JOIN)
    coordinator.expect(FromClient, lambda m: m.body == JOIN)
    wait_until("all of the flood", lambda: len(coordinator.bodies(GroupSucceeded)) == 3200)
    assert [m.generation for m in coordinator.bodies(GroupSucceeded)] == list(range(3200))
    assert agent.log.count("talks too fast") == 1


def test_one_user_can_have_half_of_all_clients_and_the_rest_is_told_why_not(
    stage: Stage,
) -> None:
    agent = stage.agent(config="[agent]\nmax_clients = 6\n")
    clients = [stage.client(agent) for _ in range(3)]
    for client in clients:
        client.greet(LAUNCHER)
    late = stage.client(agent)
    assert "limit is 3" in late.expect(Refused).why
    late.expect_hang_up()
    clients[0].close()

    def is_let_in() -> bool:
        client = stage.client(agent)
        client.say(LAUNCHER)
        with contextlib.suppress(OSError):
            return not isinstance(first_answer(client), Refused)
        return False

    wait_until("there is room again", is_let_in)


def first_answer(client: RawClient) -> object:
    while not client.heard:
        client._read()
        if client.hung_up and not client.heard:
            raise ConnectionResetError
    return client.heard[0]


@pytest.mark.usefixtures("others_are_served")
def test_connecting_and_leaving_without_a_word_leaves_nothing_behind(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    before = agent.open_files()
    for _ in range(200):
        RawClient(agent.socket).close()
    client = stage.client(agent)
    client.greet(LAUNCHER)
    client.say(JOIN)
    to = coordinator.expect(FromClient).client
    coordinator.say(ToClient(client=to, body=Ack(seq=1)))
    client.expect(Ack)
    client.close()
    wait_until("all connections are closed", lambda: agent.open_files() <= before)
    assert "warning" not in agent.log
