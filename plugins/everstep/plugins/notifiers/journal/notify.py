"""One log line for the start of an incident and one for its end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)


class JournalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of an incident is written. `sample.toml` says it in the operator's words."""

    evidence: bool = True


class JournalNotifier:
    """Under systemd the daemon's log is the journal: `journalctl -u everstep-coordinator`."""

    Config = JournalConfig

    def __init__(self, config: JournalConfig) -> None:
        self._evidence = config.evidence

    def notify(self, incident: Mapping[str, object]) -> None:
        """Write the incident, whatever fields it has."""
        over = incident.get("closed_at_s") is not None
        fields = {
            f"incident_{key}": value
            for key, value in incident.items()
            if value is not None and (self._evidence or key != "evidence")
        }
        if over:
            log.info("incident closed", extra=fields)
        else:
            log.warning("incident opened", extra=fields)
