"""The demo's cluster fits any machine's temporary folder, and leaves nothing in it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from tests.waiting import wait_until

from everstep.cli.demo.cluster import Cluster


@pytest.mark.e2e
@pytest.mark.parametrize("depth", [0, 120])
def test_nodes_start_wherever_temporary_files_go_and_leave_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp")) if depth == 0 else tmp_path / ("d" * depth)
    place.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(600)\n")
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start_coordinator()
        node = cluster.add_node("a")
        cluster.launch(node, "run", ["--nnodes=1", str(script), str(tmp_path / "up")])
        wait_until("the rank runs", (tmp_path / "up").exists)
        assert len(os.fsencode(node.socket)) <= 107
        run = cluster.run
    assert not run.exists()
    assert list(place.iterdir()) == []
    place.rmdir()
