"""`python -m everstep.trainer` as people start it: stock torchrun, wrong files, lost peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.trainer.ranks import DEADLINE_S, StartRanks, WriteConfig, wait_until
from tests.trainer.test_exact import TRAINER, committed, last_snapshot

from everstep.trainer.snapshot.compare import differences

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=3"]


def environ(**more: str) -> Mapping[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
    return kept | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"} | more


@pytest.mark.timeout(300)
def test_under_stock_torchrun_a_killed_rank_changes_nothing(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    settings: dict[str, Any] = {"steps": 120, "hooks": {"snapshot": {"every_steps": 20}}}
    config = str(write_config("killed", **settings))
    with subprocess.Popen(
        [*TORCHRUN, "--max-restarts=3", *TRAINER, config],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as run:
        try:
            wait_until(partial(committed, tmp_path / "killed", 20), what="a snapshot")
            psutil.Process(run.pid).children()[-1].kill()
            output = run.communicate(timeout=DEADLINE_S)[0].decode()
        finally:
            run.terminate()
    assert run.returncode == 0, output
    assert "resumed from s000" in output

    undisturbed = start_ranks(3, *TRAINER, write_config("whole", **settings))
    assert undisturbed.wait() == [0] * 3
    whole, killed = last_snapshot(tmp_path / "whole"), last_snapshot(tmp_path / "killed")
    assert killed.name == "s000120-g2"
    assert differences(whole, killed) == []


Break = Callable[[str], str]


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda text: text.replace("lr =", "learning_rate ="), "unknown key"),
        (lambda text: "lr = 0.1\n" + text, "outside any table"),
        (lambda text: text.replace("steps = 12", 'steps = "many"'), "'steps'"),
        (lambda text: text.replace("heads = 2", "heads = 3"), "heads"),
        (lambda text: text.replace("[hooks.snapshot]", "[hook.snapshot]"), "did you mean [hooks]"),
        (lambda text: text.replace("[hooks.snapshot]", "[hooks.snapshots]"), "'snapshot'"),
        (lambda text: text.replace("every_steps = 4", "every_steps = 0"), "every_steps"),
        (lambda text: text.replace("tokens.bin", "nothing.bin"), "prepare_bytes"),
        (lambda text: text.replace("steps = 12", "steps = "), "not valid TOML"),
        (lambda text: text.replace("[trainer]", "[trainer]\nglobal_batch = 7"), "multiple"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_64(
    break_it: Break, told: str, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    path = write_config(lr=1e-3)
    path.write_text(break_it(path.read_text()))
    ranks = start_ranks(2, *TRAINER, path)
    assert ranks.wait() == [64, 64], ranks.log()
    lines = [line for line in ranks.log(0).splitlines() if line.startswith("everstep: ")]
    assert len(lines) == 1
    assert told in lines[0]
    assert "Traceback" not in ranks.log()
    assert "everstep: " not in ranks.log(1), "one line a node"


def test_ranks_that_cannot_share_the_batch_say_what_would_fit(
    write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    ranks = start_ranks(4, *TRAINER, write_config(global_batch=12, micro_batch=2))
    assert ranks.wait() == [64] * 4
    assert "make global_batch a multiple of 8" in ranks.log(0)


def test_another_seed_in_the_same_folder_is_refused(
    write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    assert start_ranks(1, *TRAINER, write_config(seed=1)).wait() == [0]
    ranks = start_ranks(1, *TRAINER, write_config(seed=2))
    assert ranks.wait() == [64]
    assert "Set seed = 1" in ranks.log()


def test_a_lost_peer_ends_the_others(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    config = write_config(steps=100_000)
    error_file = tmp_path / "error.json"
    ranks = start_ranks(3, *TRAINER, config, env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    wait_until(partial(committed, tmp_path / "run", 4), what="a snapshot")
    ranks.kill(1)
    codes = ranks.wait()
    assert codes[1] == -9
    assert "Traceback" in ranks.log(codes.index(1))
    assert "message" in json.loads(error_file.read_text())


def test_a_run_that_is_complete_ends_at_once_when_it_is_started_again(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    assert start_ranks(2, *TRAINER, write_config()).wait() == [0, 0]
    before = sorted(p.name for p in (tmp_path / "run/snapshots").iterdir())
    assert start_ranks(2, *TRAINER, write_config()).wait() == [0, 0]
    assert sorted(p.name for p in (tmp_path / "run/snapshots").iterdir()) == before


def test_a_model_of_another_shape_in_the_same_folder_is_refused(
    write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    assert start_ranks(1, *TRAINER, write_config()).wait() == [0]
    ranks = start_ranks(1, *TRAINER, write_config(model={"dim": 64}))
    assert ranks.wait() == [64]
    assert "'model' of snapshot s000012-g1 does not fit" in ranks.log()


def test_a_folder_that_cannot_be_made_is_one_line_on_every_rank(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    (tmp_path / "file").touch()
    ranks = start_ranks(2, *TRAINER, write_config(run_dir=str(tmp_path / "file" / "run")))
    assert ranks.wait() == [64, 64]
    assert "cannot be made: Not a directory" in ranks.log(0)


LAST_ONE_FAILS = """
import os, resource, sys
from pathlib import Path
from everstep.snapshots import writer
from everstep.trainer import config, train
from everstep.trainer.keeper import Keeper
real_start, real_take, times, pids = writer.start, Keeper.take, [int(os.environ["TIMES"])], []
def start(*args, **options):
    started = real_start(*args, **options)
    pids.append(started.pid)
    return started
def take(self, *args, final, **options):
    if final and os.environ["RANK"] == "1":
        times[0] -= 1
        limit = 1000 if times[0] >= 0 else resource.RLIM_INFINITY
        resource.prlimit(pids[-1], resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return real_take(self, *args, final=final, **options)
writer.start, Keeper.take = start, take
train.train(*config.load(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(("times", "code"), [(1, 0), (99, 1)])
def test_the_last_snapshot_is_tried_again_and_no_success_is_claimed_without_it(
    times: int, code: int, tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    script = tmp_path / "full.py"
    script.write_text(LAST_ONE_FAILS)
    ranks = start_ranks(2, script, write_config(), env={"TIMES": str(times)})
    assert ranks.wait() == [code, code], ranks.log()
    assert committed(tmp_path / "run", 12) is (code == 0)
    if code:
        assert "the training is done, but its last snapshot could not be written" in ranks.log(0)
        assert "File too large" in ranks.log(0)
        assert "it resumes from step 8" in ranks.log(0)
