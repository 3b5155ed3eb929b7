"""What the agent sees of a rank, and what the coordinator is told of its snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.fake_agent import FakeAgent
from tests.trainer.ranks import StartRanks, WriteConfig, wait_until

from everstep.snapshots import catalogue
from everstep.wire.messages import Hello, RankFinding, SnapshotRejected

TRAINER = ("-m", "everstep.trainer", "--config")


@pytest.fixture
def agent(short_folder: Path) -> Iterator[FakeAgent]:
    fake = FakeAgent(short_folder)
    yield fake
    fake.close()


def place(agent: FakeAgent, generation: int, resume: str = "") -> dict[str, str]:
    return {
        "EVERSTEP_SOCKET": str(agent.path),
        "EVERSTEP_JOB": "nonce",
        "EVERSTEP_GENERATION": str(generation),
        "EVERSTEP_RESUME": resume,
    }


def test_ranks_show_their_pages_and_rank_0_tells_of_every_commit(
    agent: FakeAgent, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    ranks = start_ranks(2, *TRAINER, write_config(), env=place(agent, 3))
    seen: dict[str, int] = {}

    def note_phases() -> bool:
        if state := agent.state(1):
            seen.setdefault(state.phase, state.step)
        ranks.pump()
        return len(ranks.codes) == 2

    wait_until(note_phases, what="the end of the ranks")
    assert ranks.wait() == [0, 0], ranks.log()

    hellos = {m.rank: m for m in agent.heard if isinstance(m, Hello) and m.page}
    assert {h.rank: (h.role, h.job, h.generation, h.world_size) for h in hellos.values()} == {
        0: ("rank", "nonce", 3, 2),
        1: ("rank", "nonce", 3, 2),
    }
    assert {"first_step", "step"} <= seen.keys()
    assert agent.state(0) == agent.state(0)._replace(phase="end", step=12)  # type: ignore[union-attr]  # it is there
    records = agent.pages[1].records(0)
    assert [r.step for _, r in records] == list(range(1, 13))
    last = records[-1][1]
    assert last.tokens == 12 * 16
    assert 0 < last.loss < 10
    assert last.grad_norm > 0
    assert last.step_s >= last.forward_s + last.backward_s > 0

    commits = agent.commits()
    # Markers of two that were in flight together may be put down in any order.
    assert sorted((c.id, c.final, c.samples) for c in commits) == [
        ("s000004-g3", False, 48),
        ("s000008-g3", False, 96),
        ("s000012-g3", True, 144),
    ]
    assert all(Path(c.path).is_dir() and c.nonce == "nonce" and c.bytes > 0 for c in commits)


def test_nothing_is_deleted_before_the_coordinator_has_it(
    agent: FakeAgent, tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    agent.acknowledge = False
    snapshot = {"every_steps": 2, "keep": 2, "when_busy": "wait"}
    config = write_config(steps=8, hooks={"snapshot": snapshot})
    ranks = start_ranks(1, *TRAINER, config, env=place(agent, 1))
    assert ranks.wait() == [0], ranks.log()
    assert len(catalogue.entries(tmp_path / "run" / "snapshots")) == 4


def test_the_named_snapshot_is_taken_and_a_bad_one_reported(
    agent: FakeAgent, tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    assert start_ranks(2, *TRAINER, write_config(steps=12), env=place(agent, 1)).wait() == [0, 0]
    damaged = tmp_path / "run/snapshots/s000008-g1/__1_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-7])

    env = place(agent, 2, resume="s000008-g1,s000004-g1")
    ranks = start_ranks(2, *TRAINER, write_config(steps=16), env=env)
    assert ranks.wait() == [0, 0], ranks.log()
    assert "resumed from s000004-g1" in ranks.log(0)
    assert "resumed from s000004-g1" in ranks.log(1)
    assert {m.id for m in agent.heard if isinstance(m, SnapshotRejected)} == {"s000008-g1"}


def test_when_no_named_snapshot_is_good_the_run_ends_and_says_so(
    agent: FakeAgent, tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    env = place(agent, 2, resume="s000008-g1,s000004-g1")
    ranks = start_ranks(2, *TRAINER, write_config(), env=env)
    assert ranks.wait() == [1, 1]
    assert "no snapshot in" in ranks.log(0)
    assert "s000004-g1 does not exist" in ranks.log(0)
    rejected = {m.id for m in agent.heard if isinstance(m, SnapshotRejected)}
    assert rejected == {"s000008-g1", "s000004-g1"}
    assert not (tmp_path / "run/snapshots").exists()


def test_a_full_disk_is_told_and_training_goes_on(
    agent: FakeAgent, tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    script = tmp_path / "full.py"
    script.write_text("""
import os, sys
from pathlib import Path
from everstep.trainer import config, train
if os.environ["RANK"] == "1":
    os.environ["EVERSTEP_FAULT"] = "mid-file:enospc"
train.train(*config.load(Path(sys.argv[1])))
""")
    ranks = start_ranks(2, script, write_config(), env=place(agent, 1))
    assert ranks.wait() == [0, 0], ranks.log()
    commits = agent.commits()
    assert len(commits) == 2
    assert commits[-1].final
    findings = [m.finding for m in agent.heard if isinstance(m, RankFinding)]
    assert [f.name for f in findings] == ["snapshot.failed"]
    assert "rank 1: No space left on device" in findings[0].summary


def test_an_agent_that_is_not_there_costs_nothing(
    short_folder: Path, tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    env = {"EVERSTEP_SOCKET": str(short_folder / "nobody.sock"), "EVERSTEP_RESUME": ""}
    ranks = start_ranks(1, *TRAINER, write_config(), env=env)
    assert ranks.wait() == [0], ranks.log()
    assert (tmp_path / "run/snapshots/s000012-g1").is_dir()
