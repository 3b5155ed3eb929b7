"""What ranks write on their pages, as readings, and who has come to a stand."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.plugins.collectors.progress import ProgressCollector
from everstep.sdk import PHASES, Finding, RankProgress, Reading
from everstep.sdk.testing import check_contract


def rank(number: int = 0, **changed: Any) -> RankProgress:
    usual: dict[str, Any] = {
        "job": "job-a",
        "generation": 3,
        "rank": number,
        "pid": 4711,
        "phase": "step",
        "step": 120,
        "standing_s": 0.2,
        "p99_step_s": 1.0,
        "loss": 2.5,
        "grad_norm": 0.75,
        "tokens": 65536,
        "lr": 3e-4,
        "step_s": 0.9,
    }
    return RankProgress(**{**usual, **changed})


class Node:
    """A collector whose pages say what a test wants."""

    def __init__(self, **config: Any) -> None:
        self.ranks: list[RankProgress] = []
        self.now_s = 1000.0
        self._collector = ProgressCollector(
            ProgressCollector.Config(**config), clock=lambda: self.now_s, pages=lambda: self.ranks
        )

    def look(self, *ranks: RankProgress) -> tuple[list[Reading], list[Finding]]:
        self.ranks = list(ranks)
        self.now_s += 1
        seen = list(self._collector.collect())
        return (
            [one for one in seen if isinstance(one, Reading)],
            [one for one in seen if isinstance(one, Finding)],
        )

    def told(self, *ranks: RankProgress) -> list[tuple[str, bool]]:
        return [(f.component, f.resolved) for f in self.look(*ranks)[1]]


def test_what_stands_on_a_page_becomes_readings() -> None:
    readings, findings = Node().look(rank(7))
    values = {r.name: r.value for r in readings if r.name != "everstep.rank.phase"}
    assert values == {
        "everstep.rank.generation": 3,
        "everstep.rank.step": 120,
        "everstep.rank.loss": 2.5,
        "everstep.rank.grad_norm": 0.75,
        "everstep.rank.tokens": 65536,
        "everstep.rank.lr": 3e-4,
        "everstep.rank.step.duration": 0.9,
        "everstep.rank.standing": 0.2,
    }
    assert {(r.attributes["everstep.job"], r.attributes["everstep.rank"]) for r in readings} == {
        ("job-a", "7")
    }
    assert findings == []


def test_one_phase_holds_and_the_others_do_not() -> None:
    readings, _ = Node().look(rank(phase="snapshot"))
    phases = {
        r.attributes["everstep.phase"]: r.value for r in readings if r.name == "everstep.rank.phase"
    }
    assert phases == {phase: float(phase == "snapshot") for phase in PHASES}


def test_what_was_not_measured_is_empty_and_not_zero() -> None:
    readings, _ = Node().look(rank(loss=None, grad_norm=None, lr=None, step_s=None))
    values = {r.name: r.value for r in readings}
    for name in ("loss", "grad_norm", "lr", "step.duration"):
        assert values[f"everstep.rank.{name}"] is None


def test_without_a_job_there_is_nothing_to_say() -> None:
    assert Node().look() == ([], [])


def test_a_rank_that_stands_is_told_once_with_when_its_step_began() -> None:
    node = Node()
    _, (finding,) = node.look(rank(3, standing_s=12.0, p99_step_s=2.0))
    assert (finding.name, finding.component, finding.severity) == (
        "rank.standing",
        "rank:3",
        "warning",
    )
    assert "rank 3 (pid 4711) has stood in step 120 for 12.0 s, over 6.0 s" in finding.summary
    assert finding.evidence[0].at_s == node.now_s - 12.0
    assert node.told(rank(3, standing_s=13.0, p99_step_s=2.0)) == []


@pytest.mark.parametrize("gone", [True, False], ids=["its page went", "it went on"])
def test_the_end_of_a_standstill_is_told(gone: bool) -> None:
    node = Node()
    node.look(rank(3, standing_s=12.0))
    assert node.told(*([] if gone else [rank(3)])) == [("rank:3", True)]


@pytest.mark.parametrize(
    ("standing_s", "p99_step_s", "stands"),
    [
        (4.9, 0.1, False),  # quick steps: at least standing_least_s
        (5.1, 0.1, True),
        (29.0, 10.0, False),  # slow steps: three times the slowest
        (30.1, 10.0, True),
        (119.0, None, False),  # no pace yet
        (121.0, None, True),
    ],
)
def test_a_rank_may_stand_for_as_long_as_its_own_steps_explain(
    standing_s: float, p99_step_s: float | None, stands: bool
) -> None:
    told = Node().told(rank(standing_s=standing_s, p99_step_s=p99_step_s))
    assert told == ([("rank:0", False)] if stands else [])


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "step"])
def test_only_a_step_has_a_pace(phase: str) -> None:
    assert Node().told(rank(phase=phase, standing_s=3600.0)) == []


def test_patience_can_be_changed() -> None:
    node = Node(standing_least_s=60.0, standing_factor=10.0)
    assert node.told(rank(standing_s=59.0, p99_step_s=1.0)) == []
    assert node.told(rank(standing_s=61.0, p99_step_s=1.0)) == [("rank:0", False)]


def test_two_jobs_on_a_node_do_not_hide_each_others_ranks() -> None:
    node = Node()
    both = rank(0, standing_s=9.0), rank(0, job="job-b", standing_s=9.0)
    assert node.told(*both) == [("rank:0", False)] * 2
    assert node.told(both[1]) == [("rank:0", True)]


def test_a_new_generation_of_a_rank_is_a_new_standstill() -> None:
    node = Node()
    node.look(rank(0, standing_s=9.0))
    assert node.told(rank(0, generation=4, standing_s=9.0)) == [("rank:0", False), ("rank:0", True)]


def test_the_contract_is_kept_with_ranks() -> None:
    ranks = [rank(0), rank(1, standing_s=50.0)]
    check_contract(ProgressCollector, offers={"pages": lambda: ranks}, complete=True)
