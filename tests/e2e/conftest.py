from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from everstep.cli.demo.cluster import Cluster

STEPPING = """
import os, sys, time, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    out, stop = sys.argv[1], sys.argv[1] + "/stop"
    dist.init_process_group("gloo")
    place = f"rank{dist.get_rank()}-of-{dist.get_world_size()}"
    with open(f"{out}/{place}-g{os.environ['EVERSTEP_GENERATION']}", "w") as log:
        while True:
            flag = torch.tensor([1.0 if os.path.exists(stop) else 0.0])
            dist.all_reduce(flag)
            log.write("step\\n"); log.flush()
            if flag.item() > 0:
                break
            time.sleep(0.02)
    dist.destroy_process_group()
main()
"""


LINES = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what the cluster's processes wrote under the report of a test that failed."""
    report = yield
    made = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and made is not None:
        for log in sorted(made.folder.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            report.sections.append((str(log), "\n".join(lines[-LINES:])))
    return report


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="everstep-e2e-") as folder,
        Cluster(Path(folder)) as made,
    ):
        made.start_coordinator("settle_s = 0.5\n")
        yield made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def stepping(tmp_path: Path) -> Path:
    path = tmp_path / "stepping.py"
    path.write_text(STEPPING)
    return path
