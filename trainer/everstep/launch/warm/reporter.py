"""What a rank shows of a script that knows nothing of us: that its collectives go on.

A thread in a warm rank looks twice a second at how many collectives each process group has
*finished*, which torch counts in any case: a look costs some 60 microseconds, no lock of the
script's and no system call. That moves with the work and stands with it, where a heartbeat would
not. It is no step counter, so the page says only `first_step` and `step`, with step 0. And since a
script may well compute, load or save for minutes without a collective, a page whose counter stands
is withdrawn before any rule could hold it against the rank: silence here means "unknown".
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from everstep.wire.link import AgentLink
    from everstep.wire.page import PageWriter

PATIENCE_S = 5.0
LOOK_S = 0.5
QUIET_S = 20.0  # well under the coordinator's `blind_hang_s`

_aside = threading.Event()


def start(environ: Mapping[str, str]) -> None:
    """Begin to watch, in a rank that everstep has started; else do nothing."""
    if environ.get("EVERSTEP_SOCKET") and environ.get("EVERSTEP_JOB"):
        reporter = Reporter(environ, finished_collectives)
        threading.Thread(target=reporter.run, name="everstep-reporter", daemon=True).start()


def step_aside() -> None:
    """Say nothing more: a Session speaks for this rank, and knows better."""
    _aside.set()


def finished_collectives() -> int:
    """Return how many collectives of all process groups of this process have finished."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return 0
    from torch._C import _distributed_c10d

    # torch shows it nowhere else; the second is there where NCCL is.
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [getattr(_distributed_c10d, name, None) for name in names]
    told = [json.loads(dump(False, False)) for dump in dumps if dump]  # noqa: FBT003  a C function
    groups = [group for one in told for group in one.get("pg_status", {}).values()]
    counts = [int(group["last_completed_collective"]) for group in groups]
    return sum(count for count in counts if count > 0)


class Reporter:
    """Opens a page and a link while `count` moves, and closes them while it stands."""

    def __init__(self, environ: Mapping[str, str], count: Callable[[], int]) -> None:
        self._environ = environ
        self._count = count
        self._seen = 0
        self._quiet_s = 0.0
        self._page: PageWriter | None = None
        self._link: AgentLink | None = None

    def run(self) -> None:
        """Watch until a Session opens, or anything at all goes wrong."""
        with contextlib.suppress(Exception):  # the script must not notice, whatever it is
            waited_s = PATIENCE_S
            while not _aside.wait(waited_s):
                self.look()
                waited_s = LOOK_S
        with contextlib.suppress(Exception):
            self.withdraw()

    def look(self) -> None:
        """Look once."""
        count = self._count()
        moved, self._seen = count != self._seen, count
        self._quiet_s = 0.0 if moved else self._quiet_s + LOOK_S
        if moved and self._page is None:
            self._open()
        elif moved and self._page is not None:
            self._page.enter("step")
        elif self._quiet_s >= QUIET_S:
            self.withdraw()

    def withdraw(self) -> None:
        """Close page and link, if they are open."""
        link, self._link = self._link, None
        page, self._page = self._page, None
        if link is not None:
            link.close()
        if page is not None:
            page.close()

    def _open(self) -> None:
        from importlib.metadata import version
        from pathlib import Path

        from everstep.wire.link import AgentLink
        from everstep.wire.messages import Hello
        from everstep.wire.page import PageWriter, Place

        environ = self._environ
        job, generation = environ["EVERSTEP_JOB"], int(environ["EVERSTEP_GENERATION"])
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ["LOCAL_RANK"])
        self._page = PageWriter(Place(job, generation, rank, world, local_rank, os.getpid()))
        self._page.enter("first_step")
        hello = Hello(
            role="rank",
            version=version("everstep"),
            job=job,
            generation=generation,
            rank=rank,
            local_rank=local_rank,
            world_size=world,
            page=True,
        )
        self._link = AgentLink(
            Path(environ["EVERSTEP_SOCKET"]),
            hello,
            on_message=lambda _: None,
            greeting=lambda: [hello],
            page_fd=self._page.fd,
        )
        self._link.start()
