"""Launchers that are told to end: what their ranks had done is not lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.waiting import DEADLINE_S, wait_until

from everstep.cli.demo.cluster import Cluster, Node
from everstep.cli.demo.training import library_bytes
from everstep.launch import reaper
from everstep.snapshots import catalogue, marker
from everstep.trainer import ledger

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


class Run:
    """Our own trainer, one rank a node, endless small steps and no regular snapshots."""

    def __init__(self, cluster: Cluster, out: Path) -> None:
        self.cluster = cluster
        self.run_dir = out / "run"
        self.config = out / "run.toml"
        self.config.write_text(
            f'[trainer]\nrun_dir = "{self.run_dir}"\ndata = "{library_bytes(out / "data.bin")}"\n'
            'steps = 1000000\nledger = true\nmicro_batch = 1\nseq_len = 16\ndevice = "cpu"\n'
            "min_step_s = 0.05\n\n"
            "[trainer.model]\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nffn_dim = 16\n\n"
            "[hooks.snapshot]\nevery_steps = 100000\n"
        )

    def launch(self, *nodes: Node, least: int = 2) -> None:
        for node in nodes:
            self.cluster.launch(
                node,
                "run",
                [
                    f"--nnodes={least}:{len(nodes)}",
                    "-m",
                    "everstep.trainer",
                    "--config",
                    str(self.config),
                ],
            )

    def steps(self, generation: int | None = None) -> list[int]:
        """The steps that rank 0 has put down, in all generations or one."""
        if not (self.run_dir / "ledger").exists():
            return []
        blocks = [b for b in ledger.read(self.run_dir / "ledger") if b.chapter.rank == 0]
        chosen = [b for b in blocks if generation in (None, b.chapter.generation)]
        return [line.step for block in chosen for line in block.lines]

    def done(self, generation: int | None = None) -> int:
        """The newest step that rank 0 has finished, 0 when there is none."""
        return max(self.steps(generation), default=0)

    def snapshots(self) -> list[marker.Marker]:
        found = catalogue.entries(self.run_dir / "snapshots")
        paths = [self.run_dir / "snapshots" / str(e.id) for e in found if e.committed]
        return sorted((marker.verify(path) for path in paths), key=lambda m: m.step)

    def log(self, node: Node) -> str:
        return self.cluster.log(f"{node.name}-run").read_text(errors="replace")


def test_two_nodes_that_are_preempted_one_after_the_other_lose_no_finished_step(
    cluster: Cluster, out: Path
) -> None:
    run = Run(cluster, out)
    nodes = [cluster.add_node(name) for name in "ab"]
    run.launch(*nodes)
    wait_until("steps", lambda: run.done() > 8)
    before = run.done()
    for node in reversed(nodes):
        node.launchers["run"].send_signal(signal.SIGTERM)
        time.sleep(0.02)  # the moments differ; it holds for any
    codes = [node.launchers["run"].wait(DEADLINE_S) for node in nodes]
    assert codes == [1, 1], "as torchrun ends"
    (saved,) = run.snapshots()
    assert saved.step >= before
    assert saved.step >= run.done()
    assert saved.world_size == 2
    line = f"emergency snapshot of step {saved.step}: "
    assert all(line in run.log(node) for node in nodes)
    run.launch(*nodes)
    wait_until("more steps", lambda: run.done() > saved.step + 3)
    steps = run.steps()
    assert sorted(steps) == sorted(set(steps)), "no step was done twice"


def test_what_a_scheduler_does_to_all_processes_of_one_node_costs_the_other_no_step(
    cluster: Cluster, out: Path
) -> None:
    cluster.kill_coordinator()
    cluster.start_coordinator("settle_s = 60\n")  # they begin together
    run = Run(cluster, out)
    nodes = [cluster.add_node(name) for name in "ab"]
    run.launch(*nodes, least=1)
    wait_until("steps", lambda: run.done() > 8)
    drained, left = nodes
    for pid in reaper.marked(drained.mark + "l"):  # launcher, shim, nursery, writer, rank
        os.kill(pid, signal.SIGTERM)
    assert drained.launchers["run"].wait(DEADLINE_S) == 1
    wait_until("steps of the other alone", lambda: run.done(generation=2) > 0)
    (saved,) = run.snapshots()
    assert f"emergency snapshot of step {saved.step}: " in run.log(drained)
    assert run.done(generation=1) == saved.step
    assert min(run.steps(generation=2)) == saved.step + 1, "it went on where both had been"
    assert left.launchers["run"].poll() is None
