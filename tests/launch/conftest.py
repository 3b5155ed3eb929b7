from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.scripted import Cluster, new_cluster

ALL_REDUCE = """
import os, time, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo")
    stop = os.environ["TMPDIR"] + "/stop"
    step = 0
    name = f"/rank{dist.get_rank()}-g{os.environ['EVERSTEP_GENERATION']}"
    with open(os.environ["TMPDIR"] + name, "w") as out:
        while True:
            flag = torch.tensor([1.0 if os.path.exists(stop) else 0.0])
            dist.all_reduce(flag)
            step += 1
            out.write(f"{step}\\n"); out.flush()
            if flag.item() > 0: break
            time.sleep(0.02)
    dist.destroy_process_group()
main()
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = new_cluster()
    yield made
    made.close()


@pytest.fixture
def all_reduce(cluster: Cluster) -> Path:
    path = cluster.folder / "all_reduce.py"
    path.write_text(ALL_REDUCE)
    return path
