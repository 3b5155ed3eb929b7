"""Private folders in which Unix sockets can be bound, wherever temporary files go."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_LONGEST_BYTES = 107
"""Of a Unix socket's path."""


def private_folder(longest_name: str) -> Path:
    """Make a folder of one's own in $TMPDIR, or in /tmp where a socket's path would be too long.

    `longest_name` is the longest path that a socket in it will have, from the folder on. Raises
    OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix="everstep-"))
    if len(os.fsencode(folder / longest_name)) <= _LONGEST_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="everstep-", dir="/tmp"))
