"""Real writers, for ranks that are none."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.snapshots.ranks import MakeRank, Rank

from everstep.snapshots import writer
from everstep.snapshots.faults import FAULT_VARIABLE
from everstep.snapshots.writer import Writer

StartWriter = Callable[..., Writer]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose sockets' names are short enough."""
    folder = Path(tempfile.mkdtemp(prefix="evs-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start_writer(short: Path) -> Iterator[StartWriter]:
    """Start writers: `start_writer("before-marker:kill")` plans a fault."""
    started: list[Writer] = []

    def start(fault: str = "", *, folder: Path = short, grace_s: float = 20.0) -> Writer:
        environ = {**os.environ, FAULT_VARIABLE: fault}
        started.append(writer.start(folder, environ=environ, grace_s=grace_s))
        return started[-1]

    yield start
    for one in started:
        one.close(20.0)


@pytest.fixture
def make_rank(short: Path) -> Iterator[MakeRank]:
    """Make ranks at the writer in `short`."""
    made: list[Rank] = []

    def make(rank: int = 0, **more: str) -> Rank:
        made.append(Rank(short / "writer.sock", rank, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
