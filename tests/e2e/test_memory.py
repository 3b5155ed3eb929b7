"""A rank that dies loses the step in flight: the others' memory, and its own, are still there."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from tests.e2e.test_a_run import all_ended_with, text
from tests.waiting import wait_until

from everstep.cli.demo.cluster import Cluster
from everstep.cli.demo.faults import rank_pids

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

LOOP = """
import logging, os, sys, time
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from everstep.trainer import Session, SessionConfig
logging.basicConfig(level=logging.INFO, format="%(message)s")
hooks = {"snapshot": {"every_steps": 100_000, "memory_every_steps": 1, "at_end": False}}
@record
def main():
    out = sys.argv[1]
    with Session(SessionConfig(run_dir=out + "/run", seed=3), hooks=hooks) as session:
        torch.manual_seed(1)
        layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        net = torch.nn.Sequential(*layers)
        model = session.wrap(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.snapshot_state({"model": model, "optimizer": optimizer})
        rank = session.seat.rank
        for step in session.steps(60, batch=4):
            time.sleep(0.05)
            loss = model(torch.from_numpy(step.indices).float()[:, None].expand(-1, 4)).mean()
            loss.backward()
            session.step(optimizer, loss=loss)
            with open(f"{out}/steps-{rank}", "a") as log:
                log.write(f"{step.number} {step.loss:.9f}\\n")
main()
"""


def done(out: Path) -> int:
    return min((len(p.read_text().splitlines()) for p in out.glob("steps-*")), default=0)


def losses(out: Path) -> list[tuple[int, float]]:
    lines = (out / "steps-0").read_text().splitlines()
    return [(int(number), float(loss)) for number, loss in (line.split() for line in lines)]


def test_a_killed_rank_costs_a_step_or_two_and_the_run_is_the_same_run(
    cluster: Cluster, out: Path
) -> None:
    script = out / "loop.py"
    script.write_text(LOOP)
    node = cluster.add_node("a")
    for run, kills in (("calm", 0), ("killed", 1)):
        folder = out / run
        folder.mkdir()
        arguments = ["--nnodes=1", "--nproc-per-node=2", str(script), str(folder)]
        cluster.launch(node, run, arguments)
        wait_until("steps", lambda folder=folder: done(folder) > 20)  # type: ignore[misc]
        for _ in range(kills):
            os.kill(rank_pids(node)[-1][1], signal.SIGKILL)
        assert all_ended_with(cluster, 0)

    log = text(cluster, "a-killed")
    resumed = [int(n) for n in re.findall(r"resumed from s0*([0-9]+)-g1 \(memory\)", log)]
    assert len(resumed) == 2, "both ranks read their own node's memory"
    assert resumed[0] >= 18, "not from the disk, where there is nothing"
    killed, calm = losses(out / "killed"), losses(out / "calm")
    assert dict(killed) == dict(calm)
    assert len(killed) - len(calm) <= 3, "what was done twice"
    assert not (out / "killed" / "run" / "snapshots").exists()
