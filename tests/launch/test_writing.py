"""The launcher's snapshot writer: there for all ranks, and there again when it dies."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from everstep.launch.writing import VARIABLE, NodeWriter

DEADLINE_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="everstep-") as made:
        yield Path(made)


def pid_of(writer: NodeWriter) -> int:
    assert writer._writer is not None
    return writer._writer.pid


def connects(writer: NodeWriter) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(writer.environment[VARIABLE])
        except OSError:
            return False
        return True


def test_a_writer_that_dies_is_started_again_at_the_same_place(folder: Path) -> None:
    said: list[str] = []
    writer = NodeWriter(folder, said.append)
    path = writer.environment[VARIABLE]
    assert connects(writer)
    first = pid_of(writer)
    os.kill(first, signal.SIGKILL)
    wait_until("another writer", lambda: pid_of(writer) != first)
    wait_until("its socket", lambda: connects(writer))
    assert writer.environment[VARIABLE] == path
    assert f"pid {first}) has died" in said[0]
    second = pid_of(writer)
    writer.close()
    assert not Path(f"/proc/{second}").exists()
    assert len(said) == 1, "an end that was asked for is no death"


def test_it_does_not_carry_the_mark_by_which_ranks_are_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_LAUNCH", "token-g1")
    writer = NodeWriter(folder, print)
    environ = Path(f"/proc/{pid_of(writer)}/environ").read_bytes().split(b"\0")
    writer.close()
    assert not any(entry.startswith(b"EVERSTEP_LAUNCH=") for entry in environ)


def test_where_it_cannot_be_started_ranks_are_left_to_start_their_own(tmp_path: Path) -> None:
    said: list[str] = []
    writer = NodeWriter(tmp_path / "no" / "such" / "folder", said.append)
    assert writer.environment == {}
    assert "each rank starts a snapshot writer of its own" in said[0]
    writer.close()
