"""A loop of one's own gets the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.ranks import StartRanks, wait_until
from tests.trainer.test_exact import committed, last_snapshot

from everstep.trainer import ledger
from everstep.trainer.snapshot.compare import differences

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_example_goes_on_after_a_kill_dropout_and_all(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    assert start_ranks(3, EXAMPLE, tmp_path / "whole").wait() == [0] * 3

    run = start_ranks(3, EXAMPLE, tmp_path / "killed")
    wait_until(lambda: committed(tmp_path / "killed", 50), what="a snapshot")
    run.kill(2)
    assert 0 not in run.wait()
    assert start_ranks(3, EXAMPLE, tmp_path / "killed").wait() == [0] * 3

    whole, killed = last_snapshot(tmp_path / "whole"), last_snapshot(tmp_path / "killed")
    assert killed.name == "s000200-g2"
    assert differences(whole, killed) == []


def test_the_example_is_short() -> None:
    lines = EXAMPLE.read_text().split('"""', 2)[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


LEAVES_EARLY = """
import sys
import torch
from everstep.trainer import Session, SessionConfig
with Session(SessionConfig(run_dir=sys.argv[1], ledger=True)) as session:
    model = session.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = session.snapshot_state({"model": model, "optimizer": optimizer})
    for step in session.steps(10, batch=4):
        if step.number == begin + 4:
            break
        session.step(optimizer, loss=model(torch.ones(2, 2)).mean())
"""


def test_a_loop_left_early_resumes_at_the_step_it_did_not_finish(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    script = tmp_path / "early.py"
    script.write_text(LEAVES_EARLY)
    for _ in range(4):
        ranks = start_ranks(2, script, tmp_path / "run")
        assert ranks.wait() == [0, 0], ranks.log()
    account = ledger.account(ledger.read(tmp_path / "run/ledger"), end=40)
    assert account.exactly_once
    assert account.applied == 40


SLOW_DISK = """
import os, sys, time
from everstep.snapshots import marker
real = marker.write
def slow(folder, facts):
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        time.sleep(0.05)
    real(folder, facts)
marker.write = slow
sys.argv[0] = sys.argv.pop(1)
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_no_rank_ends_well_before_the_last_snapshot_is_durable(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW_DISK)
    ranks = start_ranks(3, script, EXAMPLE, tmp_path / "run")
    ranks.wait_for_one()
    assert committed(tmp_path / "run", 200)
    assert ranks.wait() == [0] * 3


STANDS_STILL = """
import pathlib, runpy, sys, time
from everstep.snapshots import marker
from everstep.trainer.snapshot.files import HashedFiles
script, run, at = sys.argv[1:4]
def stand_at(path):
    if "s000100" in str(path) and at in path.name:
        pathlib.Path(run, "standing").touch()
        while True:
            time.sleep(1)
real_open, real_write = HashedFiles.open, marker.write
def open_(self, path):
    stand_at(path)
    return real_open(self, path)
def write(folder, facts):
    stand_at(folder / marker.NAME)
    real_write(folder, facts)
HashedFiles.open, marker.write = open_, write
sys.argv = [script, run]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("at", ["__0_0.distcp", "__1_0.distcp", ".metadata", "COMMIT.json"])
def test_a_kill_in_the_middle_of_a_save_never_costs_the_one_before(
    at: str, tmp_path: Path, start_ranks: StartRanks
) -> None:
    script, run = tmp_path / "stands.py", tmp_path / "run"
    script.write_text(STANDS_STILL)
    ranks = start_ranks(2, script, EXAMPLE, run, at)
    wait_until((run / "standing").exists, what="the save")
    ranks.kill()
    assert ranks.wait() == [-9, -9]
    assert committed(run, 50)
    assert not committed(run, 100)

    again = start_ranks(2, EXAMPLE, run)
    assert again.wait() == [0, 0], again.log()
    names = [e.name for e in (run / "snapshots").iterdir()]
    assert "s000100-g2" in names
    assert "s000100-g1" not in names, "what was left unfinished is cleared away"
