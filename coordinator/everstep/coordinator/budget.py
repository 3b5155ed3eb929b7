"""How often a job may fail without getting anywhere, before going on is pointless. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from everstep.wire.exit_codes import NO_REQUEUE
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep.coordinator.config import BudgetConfig
    from everstep.coordinator.facts import FailureCounted


class Stop(NamedTuple):
    """The job is to end: with which code, why, and the text that its user should see."""

    exit_code: int
    why: str
    error: str | None


def since_progress(failures: Sequence[FailureCounted]) -> list[FailureCounted]:
    """Return the failures since the last one before which the job had got somewhere.

    Progress is a step higher than at any failure before, or a new snapshot.
    """
    start = 0
    for i in range(1, len(failures)):
        before, now = failures[i - 1], failures[i]
        if now.max_step > before.max_step or now.newest_snapshot != before.newest_snapshot:
            start = i
    return list(failures[start:])


def spent(failures: Sequence[FailureCounted], budget: BudgetConfig) -> Stop | None:
    """Return why the job must stop, None while it may go on. `failures` are since progress."""
    if not failures:
        return None
    return (
        _same_cause(failures, budget)
        or _same_rank_killed(failures, budget)
        or _mixed(failures, budget)
        or _outside(failures, budget)
    )


def suspect_snapshot(failures: Sequence[FailureCounted]) -> str | None:
    """Return the snapshot after which the run failed at once twice, in the same way.

    At once means that its ranks came up and none was seen past the first step after the snapshot:
    a script that does not get as far as that says nothing about the snapshot.
    """
    own = [f for f in failures if f.failure in ("error", "crash")]
    if len(own) < 2:
        return None
    before, last = own[-2:]
    if last.cause != before.cause or last.resumed_from != before.resumed_from:
        return None
    return last.resumed_from if _at_once(before) and _at_once(last) else None


def _at_once(failure: FailureCounted) -> bool:
    if failure.resumed_from is None or failure.reached is None:
        return False
    return failure.reached <= SnapshotId.parse(failure.resumed_from).step + 1


def _same_cause(failures: Sequence[FailureCounted], budget: BudgetConfig) -> Stop | None:
    last = failures[-1]
    if last.failure not in ("error", "crash"):
        return None
    same = [f for f in failures if f.failure == last.failure and f.cause == last.cause]
    if len(same) < budget.same_cause:
        return None
    why = f"the same failure {len(same)} times without progress ({_described(last)}): not retried"
    return Stop(last.exit_code, why, last.error)


def _same_rank_killed(failures: Sequence[FailureCounted], budget: BudgetConfig) -> Stop | None:
    last = failures[-1]
    if last.failure != "killed":
        return None
    in_a_row = 0
    for failure in reversed(failures):
        if failure.failure != "killed" or failure.cause != last.cause:
            break
        in_a_row += 1
    if in_a_row <= budget.same_rank_killed:
        return None
    why = (
        f"rank {last.rank} was killed {in_a_row} times in a row without progress "
        f"({_described(last)}): does it run out of memory?"
    )
    return Stop(last.exit_code, why, last.error)


def _mixed(failures: Sequence[FailureCounted], budget: BudgetConfig) -> Stop | None:
    own = [f for f in failures if f.failure in ("error", "crash", "hang")]
    if len(own) < budget.mixed:
        return None
    causes = "; ".join(_described(f) for f in own[-budget.mixed :])
    why = f"{len(own)} generations failed without a new snapshot or step ({causes})"
    return Stop(NO_REQUEUE, why, own[-1].error)


def _outside(failures: Sequence[FailureCounted], budget: BudgetConfig) -> Stop | None:
    if len(failures) < budget.outside:
        return None
    why = (
        f"{len(failures)} generations in a row ended without a new snapshot or step, most of them "
        f"from outside; the last: {_described(failures[-1])}"
    )
    return Stop(NO_REQUEUE, why, failures[-1].error)


def _described(failure: FailureCounted) -> str:
    where = "" if failure.rank is None else f", rank {failure.rank}"
    return f"generation {failure.generation}: {failure.cause}{where}"
