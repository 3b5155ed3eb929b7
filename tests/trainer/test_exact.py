"""The run is the same run: bit by bit at a constant world size, sample by sample otherwise."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.trainer.ranks import StartRanks, WriteConfig, wait_until

from everstep.snapshots import catalogue
from everstep.trainer import ledger
from everstep.trainer.snapshot.compare import differences, newest

TRAINER = ("-m", "everstep.trainer", "--config")

WITHOUT_THE_CURE = """
import sys
from pathlib import Path
from everstep.trainer import config, replicate, train
replicate.discard_one_pass = lambda *args, **kwargs: None
train.train(*config.load(Path(sys.argv[1])))
"""


def last_snapshot(run: Path) -> Path:
    found = newest(run / "snapshots")
    assert found is not None
    return found


def committed(run: Path, step: int) -> bool:
    found = catalogue.entries(run / "snapshots")
    return any(e.committed and e.id.step >= step for e in found)


@pytest.mark.parametrize("world", [3, 4])
def test_a_run_that_was_killed_twice_ends_bit_equal_with_an_undisturbed_one(
    world: int, tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    settings = {"steps": 40, "micro_batch": 1}
    undisturbed = start_ranks(world, *TRAINER, write_config("undisturbed", **settings))
    assert undisturbed.wait() == [0] * world, undisturbed.log()

    config = write_config("killed", **settings)
    for step, victim in ((4, world - 1), (12, 0)):
        run = start_ranks(world, *TRAINER, config)
        wait_until(partial(committed, tmp_path / "killed", step), what="a snapshot")
        run.kill(victim)
        codes = run.wait()
        assert codes[victim] == -9
        assert 0 not in codes, "nobody may call this a success"
    assert start_ranks(world, *TRAINER, config).wait() == [0] * world

    a, b = last_snapshot(tmp_path / "undisturbed"), last_snapshot(tmp_path / "killed")
    assert a.name.startswith("s000040")
    assert b.name == "s000040-g3"
    assert differences(a, b) == []


def test_three_ranks_differ_after_a_resume_unless_one_pass_is_discarded(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    script = tmp_path / "without.py"
    script.write_text(WITHOUT_THE_CURE)
    constant = {"lr": 1e-3, "min_lr_ratio": 1.0, "warmup_steps": 0}
    for name, steps in (("whole", 8), ("parts", 4), ("parts", 8)):
        ranks = start_ranks(3, script, write_config(name, steps=steps, **constant))
        assert ranks.wait() == [0] * 3, ranks.log()

    found = differences(last_snapshot(tmp_path / "whole"), last_snapshot(tmp_path / "parts"))
    assert any(name.startswith("model.") for name in found), "is the cure needed no more?"


def test_every_sample_is_applied_once_while_three_ranks_become_two_and_three_again(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    config = write_config(steps=60, micro_batch=2)
    run = tmp_path / "run"
    for world, until in ((3, 8), (2, 24)):
        ranks = start_ranks(world, *TRAINER, config)
        wait_until(partial(committed, run, until), what=f"a snapshot of {world} ranks")
        ranks.kill(1)
        ranks.wait()
    last = start_ranks(3, *TRAINER, config)
    assert last.wait() == [0] * 3, last.log()

    books = ledger.read(run / "ledger")
    account = ledger.account(books, end=60 * 12)
    assert account.exactly_once
    assert account.applied == 60 * 12
    assert sorted({(b.chapter.generation, b.chapter.world_size) for b in books}) == [
        (1, 3),
        (2, 2),
        (3, 3),
    ]


def test_windows_that_the_plan_skips_are_left_out_and_nothing_else(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    env = {"EVERSTEP_SKIP": "30-54,100-101"}
    assert start_ranks(2, *TRAINER, write_config(steps=10), env=env).wait() == [0, 0]
    # What was skipped once stays skipped, also when nobody says so any more.
    assert start_ranks(2, *TRAINER, write_config(steps=14)).wait() == [0, 0]

    books = ledger.read(tmp_path / "run" / "ledger")
    end = 14 * 12 + 25
    account = ledger.account(books, end=end, skip_windows=[(30, 54), (100, 101)])
    assert account.exactly_once
    assert account.applied == 14 * 12
    assert account.skipped == [(30, 54), (100, 101)]
    assert not ledger.account(books, end=end).exactly_once
