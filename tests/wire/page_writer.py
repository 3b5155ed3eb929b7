"""A rank that writes its progress page as fast as it can, until it is killed.

    python page_writer.py FD

The page's descriptor goes over the socket FD. Every value of a record and of a state follows from
its step, so that a reader sees at once when it got parts of two.
"""

from __future__ import annotations

import os
import socket
import sys
from itertools import count

from everstep.wire.messages import PHASES
from everstep.wire.page import PageWriter, Place, StepRecord

JOB = "job-of-the-page-tests"


def record(step: int) -> StepRecord:
    """Return the one record that belongs to a step."""
    x = float(step)
    return StepRecord(
        step, x + 1, step * 3, x + 2, x + 3, x + 4, x + 5, x + 6, x + 7, 1 / x, -x, step * 5, x / 7
    )


def main() -> None:
    """Write until killed."""
    clock = iter(count(1000, 7))
    page = PageWriter(
        Place(JOB, generation=1, rank=2, world_size=4, local_rank=0, pid=os.getpid()),
        clock_ns=lambda: next(clock),
    )
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        socket.send_fds(agent, [b"x"], [page.fd])
    for step in count(1):
        page.enter(PHASES[step % len(PHASES)], step=step)
        page.finished(record(step))


if __name__ == "__main__":
    main()
