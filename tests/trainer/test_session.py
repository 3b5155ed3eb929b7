"""A loop of one's own gets the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.ranks import StartRanks, wait_until
from tests.trainer.test_exact import committed, last_snapshot

from everstep.snapshots import marker
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


def test_no_rank_ends_well_before_the_last_snapshot_is_durable(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    slow = {"EVERSTEP_FAULT": "before-marker:sleep=1"}
    ranks = start_ranks(3, EXAMPLE, tmp_path / "run", env=slow)
    ranks.wait_for_one()
    assert committed(tmp_path / "run", 200)
    assert ranks.wait() == [0] * 3


STANDS_STILL = """
import sys, time
import torch
from everstep.trainer import Session, SessionConfig
hooks = {"snapshot": {"every_steps": 1, "when_busy": "wait"}}
with Session(SessionConfig(run_dir=sys.argv[1]), hooks=hooks) as session:
    model = session.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = session.snapshot_state({"model": model, "optimizer": optimizer})
    print("begun at", begin)
    for step in session.steps(4):
        while step.number == 3 and not begin:
            time.sleep(0.1)
        session.step(optimizer, loss=model(torch.ones(2, 2)).mean())
"""


def test_a_kill_of_all_ranks_in_the_middle_of_a_save_does_not_cost_it(
    tmp_path: Path, short_folder: Path, start_ranks: StartRanks
) -> None:
    script, run = tmp_path / "stands.py", tmp_path / "run"
    script.write_text(STANDS_STILL)
    folders = short_folder
    slow = {"EVERSTEP_FAULT": "before-part:sleep=2#2", "TMPDIR": str(folders)}
    ranks = start_ranks(2, script, run, env=slow)
    save = run / "snapshots" / "s000002-g1"
    wait_until(lambda: len(list(save.glob("__*"))) == 2, what=f"the save, see {ranks.logs}")
    ranks.kill()
    assert ranks.wait() == [-9, -9]
    assert not committed(run, 2)
    wait_until(lambda: committed(run, 2), what="what the writers finish without the ranks")
    wait_until(lambda: not list(folders.iterdir()), what="the writers' end")
    again = start_ranks(2, script, run)
    assert again.wait() == [0, 0], again.log()
    assert committed(run, 4)
    assert "begun at 2" in again.log()


LOSES_ITS_WRITER = """
import os, sys
import torch
from everstep.trainer import Session, SessionConfig
hooks = {"snapshot": {"every_steps": 1, "when_busy": "wait"}}
with Session(SessionConfig(run_dir=sys.argv[1]), hooks=hooks) as session:
    model = session.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.snapshot_state({"model": model, "optimizer": optimizer})
    for step in session.steps(6):
        if step.number == 2:  # the first writer runs; the next ones are healthy
            del os.environ["EVERSTEP_FAULT"]
        session.step(optimizer, loss=model(torch.ones(2, 2)).mean())
"""


@pytest.mark.parametrize("point", ["mid-file", "before-part", "before-metadata", "before-marker"])
def test_a_writer_that_dies_costs_what_it_had_in_flight_and_is_replaced(
    point: str, tmp_path: Path, start_ranks: StartRanks
) -> None:
    script, run = tmp_path / "loses.py", tmp_path / "run"
    script.write_text(LOSES_ITS_WRITER)
    ranks = start_ranks(2, script, run, env={"EVERSTEP_FAULT": f"{point}:kill"})
    assert ranks.wait() == [0, 0], ranks.log()
    assert "snapshot.failed: s000001-g1" in ranks.log(0)
    assert not (run / "snapshots" / "s000001-g1" / marker.NAME).exists()
    assert committed(run, 6), "the last one is tried again"
