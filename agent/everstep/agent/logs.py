"""Logs to stderr, one line an event: the event's name, then key=value for what it carries."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import TextIO

_PLAIN = re.compile(r"[\w.:/@%+,\[\]-]+")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PRIORITY = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


class KeyValue(logging.Formatter):
    """Formats a record with its `extra` fields; `journal` puts the syslog priority in front."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__("%(asctime)s", "%Y-%m-%dT%H:%M:%S")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, or several when there is a traceback."""
        extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        pairs = [f"{key}={shown(value)}" for key, value in extra.items()]
        line = " ".join([record.levelname.lower(), shown_event(record.getMessage()), *pairs])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if self._journal:
            mark = f"<{next((p for level, p in _PRIORITY if record.levelno >= level), 7)}>"
            return "\n".join(mark + part for part in line.splitlines())
        return f"{self.formatTime(record, self.datefmt)} {line}"


def shown(value: object) -> str:
    """Return a value so that it stays one word of the line.

    >>> shown(0.5), shown("two words")
    ('0.5', '"two words"')
    """
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def shown_event(text: str) -> str:
    r"""Return the event on one line, whatever a peer put into it.

    >>> shown_event("gone\n<0>forged")
    'gone\\n<0>forged'
    """
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def set_up(*, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all logs of this process to stderr, in the journal's form unless it is a terminal."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(KeyValue(journal=not stream.isatty()))
    logging.basicConfig(level=level, handlers=[handler], force=True)
