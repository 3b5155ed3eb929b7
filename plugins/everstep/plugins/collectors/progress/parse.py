"""What the ranks' progress pages say, as readings and findings: pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from everstep.sdk import Evidence, Finding, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep.sdk import RankProgress

_UNITS = {
    "generation": "{generation}",
    "step": "{step}",
    "loss": "1",
    "grad_norm": "1",
    "tokens": "{token}",
    "lr": "1",
}


class Patience(NamedTuple):
    """How long a rank may stand in a step: `factor` times its own slowest, at least `least_s`.

    `unlearned_s` holds for a rank that has not done enough steps to have a pace of its own.
    """

    least_s: float
    factor: float
    unlearned_s: float

    def limit_s(self, rank: RankProgress) -> float:
        """Return how long this rank may stand."""
        if rank.p99_step_s is None:
            return self.unlearned_s
        return max(self.least_s, self.factor * rank.p99_step_s)


def readings(rank: RankProgress, phases: Sequence[str]) -> list[Reading]:
    """Return where one rank is. What it does not know (a loss before its first step) is None."""
    who = {"everstep.job": rank.job, "everstep.rank": str(rank.rank)}
    values = {name: getattr(rank, name) for name in _UNITS}
    return [
        *(
            Reading(name=f"everstep.rank.{name}", value=value, unit=_UNITS[name], attributes=who)
            for name, value in values.items()
        ),
        Reading(name="everstep.rank.step.duration", value=rank.step_s, unit="s", attributes=who),
        Reading(name="everstep.rank.standing", value=rank.standing_s, unit="s", attributes=who),
        *(
            Reading(
                name="everstep.rank.phase",
                value=float(rank.phase == phase),
                attributes={**who, "everstep.phase": phase},
            )
            for phase in phases
        ),
    ]


def stands(rank: RankProgress, patience: Patience) -> bool:
    """Return whether a rank has been in one step for too long. Other phases have no pace."""
    return rank.phase == "step" and rank.standing_s > patience.limit_s(rank)


def standing(rank: RankProgress, patience: Patience, at_s: float) -> Finding:
    """Return the finding for a rank that stands."""
    limit_s = patience.limit_s(rank)
    return Finding(
        name="rank.standing",
        component=f"rank:{rank.rank}",
        severity="warning",
        summary=f"rank {rank.rank} (pid {rank.pid}) has stood in step {rank.step} for "
        f"{rank.standing_s:.1f} s, over {limit_s:.1f} s",
        at_s=at_s,
        evidence=[
            Evidence(
                at_s=at_s - rank.standing_s,
                what=f"step {rank.step} of generation {rank.generation} of job {rank.job} began",
                source=f"progress page of pid {rank.pid}",
            )
        ],
        suggested_action="monitor",
    )
