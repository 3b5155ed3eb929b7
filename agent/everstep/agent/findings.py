"""What this node has found: told to the coordinator until it has journaled it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from everstep.agent.allowance import Allowance
from everstep.wire.messages import Finding, NodeFinding
from everstep.wire.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

REPEAT_S = 60.0
_MAX_UNACKNOWLEDGED = 1000
_MAX_OPEN = 1000
_BURST, _PER_S = 100, 1  # of one source
_LEVELS = {
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.ERROR,
}


class Findings:
    """Logs, keeps and sends findings.

    The same one again within `REPEAT_S` is only counted, and so is what a source says beyond its
    allowance.
    """

    def __init__(self, send: Callable[[NodeFinding], object], clock: Callable[[], float]) -> None:
        """`send` may drop what it is given: everything is sent again by `resend`."""
        self.counts: Counter[str] = Counter()
        self.suppressed: Counter[str] = Counter()
        self._send = send
        self._clock = clock
        self._outbox: Outbox[tuple[str, Finding]] = Outbox(limit=_MAX_UNACKNOWLEDGED)
        self._allowances: dict[str, Allowance] = {}
        self._loud: set[str] = set()
        self._open: dict[tuple[str, str, str], tuple[Finding, float]] = {}

    def add(self, source: str, finding: Finding) -> None:
        """Take in a finding of one plugin, or of the agent itself (`source` "agent")."""
        if self._is_repeat(source, finding) or not self._may_speak(source):
            self.suppressed[source] += 1
            return
        self._remember(source, finding)
        self.counts[finding.severity] += 1
        log.log(
            logging.INFO if finding.resolved else _LEVELS[finding.severity],
            "over: %s" if finding.resolved else "finding: %s",
            finding.name,
            extra={"source": source, "component": finding.component, "summary": finding.summary},
        )
        lost = self._outbox.dropped
        seq = self._outbox.put((source, finding))
        if self._outbox.dropped > lost == 0:
            log.error("findings are lost: no coordinator has taken any for too long")
        self._send(NodeFinding(seq=seq, finding=finding, plugin=source))

    def resend(self) -> None:
        """Send everything that was not acknowledged, oldest first."""
        for seq, (source, finding) in self._outbox.pending():
            self._send(NodeFinding(seq=seq, finding=finding, plugin=source))

    def ack(self, seq: int) -> None:
        """Forget what the coordinator has journaled."""
        self._outbox.ack(seq)

    @property
    def unacknowledged(self) -> int:
        """How many the coordinator has not journaled yet."""
        return len(self._outbox)

    @property
    def dropped(self) -> int:
        """How many were lost because no coordinator took them for too long."""
        return self._outbox.dropped

    def open(self) -> list[tuple[str, Finding]]:
        """Return what is wrong now, with its source, the newest last."""
        return [(source, finding) for (source, _, _), (finding, _) in self._open.items()]

    def _is_repeat(self, source: str, finding: Finding) -> bool:
        known = self._open.get((source, finding.name, finding.component))
        if known is None:
            return False  # an end without a beginning (we restarted between) is told too
        before, told_s = known
        same = (before.severity, before.resolved) == (finding.severity, finding.resolved)
        return same and self._clock() - told_s < REPEAT_S

    def _may_speak(self, source: str) -> bool:
        now_s = self._clock()
        if source not in self._allowances:
            self._allowances[source] = Allowance(now_s, burst=_BURST, per_s=_PER_S)
        if self._allowances[source].spend(1, now_s=now_s) >= 0:
            return True
        if source not in self._loud:
            self._loud.add(source)
            log.warning("findings held back", extra={"source": source, "limit_per_s": _PER_S})
        return False

    def _remember(self, source: str, finding: Finding) -> None:
        key = (source, finding.name, finding.component)
        self._open.pop(key, None)
        if finding.resolved or finding.severity == "info":
            return
        self._open[key] = (finding, self._clock())
        if len(self._open) > _MAX_OPEN:
            self._open.pop(next(iter(self._open)))
