"""Ranks formed anew in place, with a real coordinator, agents and stock torchrun."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from tests.waiting import wait_until

from everstep.cli.api import Api
from everstep.cli.demo.cluster import Cluster, Node
from everstep.cli.demo.faults import rank_pids
from everstep.cli.demo.training import library_bytes
from everstep.trainer import ledger
from everstep.wire.exit_codes import STOPPED

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

DEADLINE_S = 90.0


class Job:
    """Our own trainer on some nodes of a cluster, with endless small steps."""

    def __init__(
        self, cluster: Cluster, out: Path, *, nodes: int, ranks: int, spread: str = "ddp"
    ) -> None:
        self.cluster = cluster
        self.run_dir = out / "run"
        self.api = Api(cluster.url, cluster.api_token)
        config = out / "run.toml"
        config.write_text(
            f'[trainer]\nrun_dir = "{self.run_dir}"\ndata = "{library_bytes(out / "data.bin")}"\n'
            'steps = 1000000\nledger = true\nmicro_batch = 1\nseq_len = 16\ndevice = "cpu"\n'
            f'data_parallel = "{spread}"\n\n'
            "[trainer.model]\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nffn_dim = 16\n\n"
            "[hooks.snapshot]\nevery_steps = 10\nmemory_every_steps = 5\n"
        )
        self.nodes = [cluster.add_node(f"n{i}") for i in range(nodes)]
        for node in self.nodes:
            cluster.launch(
                node,
                "run",
                [
                    f"--nnodes={nodes}:{nodes}",
                    f"--nproc-per-node={ranks}",
                    "-m",
                    "everstep.trainer",
                    "--config",
                    str(config),
                ],
            )
        self.await_steps_of(1)

    def newest(self) -> tuple[int, int]:
        """The newest step of rank 0, by generation and number."""
        if not (self.run_dir / "ledger").exists():
            return 0, 0
        blocks = [b for b in ledger.read(self.run_dir / "ledger") if b.chapter.rank == 0]
        done = ((b.chapter.generation, line.step) for b in blocks for line in b.lines)
        return max(done, default=(0, 0))

    def losses(self, generation: int) -> dict[int, float | None]:
        """Rank 0's losses by step."""
        books = [b for b in ledger.read(self.run_dir / "ledger") if b.chapter.rank == 0]
        return {
            line.step: line.loss
            for book in books
            if book.chapter.generation == generation
            for line in book.lines
        }

    def await_steps_of(self, generation: int, many: int = 12) -> None:
        def there() -> bool:
            number, step = self.newest()
            self.first.setdefault(number, step)
            return number == generation and step >= self.first[number] + many

        self.first: dict[int, int] = {}
        wait_until(f"steps of generation {generation}", there)

    def ranks(self, node: Node) -> dict[int, int]:
        return dict(rank_pids(node))

    def log(self, node: Node) -> str:
        return self.cluster.log(f"{node.name}-run").read_text(errors="replace")

    def stop(self) -> None:
        self.api.post(f"jobs/{self.api.get('jobs')['jobs'][0]['id']}/stop", reason="seen enough")
        codes = [n.launchers["run"].wait(DEADLINE_S) for n in self.nodes]
        assert codes == [STOPPED] * len(codes)


def kill_one(job: Job) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Kill the first node's second rank; return all ranks' pids before and after, a node each.

    Once in some hundred times gloo holds a survivor's collective for ever (torch 2.13), and a fresh
    process takes its place: then another rank is killed.
    """
    before: list[dict[int, int]] = []
    after: list[dict[int, int]] = []
    for generation in range(2, 5):
        held = sum(job.log(node).count("does not come down") for node in job.nodes)
        before = [job.ranks(node) for node in job.nodes]
        _, victim, *_ = before[0].values()
        os.kill(victim, signal.SIGKILL)
        job.await_steps_of(generation)
        after = [job.ranks(node) for node in job.nodes]
        if sum(job.log(node).count("does not come down") for node in job.nodes) == held:
            break
    return before, after


def test_the_sibling_of_a_killed_rank_and_a_rank_elsewhere_keep_their_process(
    cluster: Cluster, out: Path
) -> None:
    job = Job(cluster, out, nodes=2, ranks=2)
    before, after = kill_one(job)
    spared, victim = before[0]
    assert after[1] == before[1]
    assert after[0][spared] == before[0][spared]
    assert after[0][victim] != before[0][victim]
    job.stop()
    assert "Worker group" not in job.log(job.nodes[0])


def test_sharded_ranks_keep_their_process_and_take_their_shards_from_memory(
    cluster: Cluster, out: Path
) -> None:
    job = Job(cluster, out, nodes=1, ranks=3, spread="fsdp")
    (node,) = job.nodes
    (before,), (after,) = kill_one(job)
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]
    job.stop()
    log = job.log(node)
    assert len(re.findall(r"resumed from s\d+-g1 \(memory\)", log)) == 3, log
    first, second = job.losses(1), job.losses(2)
    twice = first.keys() & second.keys()
    assert {s: second[s] for s in twice} == {s: first[s] for s in twice}


def test_a_rank_that_a_signal_stopped_is_replaced_and_the_others_go_on(
    cluster: Cluster, out: Path
) -> None:
    job = Job(cluster, out, nodes=1, ranks=2)
    before = job.ranks(job.nodes[0])
    os.kill(before[1], signal.SIGSTOP)
    job.await_steps_of(2)
    after = job.ranks(job.nodes[0])
    assert after[0] == before[0]
    assert after[1] != before[1]
    (incident,) = job.api.get("incidents")["incidents"]
    assert "stopped by a signal" in job.api.get(f"incidents/{incident['id']}")["root"]["summary"]
    job.stop()


def test_torchrun_restarts_the_ranks_when_no_fresh_one_can_be_forked(
    cluster: Cluster, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_WARM", "0")
    job = Job(cluster, out, nodes=2, ranks=1)
    (survivor,) = job.ranks(job.nodes[1]).values()
    (victim,) = job.ranks(job.nodes[0]).values()
    os.kill(victim, signal.SIGKILL)
    job.await_steps_of(2)
    assert list(job.ranks(job.nodes[1]).values()) == [survivor], "in place all the same"
    assert list(job.ranks(job.nodes[0]).values()) != [victim]
    job.stop()


def test_in_place_can_be_switched_off(
    cluster: Cluster, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_IN_PLACE", "0")
    job = Job(cluster, out, nodes=1, ranks=2)
    before = job.ranks(job.nodes[0])
    os.kill(before[0], signal.SIGKILL)
    job.await_steps_of(2)
    after = job.ranks(job.nodes[0])
    assert set(after.values()).isdisjoint(before.values())
    job.stop()


def test_failures_one_after_another_and_at_once_are_recovered_from(
    cluster: Cluster, out: Path
) -> None:
    job = Job(cluster, out, nodes=2, ranks=2)
    pids = [pid for node in job.nodes for pid in job.ranks(node).values()]
    for pid in (pids[0], pids[3]):
        os.kill(pid, signal.SIGKILL)
    wait_until("a second generation", lambda: job.newest()[0] >= 2)
    for _ in range(3):
        generation = job.newest()[0]
        os.kill(max(job.ranks(job.nodes[1]).items())[1], signal.SIGKILL)
        wait_until("one more", lambda g=generation: job.newest()[0] > g)  # type: ignore[misc]
    job.await_steps_of(job.newest()[0])
    job.stop()
