"""One log line for the start of an incident and one for its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_MOST_CHARS = 300


class JournalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of an incident is written. `sample.toml` says it in the operator's words."""

    evidence: bool = True


class JournalNotifier:
    """Under systemd the daemon's log is the journal: `journalctl -u everstep-coordinator`."""

    Config = JournalConfig

    def __init__(self, config: JournalConfig) -> None:
        self._evidence = config.evidence

    def notify(self, incident: Mapping[str, object]) -> None:
        """Write the incident, whatever fields it has; those without a value are left out."""
        # A name of one's own in front: logging refuses those of its own fields.
        fields = {f"incident_{key}": value for key, value in self._flat(incident)}
        if incident.get("closed_at_s") is not None:
            log.info("incident closed", extra=fields)
        else:
            log.warning("incident opened", extra=fields)

    def _flat(self, incident: Mapping[str, object]) -> Iterator[tuple[str, object]]:
        for key, value in incident.items():
            if isinstance(value, Mapping):
                yield from ((f"{key}_{k}", _short(v)) for k, v in value.items() if _says(v))
            elif isinstance(value, list):
                if value and self._evidence:
                    yield key, "; ".join(_fact(one) for one in value)
            elif _says(value):
                yield key, _short(value)


def _fact(one: object) -> str:
    """Return a piece of evidence as `node: what`, or whatever there is of it."""
    if not isinstance(one, Mapping):
        return str(one)
    parts = [str(one[key]) for key in ("node", "what") if one.get(key)]
    return str(_short(": ".join(parts) or str(dict(one))))


def _says(value: object) -> bool:
    return value is not None and value not in ("", [])


def _short(value: object) -> object:
    if isinstance(value, str) and len(value) > _MOST_CHARS:
        return value[: _MOST_CHARS - 3] + "..."
    return value
