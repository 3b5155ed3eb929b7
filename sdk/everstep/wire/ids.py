"""Names that cross process boundaries: snapshot ids and where the agent's socket is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

# One spelling each: ids are compared as text and name files.
_SNAPSHOT = re.compile(r"s([0-9]{6}|[1-9][0-9]{6,})-g(0|[1-9][0-9]*)")


class SnapshotId(NamedTuple):
    """Step and generation: after a rollback the same step exists twice.

    >>> str(SnapshotId(120, 7))
    's000120-g7'
    >>> SnapshotId.parse("s000120-g7")
    SnapshotId(step=120, generation=7)
    """

    step: int
    generation: int

    def __str__(self) -> str:
        return f"s{self.step:06d}-g{self.generation}"

    def place(self) -> tuple[int, int]:
        """Return what sorts oldest first: a later generation's is newer, whatever its step."""
        return (self.generation, self.step)

    @classmethod
    def parse(cls, text: str) -> SnapshotId:
        """Return the id in `text`. Raises ValueError with the form that is expected."""
        match = _SNAPSHOT.fullmatch(text)
        if not match:
            raise ValueError(f"{text!r} is not a snapshot id such as s000120-g7")
        return cls(int(match[1]), int(match[2]))


def agent_socket(environ: Mapping[str, str]) -> Path:
    """Return where the agent's Unix socket is expected.

    `$EVERSTEP_SOCKET`, else /run/everstep/agent.sock if it exists, else
    `$XDG_RUNTIME_DIR/everstep/agent.sock` if that folder is set, else /run/everstep/agent.sock.
    """
    if named := environ.get("EVERSTEP_SOCKET"):
        return Path(named)
    system = Path("/run/everstep/agent.sock")
    if system.exists() or not environ.get("XDG_RUNTIME_DIR"):
        return system
    return Path(environ["XDG_RUNTIME_DIR"]) / "everstep" / "agent.sock"
