"""The reaper of a launcher that restarts its ranks for months."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.trainer.ranks import wait_until

from everstep.launch import reaper


def test_it_keeps_nothing_of_ranks_that_are_gone() -> None:
    command = [sys.executable, "-I", "-S", reaper.__file__, "EVERSTEP_LAUNCH=nobody-has-this"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        fds = Path(f"/proc/{process.pid}/fd")

        def known() -> int:
            return sum("pidfd" in str(fd.readlink()) for fd in fds.iterdir())

        def start() -> subprocess.Popen[bytes]:
            rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
            assert process.stdin is not None
            process.stdin.write(f"+{rank.pid}\n" * 2)  # it is told again after each restart
            process.stdin.flush()
            return rank

        before = [start() for _ in range(20)]
        wait_until(lambda: known() == 20, what="all ranks known")
        for rank in before:
            rank.kill()
            rank.wait()
        living = start()
        wait_until(lambda: known() == 1, what="only the living known")
        process.stdin.close()
        assert living.wait(60) == -9
        assert process.wait(60) == 0
