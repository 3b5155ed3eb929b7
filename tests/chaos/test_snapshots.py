"""A short slice of `python -m tests.chaos snapshots`: every kind of fault, twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.chaos
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_no_fault_in_a_save_costs_more_than_that_save(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "snapshots", "--faults=28", "--first=98"]
    done = subprocess.run(
        [*command, "--out", tmp_path], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == 28
    assert {kind: counts["faults"] for kind, counts in found["kinds"].items()} == dict.fromkeys(
        found["kinds"], 2
    )
    assert len(found["kinds"]) == 14
    assert {"memory", "disk", "peer"} <= found["loads"].keys()
