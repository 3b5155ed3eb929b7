"""How facts are printed: JSON as it came, or columns; colours and fitting on a terminal only."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple


class Styled(NamedTuple):
    """A text with a rich style, which only a terminal gets to see."""

    text: str
    style: str


Cell = str | Styled

_STYLES = {
    "healthy": "green",
    "running": "green",
    "done": "green",
    "on": "green",
    "ok": "green",
    "testing": "yellow",
    "silent": "yellow",
    "cordoned": "yellow",
    "forming": "yellow",
    "warn": "yellow",
    "warning": "yellow",
    "good": "green",
    "suspect": "yellow",
    "unfinished": "dim",
    "damaged": "red",
    "unsupported": "dim",
    "off": "dim",
    "evicted": "red",
    "broken": "red",
    "failed": "red",
    "failing": "red",
    "hung": "red",
    "missing": "red",
    "error": "red",
    "fatal": "red",
}


def state(word: str) -> Styled:
    """Return a state in its colour."""
    return Styled(word, _STYLES.get(word, ""))


def as_json(facts: Any) -> None:
    """Print facts for a program."""
    print(json.dumps(facts, indent=2))


def printable(text: str) -> str:
    r"""Return text on one line, with nothing in it that a terminal would obey.

    >>> printable("a\nb"), printable("\x1b[2Jx")
    ('a b', '\\x1b[2Jx')
    """
    line = " ".join(text.split("\n"))
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def duration(seconds: float) -> str:
    """Return a length of time in the unit that a person would use.

    >>> duration(0.25), duration(42), duration(600), duration(7300), duration(200000)
    ('0.25 s', '42.0 s', '10 min', '2.0 h', '2.3 d')
    """
    for unit, length, digits in (("d", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def say(line: str = "", *, style: str = "") -> None:
    """Print one line."""
    text = printable(line)
    if not style or not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style), soft_wrap=True)


def verbatim(text: str, *, indent: str = "  ") -> None:
    """Print text of several lines, such as a traceback, without what a terminal would obey."""
    for line in text.splitlines():
        print(f"{indent}{printable(line)}".rstrip())


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print rows in columns.

    In a pipe nothing is cut or coloured, and all columns are there; on a terminal, where room is
    scarce, those that tell nothing are left out.
    """
    if sys.stdout.isatty():
        telling = _telling(heads, rows)
        _fitted([heads[i] for i in telling], [[row[i] for i in telling] for row in rows])
        return
    cells = [list(heads), *([printable(_text(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def _telling(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Return the columns in which some row says something."""
    columns = range(len(heads))
    return [i for i in columns if not rows or any(_text(row[i]) not in ("", "-") for row in rows)]


def _fitted(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    # Only here: rich takes as long to import as everything else together.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(*heads, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*(Text(printable(_text(c)), _style(c), overflow="fold") for c in row))
    Console(highlight=False).print(grid)


def _text(cell: Cell) -> str:
    return cell.text if isinstance(cell, Styled) else cell


def _style(cell: Cell) -> str:
    return cell.style if isinstance(cell, Styled) else ""


def heading(text: str) -> None:
    """Print a line that begins a new part of the screen."""
    print()
    say(text, style="bold")


def pairs(facts: Sequence[tuple[str, Cell]]) -> None:
    """Print names with what they stand for; those with nothing are left out."""
    shown = [(name, value) for name, value in facts if _text(value)]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        say(f"{name.ljust(width)}  {_text(value)}", style=_style(value))


def moment(at_s: float) -> str:
    """Return a point in time as a person here reads it, with milliseconds."""
    at = datetime.fromtimestamp(at_s, tz=UTC).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}"


def findings(found: Sequence[dict[str, Any]]) -> None:
    """Print findings as the agent and the coordinator tell them."""
    heads = ("SINCE", "SEVERITY", "FINDING", "COMPONENT", "SUMMARY", "TO DO")
    table(
        heads,
        [
            (
                moment(one["at_s"]),
                state(one["severity"]),
                one["name"],
                one["component"],
                one["summary"],
                one["suggested_action"] or "",
            )
            for one in found
        ],
    )
