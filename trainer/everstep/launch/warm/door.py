"""What torchrun takes for its Python: an executable in a private folder, with the pool's socket."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from everstep.launch import warm
from everstep.sdk.errors import EverstepError
from everstep.wire.folder import private_folder

_LONGEST_FIRST_LINE = 250
_ROOT = Path(warm.__file__).parents[3]
_TEXT = """\
#!{python} -IS
import sys
sys.path.insert(0, {root!r})
from everstep.launch.warm.shim import main
main({pool!r})
"""


class NoDoorError(EverstepError):
    """No executable can be put anywhere here."""


class Door:
    """The folder with the executable and the place of the socket; `close` removes it."""

    def __init__(self) -> None:
        self.folder = private_folder("pool")
        self.socket = self.folder / "pool"
        self.executable = self.folder / "python"
        try:
            self._write()
        except NoDoorError:
            self.close()
            raise

    def _write(self) -> None:
        text = _TEXT.format(python=sys.executable, root=str(_ROOT), pool=str(self.socket))
        if len(text.partition("\n")[0]) > _LONGEST_FIRST_LINE or " " in sys.executable:
            raise NoDoorError(f"{sys.executable}: too long, or with a space, for a #! line")
        self.executable.write_text(text)
        self.executable.chmod(0o700)
        if not os.access(self.executable, os.X_OK):
            raise NoDoorError(f"{self.folder} allows no executables: set TMPDIR to one that does")

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
