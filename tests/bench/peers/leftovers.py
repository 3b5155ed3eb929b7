"""What peers that are killed leave on the machine, taken away again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from everstep.launch import reaper


@contextmanager
def swept(mark: str, job: str) -> Iterator[Mapping[str, str]]:
    """Give the environment for processes that end with this block, whatever they do.

    They carry the mark, an entry NAME=VALUE, and have a folder of their own for temporary files,
    with a path short enough for sockets. DLRover puts some elsewhere, named after its job.
    """
    name, _, value = mark.partition("=")
    folder = tempfile.mkdtemp(prefix="esb-")
    try:
        dlrover = {"ELASTIC_JOB_NAME": job, "DLROVER_EVENT_FILE_DIR": folder}
        yield {name: value, "TMPDIR": folder, **dlrover}
    finally:
        reaper.kill_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(Path("/tmp/ckpt_sock") / job, ignore_errors=True)
        for memory in Path("/dev/shm").glob(f"{job}_ckpt_shm_*"):
            memory.unlink(missing_ok=True)
