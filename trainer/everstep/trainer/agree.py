"""What all ranks must do alike, settled in one small all-reduce a step.

The losses travel while the last backward still runs; what the step waits for is the second, with
the votes: non-finite values, decisions, snapshots wanted, savers busy, hooks that failed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from everstep.sdk.hooks import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

_NON_FINITE, _SKIP, _STOP, _SNAPSHOT, _MEMORY, _BUSY, _LAYOUT, _EMERGENCY, _HOOKS = range(9)


class Vote(NamedTuple):
    """What this rank brings.

    `snapshot` asks for one on disk, `memory` for one in memory at least; `busy` says that none
    could be taken here now, `layout` that the state has outgrown its layout, `emergency` that this
    rank's node is about to go: all of them save this step, whatever is in flight.
    """

    finite: bool
    decision: Decision
    snapshot: bool
    busy: bool
    failures: Sequence[int]
    memory: bool = False
    layout: bool = False
    emergency: bool = False


class Agreed(NamedTuple):
    """What every rank now knows; `failures` counts this step's, per hook, over all ranks."""

    finite: bool
    decision: Decision
    snapshot: bool
    busy: bool
    failures: Sequence[int]
    memory: bool = False
    layout: bool = False
    emergency: bool = False


class Agreement:
    """Holds the two small vectors of one training process."""

    def __init__(self, *, hooks: int, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._votes = torch.zeros(_HOOKS + hooks, dtype=torch.float64, device=device)
        self._work: dist.Work | None = None

    def add(self, loss_sum: torch.Tensor, tokens: int) -> None:
        """Add a micro-batch's summed loss and the number of tokens it is a sum over."""
        self._sums[0] += loss_sum.detach()
        self._sums[1] += tokens

    def post(self) -> None:
        """Send this rank's sums on their way; nothing waits yet."""
        self._work = dist.all_reduce(self._sums, async_op=True)

    def loss(self) -> tuple[float, int]:
        """Return mean loss per token and tokens over all ranks, waiting for them if need be."""
        if self._work is None:
            return math.nan, 0
        self._work.wait()
        total, tokens = self._sums.tolist()
        return (total / tokens if tokens else math.nan), int(tokens)

    def settle(self, vote: Vote) -> Agreed:
        """Join this rank's vote with all others'; every rank gets the same answer."""
        mine = [
            not vote.finite,
            vote.decision is Decision.SKIP_UPDATE,
            vote.decision is Decision.STOP,
            vote.snapshot,
            vote.memory,
            vote.busy,
            vote.layout,
            vote.emergency,
            *vote.failures,
        ]
        self._votes.copy_(torch.tensor(mine, dtype=torch.float64))
        dist.all_reduce(self._votes)
        all_votes = self._votes.tolist()
        self._sums.zero_()
        self._work = None
        return Agreed(
            finite=not all_votes[_NON_FINITE],
            decision=_worst(all_votes),
            snapshot=bool(all_votes[_SNAPSHOT]),
            memory=bool(all_votes[_MEMORY]),
            busy=bool(all_votes[_BUSY]),
            layout=bool(all_votes[_LAYOUT]),
            emergency=bool(all_votes[_EMERGENCY]),
            failures=[int(n) for n in all_votes[_HOOKS:]],
        )


def _worst(votes: Sequence[float]) -> Decision:
    if votes[_STOP]:
        return Decision.STOP
    # A step with a nan or an infinity in it must never reach the weights, whoever saw it.
    if votes[_SKIP] or votes[_NON_FINITE]:
        return Decision.SKIP_UPDATE
    return Decision.PROCEED
