"""Ranks that are asked for an emergency snapshot, at different moments and in different states."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.ranks import Started, StartRanks, WriteConfig, wait_until

from everstep.launch.control import (
    Armed,
    ControlServer,
    Emergency,
    End,
    FromRank,
    Line,
    Saved,
    Signalled,
)
from everstep.snapshots import catalogue, marker
from everstep.trainer import ledger
from everstep.trainer.snapshot import compare

BLOCKING = """
import os, sys, time, torch
from everstep.trainer import Session, SessionConfig, run
run_dir, block_at, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def main(session):
    torch.manual_seed(0)
    model = session.wrap(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    session.snapshot_state({"model": model, "optimizer": optimizer})
    for step in session.steps(100):
        time.sleep(step_s)
        loss = model(torch.ones(2, 4)).square().mean()
        if step.number == block_at:
            open(f"{run_dir}/blocked-{os.environ['RANK']}", "w").close()
            time.sleep(3600)
        loss.backward()
        session.step(optimizer, loss=loss)
# A rank's own writer waits for parts that never come no longer than that.
config = SessionConfig(run_dir=run_dir, ledger=True, save_timeout_s=20.0)
run(config, main, hooks={"snapshot": {"every_steps": 1000}})
"""


class Launcher:
    """Stands for the launchers of all nodes: hears their ranks, and asks when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.lines: dict[int, Line] = {}
        self.signalled: list[int] = []
        self.saved: dict[int, Saved] = {}
        self.server = ControlServer(folder / "control", self._hear)
        self.server.start()

    def _hear(self, line: Line, message: FromRank | None) -> None:
        match message:
            case Armed():
                self.lines[line.pid] = line
            case Signalled():
                self.signalled.append(line.pid)
            case Saved():
                self.saved[line.pid] = message
            case _:
                pass

    def ask(self, *pids: int, grace_s: float = 20.0) -> None:
        for pid in pids:
            assert self.lines[pid].send(Emergency(generation=1, grace_s=grace_s))

    def await_saved(self, *pids: int) -> list[Saved]:
        wait_until(lambda: self.saved.keys() >= set(pids), what="the ranks' answers")
        return [self.saved[pid] for pid in pids]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    folder = Path(tempfile.mkdtemp(prefix="everstep-"))
    made = Launcher(folder)
    yield made
    made.server.close()
    folder.rmdir()


def environ(launcher: Launcher) -> dict[str, str]:
    return {
        "EVERSTEP_JOB": "job",
        "EVERSTEP_GENERATION": "1",
        "EVERSTEP_RESUME": "",
        "EVERSTEP_CONTROL": str(launcher.server.path),
    }


def done(run_dir: Path) -> int:
    folder = run_dir / "ledger"
    if not folder.exists():
        return 0
    return max((line.step for block in ledger.read(folder) for line in block.lines), default=0)


def committed(run_dir: Path) -> list[marker.Marker]:
    if not (run_dir / "snapshots").exists():
        return []
    found = catalogue.entries(run_dir / "snapshots")
    return [marker.verify(run_dir / "snapshots" / str(e.id)) for e in found if e.committed]


def training(
    launcher: Launcher, start_ranks: StartRanks, config: Path, run_dir: Path, world: int
) -> Started:
    ranks = start_ranks(world, "-m", "everstep.trainer", "--config", config, env=environ(launcher))
    wait_until(lambda: launcher.lines.keys() >= set(ranks.pids), what="armed ranks")
    wait_until(lambda: done(run_dir) >= 3, what="three steps")
    return ranks


@pytest.fixture
def config(write_config: WriteConfig) -> Path:
    rarely = {"every_steps": 100_000}
    return write_config("run", steps=100_000, min_step_s=0.02, hooks={"snapshot": rarely})


@pytest.mark.parametrize("apart_s", [0.0, 0.01, 0.03])
def test_ranks_that_are_asked_at_different_moments_save_the_same_step(
    launcher: Launcher, start_ranks: StartRanks, config: Path, tmp_path: Path, apart_s: float
) -> None:
    ranks = training(launcher, start_ranks, config, tmp_path / "run", 2)
    before = done(tmp_path / "run")
    first, second = reversed(ranks.pids)
    launcher.ask(first)
    time.sleep(apart_s)
    launcher.ask(second)
    answers = launcher.await_saved(*ranks.pids)
    assert len({a.id for a in answers}) == 1, answers
    assert answers[0].step >= before
    assert [a.lead for a in answers] == [True, False]
    wait_until(lambda: committed(tmp_path / "run"), what="the marker")
    (saved,) = committed(tmp_path / "run")
    assert saved.step == answers[0].step == done(tmp_path / "run"), "nothing was done after it"


def test_where_one_node_is_told_to_end_the_ranks_of_all_save_the_step(
    launcher: Launcher, start_ranks: StartRanks, config: Path, tmp_path: Path
) -> None:
    ranks = training(launcher, start_ranks, config, tmp_path / "run", 2)
    launcher.ask(ranks.pids[1])
    (answer,) = launcher.await_saved(ranks.pids[1])
    wait_until(lambda: committed(tmp_path / "run"), what="the marker")
    (saved,) = committed(tmp_path / "run")
    assert (saved.id, saved.world_size) == (answer.id, 2)
    os.kill(ranks.pids[1], signal.SIGTERM)
    wait_until(lambda: launcher.signalled == [ranks.pids[1]], what="its question")
    assert ranks.wait_for_one() == 1
    assert ranks.codes[1] == -signal.SIGTERM
    launcher.ask(ranks.pids[0])  # its own node's turn comes later, with nothing new to save
    (answer,) = launcher.await_saved(ranks.pids[0])
    assert answer.id in (saved.id, ""), answer
    assert len(committed(tmp_path / "run")) == 1


def test_a_signal_that_is_meant_for_the_rank_alone_ends_it_at_once(
    launcher: Launcher, start_ranks: StartRanks, config: Path, tmp_path: Path
) -> None:
    ranks = training(launcher, start_ranks, config, tmp_path / "run", 1)
    os.kill(ranks.pids[0], signal.SIGTERM)
    wait_until(lambda: launcher.signalled, what="its question")
    assert launcher.lines[ranks.pids[0]].send(End(generation=1))
    assert ranks.wait() == [-signal.SIGTERM]
    assert committed(tmp_path / "run") == []


def test_a_rank_ends_by_the_signal_when_its_launcher_says_nothing_or_is_gone(
    launcher: Launcher, start_ranks: StartRanks, config: Path, tmp_path: Path
) -> None:
    ranks = training(launcher, start_ranks, config, tmp_path / "run", 2)
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.wait_for_one() == 0
    launcher.server.close()
    os.kill(ranks.pids[1], signal.SIGTERM)
    assert -signal.SIGTERM in ranks.wait()


def test_where_the_step_in_flight_does_not_end_the_last_finished_one_is_saved(
    launcher: Launcher, start_ranks: StartRanks, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    script = tmp_path / "blocking.py"
    script.write_text(BLOCKING)
    ranks = start_ranks(2, script, str(tmp_path / "run"), "6", "1.0", env=environ(launcher))
    blocked = [tmp_path / "run" / f"blocked-{rank}" for rank in range(2)]
    wait_until(lambda: all(p.exists() for p in blocked), what="a step that does not end")
    launcher.ask(ranks.pids[0], grace_s=6.0)
    time.sleep(0.2)
    launcher.ask(ranks.pids[1], grace_s=6.0)
    answers = launcher.await_saved(*ranks.pids)
    assert {(a.step, a.why) for a in answers} == {(5, "")}, answers
    wait_until(lambda: committed(tmp_path / "run"), what="the marker")
    (saved,) = committed(tmp_path / "run")
    assert (saved.step, saved.world_size) == (5, 2)
    ranks.kill()
    later = {"EVERSTEP_GENERATION": "2", "EVERSTEP_RESUME": saved.id}
    again = start_ranks(2, script, str(tmp_path / "run"), "0", "0", env=environ(launcher) | later)
    calm = start_ranks(2, script, str(tmp_path / "calm"), "0", "0")
    assert again.wait() == calm.wait() == [0, 0], again.log()
    mine, theirs = (compare.newest(tmp_path / n / "snapshots") for n in ("run", "calm"))
    assert mine
    assert theirs
    assert mine.name == "s000100-g2"
    assert compare.differences(mine, theirs) == []


def test_a_rank_alone_saves_its_part_and_no_mixed_set_is_ever_complete(
    launcher: Launcher, start_ranks: StartRanks, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    script = tmp_path / "blocking.py"
    script.write_text(BLOCKING)
    ranks = start_ranks(2, script, str(tmp_path / "run"), "6", "1.0", env=environ(launcher))
    blocked = [tmp_path / "run" / f"blocked-{rank}" for rank in range(2)]
    wait_until(lambda: all(p.exists() for p in blocked), what="a step that does not end")
    launcher.ask(ranks.pids[0], grace_s=6.0)
    (answer,) = launcher.await_saved(ranks.pids[0])
    assert answer.step == 5
    ranks.kill(1)  # the other node is gone, unasked
    os.kill(ranks.pids[0], signal.SIGTERM)
    ranks.wait()
    assert committed(tmp_path / "run") == []


OWN_HANDLER = """
import os, signal, sys, time
from everstep.trainer import Session, SessionConfig
import torch
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
hooks = {"snapshot": {"every_steps": 1000, "at_end": False}}
with Session(SessionConfig(run_dir=sys.argv[1]), hooks=hooks) as session:
    model = session.wrap(torch.nn.Linear(4, 4))
    session.snapshot_state({"model": model})
    if sys.argv[2] == "late":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    if sys.argv[2] == "child":
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        sys.exit(0)
    open(sys.argv[1] + "/there", "w").close()
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("when", ["handler", "late"])
def test_a_program_with_a_handler_of_its_own_keeps_it(
    launcher: Launcher, start_ranks: StartRanks, tmp_path: Path, when: str
) -> None:
    (tmp_path / "run").mkdir()
    script = tmp_path / "own.py"
    script.write_text(OWN_HANDLER)
    ranks = start_ranks(1, script, str(tmp_path / "run"), when, env=environ(launcher))
    wait_until((tmp_path / "run" / "there").exists, what="a session")
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.wait() == [7], ranks.log()
    assert launcher.signalled == []


def test_a_forked_child_ends_by_the_signal_as_ever(
    launcher: Launcher, start_ranks: StartRanks, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    script = tmp_path / "own.py"
    script.write_text(OWN_HANDLER)
    ranks = start_ranks(1, script, str(tmp_path / "run"), "child", env=environ(launcher))
    assert ranks.wait() == [0], ranks.log()
    assert launcher.signalled == []
