"""One log line a decision."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

_TAKEN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How loud a decision is. `sample.toml` says it in the operator's words."""

    level: Literal["debug", "info", "warning", "error"] = "warning"


class LogAction:
    """The first rung of every ladder: a decision that is only written down harms nobody."""

    Config = LogConfig

    def __init__(self, config: LogConfig) -> None:
        self._level = logging.getLevelNamesMapping()[config.level.upper()]

    def act(self, decision: Mapping[str, object]) -> None:
        """Write the decision, whatever fields it has; those without a value are left out."""
        fields = {k: v for k, v in decision.items() if v is not None and v != []}
        # logging refuses the names of its own fields.
        extra = {f"decision_{k}" if k in _TAKEN else k: v for k, v in fields.items()}
        log.log(self._level, "decided", extra=extra)
