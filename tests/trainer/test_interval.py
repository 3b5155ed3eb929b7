"""Real ranks that find out for themselves how often to take a snapshot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.trainer.fake_agent import FakeAgent
from tests.trainer.ranks import StartRanks, WriteConfig
from tests.trainer.test_exact import TRAINER

from everstep.wire.messages import RankFinding


@pytest.mark.timeout(300)
def test_two_ranks_keep_to_the_interval_that_the_first_has_chosen(
    short_folder: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    agent = FakeAgent(short_folder)
    limits = {"every_steps": "auto", "min_every_steps": 3, "max_every_steps": 8}
    environ = {
        "EVERSTEP_SOCKET": str(agent.path),
        "EVERSTEP_JOB": "j",
        "EVERSTEP_GENERATION": "1",
        "EVERSTEP_RESUME": "",
        "EVERSTEP_MTBF_S": "36000000",
    }
    config = write_config(steps=30, hooks={"snapshot": {**limits, "when_busy": "wait"}})
    ranks = start_ranks(2, *TRAINER, config, env=environ)
    assert ranks.wait() == [0, 0], ranks.log()
    agent.close()
    steps = [taken.step for taken in agent.commits()]
    # The first, then every 8th, then the last; one that a newer one has overtaken is given up.
    assert {30} <= set(steps) <= {3, 11, 19, 27, 30}, ranks.log()
    found = [m for m in agent.heard if isinstance(m, RankFinding)]
    chosen = [m for m in found if m.finding.name == "snapshot.interval"]
    assert {m.rank for m in chosen} == {0}
    assert "MTBF 416.7 d" in chosen[0].finding.summary
    every = re.match(r"every (\d+) steps", chosen[0].finding.summary)
    assert every is not None
    # With failures that rare even the shortest stall asks for the longest interval allowed.
    assert every[1] == "8"
