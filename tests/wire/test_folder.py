"""Where sockets can be bound, wherever temporary files go."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from everstep.wire.folder import private_folder


@pytest.mark.parametrize("length", [20, 90, 120])
def test_a_socket_can_be_bound_however_long_the_path_of_temporary_files(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * length)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = private_folder("writer.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "writer.sock"))
    assert folder.stat().st_mode & 0o77 == 0
    (folder / "writer.sock").unlink()
    folder.rmdir()
