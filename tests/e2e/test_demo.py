"""The demo as a user starts it: what it leaves behind, and that it leaves nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

KEYS = {
    "recovered_all", "bit_equal", "samples_exactly_once", "skipped_windows", "wrong_evictions",
    "steps", "wall_s", "lost_s", "faults",
}  # fmt: skip


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "everstep.cli", "demo", "--out", str(out), *arguments]


def as_from_a_terminal() -> None:
    """Take Ctrl-C as a terminal gives it: a job in a shell's background inherits it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def marked(out: Path) -> list[int]:
    """The processes that have the demo's folder in their command line or environment."""
    needle = str(out).encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            seen = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle in seen and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def test_a_killed_rank_and_a_cut_cable_leave_a_report_with_every_promise_held(
    tmp_path: Path,
) -> None:
    out = tmp_path / "demo"
    done = subprocess.run(
        command(out, "--faults", "kill-rank,cut-agent", "--no-elastic", "--seed", "5"),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "demo-report.json").read_text())
    assert report.keys() >= KEYS
    assert report["recovered_all"]
    assert report["bit_equal"] is True
    assert report["wrong_evictions"] == 0
    kill, cut = report["faults"]
    assert kill["kind"] == "kill-rank"
    assert kill["evicted"] is None
    assert "SIGKILL" in kill["why"]
    assert 0 < kill["detected_s"] < kill["resumed_s"]
    assert cut["kind"] == "cut-agent"
    assert cut["evicted"] is None
    assert cut["steps_lost"] == 0
    assert sum(report["time"].values()) < report["wall_s"]
    assert 0 < report["goodput"] <= report["ettr"] < 1
    assert report["mttr_s"] == pytest.approx(kill["resumed_s"], abs=0.5)
    assert "Where its time went" in done.stdout
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    logs = [p.read_text(errors="replace") for p in (out / "logs").glob("*.log")]
    assert not any("Unable to shutdown process" in text for text in logs)


def test_ctrl_c_leaves_no_process_and_no_folder_of_sockets(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        command(out, "--faults", "kill-rank"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=as_from_a_terminal,  # noqa: PLW1509  no other thread runs here
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "to the last step" in line:
                break  # five agents, a coordinator and three torchruns are up
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
    assert demo.returncode != 0
    assert "Traceback" not in rest
    assert marked(temporary) == []
    assert list(temporary.glob("everstep-*")) == []


def test_an_unknown_fault_is_refused_with_those_there_are(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "demo", "--faults", "kill-rank,meteor"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 64
    assert "'meteor' is none of kill-rank, " in done.stderr
    assert not (tmp_path / "demo").exists()
