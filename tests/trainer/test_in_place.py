"""Ranks that stay alive while their peers die: the same process in the next generation."""

from __future__ import annotations

import os
import queue
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.trainer.ranks import Started, StartRanks, WriteConfig, wait_until
from torch._C._distributed_c10d import TCPStore

from everstep.launch.control import ControlServer, FromRank, Heard, Line, Ready, Reform, Released
from everstep.snapshots import catalogue
from everstep.trainer import ledger
from everstep.trainer.running import ORDER_S
from everstep.trainer.snapshot import compare

STEPS = 60


@dataclass
class Launcher:
    """Stands for the launchers of all nodes: stores, orders and fresh ranks, made by the test."""

    folder: Path
    start: StartRanks
    config: Path
    run_dir: Path
    said: queue.SimpleQueue[FromRank] = field(default_factory=queue.SimpleQueue)
    lines: dict[int, Line] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    stores: list[TCPStore] = field(default_factory=list)
    heard: list[FromRank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = ControlServer(self.folder / "control", self._hear)
        self.server.start()

    def _hear(self, line: Line, message: FromRank | None) -> None:
        if message is None:
            return
        self.heard.append(message)
        if isinstance(message, Ready):
            self.lines[line.pid] = line
            self.ready[line.pid] = message.generation

    def environment(self, generation: int, world: int, **more: str) -> dict[str, str]:
        store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.stores.append(store)
        committed = [e for e in catalogue.entries(self.run_dir / "snapshots") if e.committed]
        newest = sorted(committed, key=lambda e: e.place, reverse=True)
        return {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "EVERSTEP_JOB": "job",
            "EVERSTEP_GENERATION": str(generation),
            "EVERSTEP_RESUME": ",".join(str(e.id) for e in newest[:4]),
            "EVERSTEP_CONTROL": str(self.server.path),
        } | more

    def launch(self, generation: int, world: int) -> Started:
        return self.start(
            world,
            "-m",
            "everstep.trainer",
            "--config",
            self.config,
            env=self.environment(generation, world),
        )

    def reform(self, generation: int, survivors: list[int], fresh: list[int]) -> list[Started]:
        """Order the processes `survivors` (pids, in order of rank) in; start `fresh` ranks."""
        world = len(survivors) + len(fresh)
        shared = self.environment(generation, world)
        ranks = [r for r in range(world) if r not in fresh]
        for rank, pid in zip(ranks, survivors, strict=True):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            assert self.lines[pid].send(Reform(generation=generation, environment=shared | place))
        return [
            self.start(
                1,
                "-m",
                "everstep.trainer",
                "--config",
                self.config,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in fresh
        ]

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def spread() -> str:
    """How the ranks' models are spread, which a test may be parametrized by."""
    return "ddp"


@pytest.fixture
def launcher(
    start_ranks: StartRanks, write_config: WriteConfig, tmp_path: Path, spread: str
) -> Iterator[Launcher]:
    folder = Path(tempfile.mkdtemp(prefix="everstep-"))
    config = write_config("mine", steps=STEPS, data_parallel=spread)
    made = Launcher(folder, start_ranks, config, tmp_path / "mine")
    yield made
    made.close()
    folder.rmdir()


def steps_done(run_dir: Path) -> int:
    folder = run_dir / "ledger"
    if not folder.exists():
        return 0
    return max((line.step for block in ledger.read(folder) for line in block.lines), default=0)


def further(run_dir: Path, step: int) -> bool:
    return steps_done(run_dir) > step


def in_generation(launcher: Launcher, pids: list[int], generation: int) -> None:
    wait_until(
        lambda: all(launcher.ready.get(pid) == generation for pid in pids),
        what=f"ranks {pids} in generation {generation}",
    )


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_survivors_keep_their_process_and_the_run_is_the_same_run(
    launcher: Launcher,
    start_ranks: StartRanks,
    write_config: WriteConfig,
    tmp_path: Path,
    spread: str,
) -> None:
    config = write_config("calm", steps=STEPS, data_parallel=spread)
    calm = start_ranks(3, "-m", "everstep.trainer", "--config", config)
    assert calm.wait() == [0, 0, 0]

    ranks = launcher.launch(1, 3)
    wait_until(lambda: steps_done(launcher.run_dir) >= 20, what="twenty steps")
    ranks.kill(1)
    survivors = [ranks.pids[0], ranks.pids[2]]
    [fresh] = launcher.reform(2, survivors, [1])
    in_generation(launcher, survivors, 2)
    assert fresh.wait() == [0]
    assert ranks.wait() == [0, -signal.SIGKILL, 0]

    kinds = [type(m) for m in launcher.heard if m.generation == 2]
    assert kinds.count(Heard) == kinds.count(Released) == 2
    mine, theirs = (compare.newest(tmp_path / n / "snapshots") for n in ("mine", "calm"))
    assert mine
    assert theirs
    assert compare.differences(mine, theirs) == []


@pytest.mark.parametrize("spread", ["fsdp"])
def test_survivors_may_get_other_ranks_and_each_then_has_the_shards_of_its_own(
    launcher: Launcher, start_ranks: StartRanks, write_config: WriteConfig, tmp_path: Path
) -> None:
    config = write_config("calm", steps=STEPS, data_parallel="fsdp")
    calm = start_ranks(3, "-m", "everstep.trainer", "--config", config)
    assert calm.wait() == [0, 0, 0]

    ranks = launcher.launch(1, 3)
    wait_until(lambda: steps_done(launcher.run_dir) >= 20, what="twenty steps")
    ranks.kill(0)
    swapped = [ranks.pids[2], ranks.pids[1]]
    [fresh] = launcher.reform(2, swapped, [0])
    assert fresh.wait() == [0], fresh.log() + ranks.log()
    assert ranks.wait() == [-signal.SIGKILL, 0, 0]
    mine, theirs = (compare.newest(tmp_path / n / "snapshots") for n in ("mine", "calm"))
    assert mine
    assert theirs
    assert compare.differences(mine, theirs) == []


def test_a_stopped_rank_holds_nobody_once_the_order_came(launcher: Launcher) -> None:
    ranks = launcher.launch(1, 3)
    wait_until(lambda: steps_done(launcher.run_dir) >= 10, what="ten steps")
    ranks.kill(2, how=signal.SIGSTOP)
    survivors = ranks.pids[:2]
    launcher.reform(2, survivors, [2])
    in_generation(launcher, survivors, 2)
    reached = steps_done(launcher.run_dir)
    wait_until(lambda: steps_done(launcher.run_dir) > reached, what="a step of generation 2")


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_forming_anew_many_times_leaves_nothing_behind(launcher: Launcher) -> None:
    ranks = launcher.launch(1, 2)
    survivor, victim = ranks.pids[0], ranks.pids[1]
    settled: tuple[int, int] | None = None
    for generation in range(2, 8):
        in_generation(launcher, [survivor, victim], generation - 1)
        reached = steps_done(launcher.run_dir)
        wait_until(partial(further, launcher.run_dir, reached), what="a step")
        if generation == 4:
            settled = threads(survivor), descriptors(survivor)
        os.kill(victim, signal.SIGKILL)
        [fresh] = launcher.reform(generation, [survivor], [1])
        victim = fresh.pids[0]
    in_generation(launcher, [survivor, victim], 7)
    reached = steps_done(launcher.run_dir)
    wait_until(lambda: steps_done(launcher.run_dir) > reached, what="a step of generation 7")
    assert settled is not None
    most_threads, most_descriptors = settled
    # Those of the generation before end by themselves, a moment later.
    wait_until(lambda: threads(survivor) <= most_threads, what="as many threads as before")
    wait_until(lambda: descriptors(survivor) <= most_descriptors, what="as many descriptors")


def test_a_survivor_without_an_order_ends_by_its_error(launcher: Launcher) -> None:
    ranks = launcher.launch(1, 2)
    wait_until(lambda: steps_done(launcher.run_dir) >= 5, what="five steps")
    ranks.kill(1)
    launcher.close()  # nobody is left to order anything
    assert ranks.wait() == [1, -signal.SIGKILL]
    assert "by peer" in ranks.log(0)


def test_an_error_of_the_script_itself_waits_for_nobody(
    launcher: Launcher, start_ranks: StartRanks, tmp_path: Path
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "from everstep.trainer import SessionConfig, run\n"
        "def main(session):\n"
        "    raise KeyError('no such thing')\n"
        f"run(SessionConfig(run_dir={str(tmp_path / 'broken')!r}), main)\n"
    )
    began = time.monotonic()
    ranks = start_ranks(2, script, env=launcher.environment(1, 2))
    assert ranks.wait() == [1, 1]
    assert time.monotonic() - began < ORDER_S  # nobody waited for an order
    assert "no such thing" in ranks.log(0)
