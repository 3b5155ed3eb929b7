from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.agent.stage import Stage

from everstep.cli.local import AgentUnreachableError, ask_agent
from everstep.wire.codec import frame
from everstep.wire.messages import Facts, Link, Refused, Welcome


@contextmanager
def someone(stage: Stage, behave: Callable[[socket.socket], None]) -> Iterator[Path]:
    """Give a socket on which somebody serves one client."""
    path = stage.folder / "someone.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(10)

        def serve() -> None:
            client, _ = server.accept()
            with client:
                behave(client)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join(10)


def test_an_agent_tells_what_it_knows(stage: Stage) -> None:
    agent = stage.agent(name="n7")
    assert ask_agent("status", agent.socket)["node"] == "n7"
    names = [one["name"] for one in ask_agent("plugins", agent.socket)["plugins"]]
    assert "host" in names


def test_the_environment_names_the_socket(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_SOCKET", str(stage.agent().socket))
    assert ask_agent("status")["node"] == "n1"


def test_what_a_newer_agent_says_besides_is_passed_over(stage: Stage) -> None:
    def behave(client: socket.socket) -> None:
        client.recv(65536)
        novelty = frame(Link(up=True)).replace(b"Link", b"Bink")
        client.sendall(frame(Welcome(node="n1")) + novelty + frame(Facts(json='{"a": 1}')))

    with someone(stage, behave) as path:
        assert ask_agent("status", path) == {"a": 1}


def test_a_refusal_is_told(stage: Stage) -> None:
    def behave(client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(frame(Refused(why="it speaks schema 9, this side 1: upgrade this side")))

    with (
        someone(stage, behave) as path,
        pytest.raises(AgentUnreachableError, match=r"refuses: it speaks schema 9") as caught,
    ):
        ask_agent("status", path)
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x02\x00\x00\x00\xc1\xc1"])
def test_what_is_no_agent_is_seen_for_what_it_is(stage: Stage, said: bytes) -> None:
    def behave(client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(said)

    with (
        someone(stage, behave) as path,
        pytest.raises(AgentUnreachableError, match=r"someone\.sock is no everstep agent"),
    ):
        ask_agent("status", path)


def test_who_hangs_up_without_an_answer_is_an_error(stage: Stage) -> None:
    def behave(client: socket.socket) -> None:
        client.recv(65536)

    with (
        someone(stage, behave) as path,
        pytest.raises(AgentUnreachableError, match="hung up without an answer"),
    ):
        ask_agent("status", path)


def test_an_agent_that_hangs_is_left_after_a_while(stage: Stage) -> None:
    over = threading.Event()
    with someone(stage, lambda _: (over.wait(30), None)[1]) as path:
        with pytest.raises(AgentUnreachableError, match=r"does not answer within 0\.3 s"):
            ask_agent("status", path, timeout_s=0.3)
        over.set()


def test_one_that_talks_without_end_is_left_too(stage: Stage) -> None:
    def behave(client: socket.socket) -> None:
        try:
            while True:
                client.sendall(frame(Link(up=True)))
        except OSError:
            pass

    with (
        someone(stage, behave) as path,
        pytest.raises(AgentUnreachableError, match=r"does not answer within 0\.3 s"),
    ):
        ask_agent("status", path, timeout_s=0.3)


def test_where_nobody_is_the_command_that_starts_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachableError, match=r"Start one with `everstep agent --coord"):
        ask_agent("status", tmp_path / "none.sock")


def test_a_socket_that_this_user_may_not_use_is_told_from_none(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    with pytest.raises(AgentUnreachableError, match="permission denied: ask as root"):
        ask_agent("status", stage.folder / "agent.sock")
