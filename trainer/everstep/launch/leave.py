"""How a launcher leaves: one readable line and a documented exit code, never a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn


def say(line: str) -> None:
    """Write one line for the person who started the job."""
    sys.stderr.write(f"everstep: {line}\n")
    sys.stderr.flush()


def leave(code: int, why: str) -> NoReturn:
    """End this launcher. torchrun lets SystemExit through, after stopping its ranks."""
    say(why)
    raise SystemExit(code)
