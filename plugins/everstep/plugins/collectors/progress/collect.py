"""Asks the agent for the progress pages that it holds anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from everstep.plugins.collectors.progress import parse
from everstep.sdk import PHASES, Episodes, Finding, RankProgress, Reading, Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class ProgressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a rank counts as standing. `sample.toml` says it in the operator's words."""

    interval_s: Seconds = 1.0
    standing_least_s: Seconds = 5.0
    standing_factor: Annotated[float, msgspec.Meta(ge=1)] = 3.0
    standing_unlearned_s: Seconds = 120.0


class ProgressCollector:
    """Exposes the ranks of all jobs on this node; without a job there is nothing to say."""

    Config = ProgressConfig

    def __init__(
        self,
        config: ProgressConfig,
        clock: Callable[[], float],
        pages: Callable[[], list[RankProgress]],
    ) -> None:
        self._pages = pages
        self._clock = clock
        self._episodes = Episodes()
        self._patience = parse.Patience(
            config.standing_least_s, config.standing_factor, config.standing_unlearned_s
        )

    def collect(self) -> Iterable[Reading | Finding]:
        """Return where every rank is, and which began or ceased to stand."""
        now_s = self._clock()
        out: list[Reading | Finding] = []
        wrong: dict[tuple[str, int, int], Finding] = {}
        for rank in self._pages():
            out += parse.readings(rank, PHASES)
            if parse.stands(rank, self._patience):
                # Two jobs on one node may both have a rank 0.
                who = (rank.job, rank.generation, rank.rank)
                wrong[who] = parse.standing(rank, self._patience, now_s)
        return out + self._episodes.update(wrong, now_s)
