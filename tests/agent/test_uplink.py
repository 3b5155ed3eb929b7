"""The agent's way to a coordinator: lost, refused, silent, moved, back again."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
from tests.agent.stage import FakeCoordinator, RawClient, Stage
from tests.waiting import wait_until

from everstep.agent.peer import boot_id
from everstep.cli.demo.ports import free_port
from everstep.wire.codec import SCHEMA
from everstep.wire.messages import (
    Ack,
    FindingAck,
    FromClient,
    Heartbeat,
    Hello,
    Join,
    Link,
    NodeFinding,
    ToClient,
)

pytestmark = pytest.mark.e2e

JOIN = Join(run_id="r", nonce=None, min_nodes=1, max_nodes=1, local_world_size=1)
A_PAGE_THAT_NEVER_COMES = Hello(role="rank", job="j", generation=1, rank=0, page=True)


def test_the_agent_says_who_it_is(stage: Stage) -> None:
    coordinator = stage.coordinator()
    stage.agent(coordinator, name="node-7", config='[agent]\ntoken = "secret"\n')
    coordinator.expect_connected()
    hello = coordinator.hellos[0]
    assert (hello.node, hello.token, hello.schema) == ("node-7", "secret", SCHEMA)
    assert (hello.boot_id, hello.address) == (boot_id(), "127.0.0.1")


def test_the_address_of_the_file_goes_before_the_sockets_own(stage: Stage) -> None:
    coordinator = stage.coordinator()
    stage.agent(coordinator, config='[agent]\naddress = "10.0.0.7"\n')
    coordinator.expect_connected()
    assert coordinator.hellos[0].address == "10.0.0.7"


def test_an_agent_whose_coordinator_is_not_there_yet_starts_and_finds_it_later(
    stage: Stage,
) -> None:
    port = free_port()
    agent = stage.agent(config=f'[agent]\ncoordinators = ["127.0.0.1:{port}"]\n')
    wait_until("it says what is the matter", lambda: "Connection refused" in agent.log)
    coordinator = stage.coordinator(port=port)
    coordinator.expect(Heartbeat)
    assert agent.log.count("no coordinator") == 1


def test_heartbeats_come_once_a_second_and_are_numbered(stage: Stage) -> None:
    coordinator = stage.coordinator()
    stage.agent(coordinator)
    wait_until("heartbeats", lambda: len(coordinator.of(Heartbeat)) >= 4)
    beats = coordinator.of(Heartbeat)[:4]
    assert [b.seq for b in beats] == list(range(beats[0].seq, beats[0].seq + 4))
    assert 2.0 < beats[3].sent_at_s - beats[0].sent_at_s < 10.0


def test_the_coordinators_clock_is_known_within_the_bound_that_is_told(stage: Stage) -> None:
    coordinator = stage.coordinator()
    coordinator.clock_ahead_s = 1000.0
    stage.agent(coordinator)
    beat = coordinator.expect(Heartbeat, lambda b: b.offset_s is not None)
    assert beat.offset_s is not None
    assert beat.error_s is not None
    assert abs(beat.offset_s - 1000.0) <= beat.error_s + 0.001
    assert beat.error_s < 5.0


def test_a_finding_is_repeated_on_every_connection_until_it_is_acknowledged(stage: Stage) -> None:
    coordinator = stage.coordinator()
    coordinator.stop()
    agent = stage.agent(coordinator)
    client = stage.client(agent)
    client.greet(A_PAGE_THAT_NEVER_COMES)  # found while nobody was there to tell

    coordinator.start()
    first = coordinator.expect(NodeFinding)
    coordinator.stop()
    coordinator.forget()
    coordinator.start()
    assert coordinator.expect(NodeFinding) == first

    coordinator.say(FindingAck(seq=first.seq))
    coordinator.expect(Heartbeat)
    coordinator.stop()
    coordinator.forget()
    coordinator.start()
    coordinator.expect(Heartbeat)
    assert coordinator.of(NodeFinding) == []


def test_the_same_agent_comes_back_after_the_coordinator_was_restarted(stage: Stage) -> None:
    coordinator = stage.coordinator()
    agent = stage.agent(coordinator)
    client = stage.client(agent)
    client.greet(Hello(role="launcher"))
    for _ in range(3):
        coordinator.expect_connected()
        client.expect(Link, lambda m: m.up)
        client.forget()
        coordinator.stop()
        client.expect(Link, lambda m: not m.up)
        coordinator.start()
    coordinator.expect_connected()
    assert len(coordinator.hellos) == 4
    assert len({hello.epoch for hello in coordinator.hellos}) == 1


def test_of_several_coordinators_the_first_that_takes_it_in_is_used(stage: Stage) -> None:
    refusing, good = stage.coordinator(), stage.coordinator()
    refusing.refuse = "I only stand by"
    addresses = [f"127.0.0.1:{free_port()}", refusing.address, f"ws://{good.address}"]
    listed = ", ".join(f'"{a}"' for a in addresses)
    agent = stage.agent(config=f"[agent]\ncoordinators = [{listed}]\n")
    good.expect(Heartbeat)
    assert refusing.hellos
    assert agent.status()["coordinator"]["url"] == f"ws://{good.address}/v1/agent"

    refusing.refuse = None
    good.stop()
    refusing.expect(Heartbeat)


def test_a_refusal_is_shown_and_tried_again(stage: Stage) -> None:
    coordinator = stage.coordinator()
    coordinator.refuse = "another agent is called n1: give this one another --node"
    agent = stage.agent(coordinator)
    wait_until("it tries again", lambda: len(coordinator.hellos) >= 3)
    assert coordinator.refuse in agent.status()["coordinator"]["error"]
    assert agent.log.count("give this one another --node") == 1
    coordinator.refuse = None
    coordinator.expect(Heartbeat)
    assert agent.status()["coordinator"]["error"] is None


def test_a_coordinator_that_falls_silent_is_left(stage: Stage) -> None:
    coordinator = stage.coordinator()
    coordinator.mute = True
    agent = stage.agent(coordinator, config="[agent]\nreply_timeout_s = 1.5\n")
    wait_until("it tries another connection", lambda: len(coordinator.hellos) >= 2)
    assert "silent for" in agent.log


def test_what_the_coordinator_says_wrong_is_skipped(stage: Stage) -> None:
    coordinator = stage.coordinator()
    agent = stage.agent(coordinator)
    client = stage.client(agent)
    client.greet(Hello(role="launcher"))
    coordinator.expect_connected()
    client.expect(Link, lambda m: m.up)
    client.say(JOIN)
    to = coordinator.expect(FromClient).client
    coordinator.say_bytes(b"\xc1")
    coordinator.say_text("hello")
    coordinator.say_bytes(b"\x81\xa4kind\xadFromTheFuture")
    coordinator.say(ToClient(client=to, body=Ack(seq=5)))
    assert client.expect(Ack).seq == 5
    assert len(coordinator.hellos) == 1


def test_something_else_on_the_coordinators_port_is_named_and_does_no_harm(stage: Stage) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        agent = stage.agent(config=f'[agent]\ncoordinators = ["127.0.0.1:{port}"]\n')
        peer, _ = listener.accept()
        with peer:
            peer.recv(65536)
            peer.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        wait_until("it says so", lambda: "no coordinator there: HTTP 404" in agent.log)
    RawClient(agent.socket).close()


def test_a_connection_that_is_reset_is_opened_again(stage: Stage) -> None:
    coordinator = stage.coordinator()
    proxy = _Proxy(coordinator)
    try:
        stage.agent(config=f'[agent]\ncoordinators = ["127.0.0.1:{proxy.port}"]\n')
        proxy.pass_one()
        coordinator.expect(Heartbeat)
        proxy.reset()
        proxy.pass_one()
        wait_until("a second connection", lambda: len(coordinator.hellos) == 2)
    finally:
        proxy.close()


class _Proxy:
    """Joins one connection at a time to the coordinator, and can cut it with a reset."""

    def __init__(self, coordinator: FakeCoordinator) -> None:
        self._to = coordinator
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.settimeout(20)
        self.port: int = self._listener.getsockname()[1]
        self._pair: list[socket.socket] = []

    def pass_one(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._to.port))
        self._pair = [near, far]
        for a, b in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass

    def reset(self) -> None:
        for sock in self._pair:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.shutdown(socket.SHUT_RD)
            sock.close()
        self._pair = []

    def close(self) -> None:
        self.reset()
        self._listener.close()
